"""Changes to a job from outside of it, whatever framework it uses: what a broken recovery would do, gates that fix an
order of events, and deaths at odd moments.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.checkpoint_interval import CheckpointInterval
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.runtime.collectives import staging
from recycle_plugin.runtime.collectives.gloo import GlooLink
from recycle_plugin.runtime.collectives.in_flight import SCRIPT, SUMS, Asked, Call, Flight
from recycle_plugin.runtime.control.heartbeats import Heartbeats
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices import accelerator
from recycle_plugin.runtime.devices.host import Cpu, Done
from recycle_plugin.runtime.devices.timeline import Timeline
from recycle_plugin.runtime.log.disk import Disk, GrowingFile
from recycle_plugin.runtime.log.records import Stream
from recycle_plugin.runtime.log.writer import LogWriter, Report
from recycle_plugin.runtime.stage import block_sums
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.stage.operations import Operations
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.stage.tied import TiedWeight
from recycle_plugin.runtime.worker import trainer as trainer_module
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.stage_log import StageLog
from recycle_plugin.runtime.worker.trainer import Trainer

DEADLINE_S = 150.0
POLL_S = 0.002
TRAINERS: list[Trainer] = []  # of this process: one, once it is made


def _note_trainer() -> None:
    make = Trainer.__init__

    def changed(self: Trainer, *given: object) -> None:
        TRAINERS.append(self)
        make(self, *given)

    Trainer.__init__ = changed


_note_trainer()


# --- ways through the code --------------------------------------------------------------------------


def note_way(folder: str, at: str) -> None:
    """The packages of ours that call each other from the script's train_batch to the model's forward in the instruction
    ``at``, outermost first, and how many calls of ours that is, stand in a file.
    """
    forward = Stage.forward

    def changed(self: Stage, key, *given):
        step, micro_batch = key
        if f"F{micro_batch}@{step}" == at:
            frames = [frame.filename.partition("recycle_plugin/")[2] for frame in reversed(inspect.stack())]
            inside = frames[
                next(place for place, name in enumerate(frames) if name.startswith("adapters/deepspeed/engine")) :
            ]
            packages = [name.split("/")[0] for name in inside if name]
            crossed = [name for name, before in zip(packages, ["", *packages]) if name != before]
            Path(folder, f"way-{os.environ['RANK']}.json").write_text(
                json.dumps({"packages": crossed, "calls": len(packages)})
            )
        return forward(self, key, *given)

    Stage.forward = changed


# --- negative controls ------------------------------------------------------------------------------


def scale_micro_batch(micro_batch: str, step: int, factor: float) -> None:
    """The micro-batch counts ``factor`` times in ``step``: 0 drops it, 2 doubles it."""
    compute = Stage.compute

    def changed(self: Stage, instruction, have, boundary_only: bool) -> dict:
        made = compute(self, instruction, have, boundary_only)
        if (instruction.op, instruction.step, str(instruction.micro_batch)) == (
            Op.F,
            step,
            micro_batch,
        ) and self._model.last:
            (stash,) = (datum for datum in made if datum.kind == "stash")
            made[stash] = replace(made[stash], loss=factor * made[stash].loss)
        return made

    Stage.compute = changed


def divide_by_live() -> None:
    """Gradients are averaged over the stage's live workers instead of its logical ones."""
    add_up, live = Operations.add_up, []

    def changed(self: Operations, instruction, have, *given) -> list[torch.Tensor] | None:
        made = add_up(self, instruction, have, *given)
        if instruction.op is Op.REDUCE:
            live.append(len(self._session.roster.stage(instruction.stage)))  # the first time all are
            for gradient in made or ():
                gradient *= live[0] / live[-1]
        return made

    Operations.add_up = changed


def scale_tied(stage: int, factor: float) -> None:
    """What ``stage`` brings to the sums over the stages that share weights counts ``factor`` times: 0 leaves it out, 2
    counts it twice.
    """
    total = TiedWeight.total

    def changed(self: TiedWeight, own: torch.Tensor) -> torch.Tensor:
        mine = self._session.roster.member(self._session.worker).seat.stage
        return total(self, factor * own if mine == stage else own)

    TiedWeight.total = changed


def overflow(at: list[str]) -> None:
    """What the weight gradients ``at`` make, whoever runs them, is not finite."""
    compute = Operations.compute

    def changed(self: Operations, instruction, have, *given) -> dict:
        made = compute(self, instruction, have, *given)
        if str(instruction) in at:
            self._stepping._parameters[0].grad.view(-1)[0] = float("inf")
        return made

    Operations.compute = changed


def overflow_in_half(at: list[str]) -> None:
    """In the weight gradients ``at``, whoever runs them, one of half precision is infinite; where an I has made them
    all, one of the sum.
    """
    compute, collect, due = Operations.compute, Masters.collect, []

    def changed(self: Operations, instruction, have, *given) -> dict:
        due[:] = [str(instruction)] * (str(instruction) in at)
        return compute(self, instruction, have, *given)

    def infinite(self: Masters) -> None:
        if due:
            gradients = (each.grad for each in (*self.weights, *self.parameters))
            next(each for each in gradients if each is not None).view(-1)[0] = float("inf")
        collect(self)

    Operations.compute, Masters.collect = changed, infinite


def keep_rejected(**gated: object) -> None:
    """What was computed with rejected weights is used, and not replaced by what comes later; ``gated``: see
    :func:`gate`.
    """
    gate(**gated)
    arrive = StepStore.arrive
    Worker.discard_after = lambda self, after, valid_from: None
    StepStore.arrive = lambda self, datum, *come: False if datum in self else arrive(self, datum, *come)


def masks_by_worker() -> None:
    """Random numbers are keyed by who runs a micro-batch: a peer that takes it over draws another mask."""
    rank = int(os.environ["RANK"])
    replicas = 2
    key = trainer_module.key

    def changed(seed: int, step: int, micro_batch, stage: int, half: str = "") -> int:
        own = rank == stage * replicas + micro_batch.replica
        return key(seed if own else seed + 1, step, micro_batch, stage, half)

    trainer_module.key = changed


# --- logs ---------------------------------------------------------------------------------------------


def log_apart(by: str) -> None:
    """Each worker's log is in a folder of its rank's, of its host's, or of all."""
    begin = StageLog.__init__

    def changed(self: StageLog, session: Session, framework, settings, run_dir: str) -> None:
        whose = {"rank": f"rank{session.rank}", "host": session.host}.get(by, by)
        begin(self, session, framework, settings.model_copy(update={"folder": f"{run_dir}/log-of-{whose}"}), run_dir)

    StageLog.__init__ = changed


def killed_in_rotation(rank: int, number: int, segment_bytes: int) -> None:
    """Segments of logs are small, and the first process of ``rank`` dies between one that is sealed, its ``number``-th,
    and the next.
    """
    begin = LogWriter.__init__

    class Dying(Disk):
        def __init__(self) -> None:
            self._left = number

        def create(self, path: Path) -> GrowingFile:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().create(path)

    def changed(self: LogWriter, folder: Path, stream: Stream, budget: int, report: Report) -> None:
        disk = Dying() if stream.worker == WorkerId(rank, 0) else Disk()
        begin(self, folder, stream, budget, report, segment_bytes, disk)

    LogWriter.__init__ = changed


# --- order of events --------------------------------------------------------------------------------


def gate(folder: str, before: str, until: str, by: list[str]) -> None:
    """Whoever is about to run ``before`` waits until the seats ``by`` have run ``until``; and these, having run it,
    wait for each other: one of them may die then, which would keep another from running it.
    """
    reach = TorchMachine.reach
    flags = Path(folder)
    flags.mkdir(parents=True, exist_ok=True)

    def changed(self: TorchMachine, when: str, seat=None, instruction=None) -> None:
        if (when, str(instruction)) == ("after", until):
            (flags / str(seat)).touch()
        if (when, str(instruction)) == ("before", before) or (when, str(instruction), str(seat) in by) == (
            "after",
            until,
            True,
        ):
            wait_until(lambda: all((flags / name).exists() for name in by), f"{until} by {by}")
        reach(self, when, seat, instruction)

    TorchMachine.reach = changed


def replay_beside() -> None:
    """Whoever replays its stage does not begin before another newcomer of it is there, and waits for that."""
    gather = Helpers.gather

    def changed(self: Helpers):
        wait_until(lambda: bool(self._machine.control_view.beside), "a second newcomer of the stage")
        yield from gather(self)

    Helpers.gather = changed


def lose_result(seats: list[str], reduce: str, folder: str = "", before: str = "", by: list[str] = ()) -> None:
    """``seats`` take part in the collective of ``reduce``, whose result the others get, and a membership change comes
    before they have it themselves.  ``before``, ``by``: a gate, so that whoever is about to run that waits until these
    have the result.
    """
    if by:
        gate(folder, before, reduce, by)
    collective = Gradients._sum

    def changed(self: Gradients, bucket, step: int, *of: object) -> torch.Tensor:
        made, (trainer,) = collective(self, bucket, step, *of), TRAINERS
        if (
            str(trainer.seat) in seats
            and f"{trainer.seat.stage}REDUCE@{step}" == reduce
            and not trainer.program.resumed
        ):
            trainer._session.wait("a membership change", lambda: None)
        return made

    Gradients._sum = changed


def lose_tied(seats: list[str], step: int) -> None:
    """``seats`` take part in the TIE of ``step``, whose result the others get, and a membership change comes before
    they have it themselves.
    """
    tie = Gradients.tie

    def changed(self: Gradients, of: int) -> dict[int, torch.Tensor]:
        (trainer,) = TRAINERS
        if str(trainer.seat) in seats and of == step and not trainer.program.resumed:
            for place, weight in self._tied.items():
                weight.total(self._whole(step)[place])
            trainer._session.wait("a membership change", lambda: None)
        return tie(self, of)

    Gradients.tie = changed


def wait_until(ready, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)


def flip_bit(seat: str, step: int) -> None:
    """The lowest bit of one of the worker's parameters turns round before ``step``."""
    execute = Worker.execute

    def changed(self: Worker, program):
        if str(self.seat) == seat and program.step == step and not program.resumed:
            self._machine.operations._stepping._parameters[0].data.view(torch.int32).view(-1)[3] ^= 1
        return execute(self, program)

    Worker.execute = changed


# --- slow and stuck workers --------------------------------------------------------------------------


def slow(seat: str, times: float, steps: list[int]) -> None:
    """From the first to the last of ``steps`` the worker at ``seat`` needs ``times`` as long to compute, all others as
    long as they do: by the clock of each worker's device, which nothing else moves.
    """
    start, now = Timeline.start, [0.0]

    def changed(self: Timeline, instruction: Instruction, begin: Callable[[], dict]) -> dict:
        def spent() -> dict:
            slowly = str(TRAINERS[0].seat) == seat and steps[0] <= instruction.step <= steps[1]
            now[0] += 0.001 * (times if slowly else 1) * (instruction.op in COMPUTE)
            return begin()

        return start(self, instruction, spent)

    Timeline.start, Cpu.event = changed, lambda self, what: Done(now[0])


def linger(seat: str, seconds: float, step: int, only: str = "", computes: bool = False) -> None:
    """The worker at ``seat``, or whoever does it, spends ``seconds`` in each compute instruction of ``step``, or in the
    instruction ``only``: asleep, or computing.
    """
    compute = Operations.compute

    def changed(self: Operations, instruction, have, *given) -> dict:
        if (
            seat in ("", str(have.seat))
            and instruction.step == step
            and instruction.op in COMPUTE
            and only in ("", str(instruction))
        ):
            until = time.monotonic() + seconds
            while computes and time.monotonic() < until:
                pass
            time.sleep(max(until - time.monotonic(), 0.0))
        return compute(self, instruction, have, *given)

    Operations.compute = changed


def lag(seat: str, seconds: float, last: int) -> None:
    """The worker at ``seat``, whichever process that is, sleeps for ``seconds`` in each forward up to step ``last``."""
    compute = Operations.compute

    def changed(self: Operations, instruction, have, *given) -> dict:
        if seat == str(have.seat) and instruction.op is Op.F and 0 < instruction.step <= last:
            time.sleep(seconds)
        return compute(self, instruction, have, *given)

    Operations.compute = changed


def swallow(seat: str, only: str, times: int) -> None:
    """What the worker at ``seat`` is to send in the instruction ``only`` is gone without a trace, so many ``times``."""
    transfer, perform, left = TorchMachine.transfer, TorchMachine.performing, [True] * times

    def performing(self: TorchMachine, instruction):
        self.swallows = str(instruction) == only
        return perform(self, instruction)

    def changed(self: TorchMachine, datum, value, target, valid_from) -> None:
        if str(TRAINERS[0].seat) == seat and self.swallows and left:
            left.pop()
        else:
            transfer(self, datum, value, target, valid_from)

    TorchMachine.transfer, TorchMachine.performing = changed, performing


def stop_after(seat: str, step: int) -> None:
    """The script of the worker at ``seat`` has enough after ``step``."""
    train = Trainer.train

    def changed(self: Trainer) -> float:
        loss = train(self)
        if str(self.seat) == seat and self.step == step:
            sys.exit()
        return loss

    Trainer.train = changed


def helped(every: int) -> None:
    """Each worker has a pool, and a loader with workers, and uses them after every so many steps."""
    train = Trainer.train
    data = torch.utils.data.TensorDataset(torch.arange(8.0))

    def changed(self: Trainer) -> float:
        loss = train(self)
        if self.step % every == 0:
            with multiprocessing.Pool(2) as pool:
                assert pool.map(abs, range(-3, 0)) == [3, 2, 1]
            assert sum(each.sum().item() for (each,) in torch.utils.data.DataLoader(data, num_workers=2)) == 28.0
        return loss

    Trainer.train = changed


def restless(unit_s: float, times: float, first_s: float, pauses: list[int], pause_s: float) -> None:
    """Every computation takes ``unit_s`` longer, or up to ``times`` that; the first one ``first_s``; before the steps
    ``pauses`` replica 0's data come ``pause_s`` late.
    """
    compute, random = Operations.compute, Random(int(os.environ["RANK"]))
    late = {f"0LOAD0.0@{step}" for step in pauses}

    def changed(self: Operations, instruction, have, *given) -> dict:
        if instruction.op in COMPUTE:
            time.sleep(first_s if str(instruction) == "0F0.0@1" else unit_s * random.uniform(1, times))
        elif str(instruction) in late:
            time.sleep(pause_s)
        return compute(self, instruction, have, *given)

    Operations.compute = changed


def break_sum(seat: str, step: int, times: int) -> None:
    """The first ``times`` that the worker at ``seat`` begins its stage's sum of ``step``, the connections to the others
    break.
    """
    add_up, start, left, due = Operations.add_up, GlooLink.start, [True] * times, []

    def changed(self: Operations, instruction, have, *given):
        if left and (str(have.seat), instruction.op, instruction.step) == (seat, Op.REDUCE, step):
            due.append(left.pop())
        return add_up(self, instruction, have, *given)

    def broken(self: GlooLink, operation):
        if due:
            due.pop()
            self.connect().wait(60)
            _shut(self._opened)
        return start(self, operation)

    Operations.add_up, GlooLink.start = changed, broken


def die_within_sum(seat: str, step: int, after: int, folder: str) -> None:
    """Sums are made a parameter at a time, and the worker at ``seat`` dies in that of ``step``, once it has ``after``
    of them.  A peer whose sum is interrupted writes to folder/<seat> whether its contributions, and all that a step
    changes, are bit for bit as they were before.
    """
    one, reduce, made = Gradients._sum, Gradients.reduce, []

    def bits(trainer: Trainer) -> list:
        grads = [None if each.grad is None else each.grad.clone() for each in trainer._framework.parameters]
        return [trainer.state.digest(), grads]

    def summed(self: Gradients, bucket, of: int, *given) -> torch.Tensor:
        if str(self._store.seat) == seat and of == step and len(made) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        made.append(of)
        return one(self, bucket, of, *given)

    def watched(self: Gradients, of: int, *given) -> list | None:
        made.clear()
        (trainer,) = TRAINERS
        before = bits(trainer)
        try:
            return reduce(self, of, *given)
        except Interrupted:
            (digest, grads), (now, their) = before, bits(trainer)
            same = digest == now and all(
                (a is b is None) or torch.equal(a, b) for a, b in zip(grads, their, strict=True)
            )
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / str(self._store.seat)).write_text(f"{len(made)} {same}")
            raise

    Gradients._cut = lambda self: [[parameter] for parameter in self._parameters]
    Gradients._sum, Gradients.reduce = summed, watched


def _shut(inodes: set[int]) -> None:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.stat(f"/proc/self/fd/{descriptor}").st_ino in inodes:
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed meanwhile, or a listener


def cut_line(seat: str, step: int) -> None:
    """From ``step`` on nothing gets through between the worker at ``seat`` and the coordinator, and neither end sees a
    broken line.
    """
    execute, send, take, heard = Worker.execute, Session.send, Session.take, Heartbeats.heard
    cut = []

    def changed(self: Worker, program):
        if str(self.seat) == seat and program.step == step:
            cut.append(True)
        return execute(self, program)

    Worker.execute = changed
    for owner, name, function in ((Session, "send", send), (Session, "take", take), (Heartbeats, "heard", heard)):
        setattr(owner, name, lambda self, message, function=function: None if cut else function(self, message))


# --- several hosts -----------------------------------------------------------------------------------


def checkpoint_every(steps: int) -> None:
    """Automatic checkpoints come every so many steps, whatever they cost."""
    made = CheckpointInterval.made

    def changed(self: CheckpointInterval, begun: int, costs, free: int) -> None:
        made(self, begun, costs, free)
        self.every, self.due = steps, max(begun + steps, free)

    CheckpointInterval.made = changed


def save_each(folder: str, steps: int) -> None:
    """A checkpoint every ``steps`` steps; who has saved one notes its step in folder/seat<replica.stage>.txt."""
    train = Trainer.train

    def changed(self: Trainer) -> float:
        loss = train(self)
        if self.step % steps == 0:
            self.save(Path(folder), f"step{self.step}")
            with (Path(folder) / f"seat{self.seat}.txt").open("a") as file:
                file.write(f"{self.step}\n")
        return loss

    Trainer.train = changed


# --- what the engine knows --------------------------------------------------------------------------


def record_states(folder: str) -> None:
    """After each optimizer step its number and the hash of all that it changes go to folder/rank<r>.txt."""
    apply = Gradients.apply
    path = Path(folder) / f"rank{os.environ['RANK']}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)

    def changed(self: Gradients, step: int, optimizer, *others) -> None:
        apply(self, step, optimizer, *others)
        with path.open("a") as file:
            file.write(f"{step} {TRAINERS[0].state.digest()}\n")

    Gradients.apply = changed


def strike_at(moment: str, rank: int, flag: str = "") -> None:
    """At a moment before the first step or after the last one that worker, the first process of its rank, is killed;
    or, where there is a ``flag``, its number is in that file, and it waits.
    """
    owner, name, before = {
        "meeting": (torch.distributed, "init_process_group", True),
        "initialize": (Trainer, "__init__", True),
        "enrolling": (Trainer, "start", True),
        "script's end": (Trainer, "await_others", True),
        "finishing": (Trainer, "finish", True),
        "left": (Session, "leave", False),
    }[moment]
    function = getattr(owner, name)

    def strike() -> None:
        if not flag:
            os.kill(os.getpid(), signal.SIGKILL)
        Path(flag).write_text(str(os.getpid()))
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)

    def changed(*arguments: object, **named: object) -> object:
        if before:
            strike()
        result = function(*arguments, **named)
        if not before:
            strike()
        return result

    if int(os.environ["RANK"]) == rank and not int(os.environ.get("RECYCLE_INCARNATION", "0")):
        setattr(owner, name, changed)


def uneven_end(apart_s: float, steps: int) -> None:
    """Rank r's script ends r × ``apart_s`` later than the first one's."""
    train = Trainer.train

    def changed(self: Trainer) -> float:
        loss = train(self)
        if self.step == steps:
            time.sleep(apart_s * self._session.rank)
        return loss

    Trainer.train = changed


# --- the stand-in accelerator -----------------------------------------------------------------------


def break_device(rank: str, at: str) -> None:
    """The device of ``rank`` fails at its instruction ``at``, as one does that has fallen off its bus."""
    event = accelerator.Accelerator.event

    def changed(self: accelerator.Accelerator, what: object) -> accelerator.StreamEvent:
        if os.environ["RANK"] == rank and str(what) == at:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return event(self, what)

    accelerator.Accelerator.event = changed


def small_pieces(seat: str, step: int, after: int) -> None:
    """Sums go through the host in pieces of 100 numbers, and the worker at ``seat`` dies in a sum of ``step``, once
    ``after`` of them are under way or over.
    """
    begin, begun = Flight.begin, Counter()
    staging.SUM_PIECE = block_sums.SUM_PIECE = 100

    def changed(self: Flight, asked: Asked, link: str = SCRIPT) -> Call:
        now = self._session.work
        if link == SUMS and str(TRAINERS[0].seat) == seat and now.step == step:
            begun[now.step] += 1
            if begun[now.step] > after:
                os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, asked, link)

    Flight.begin = changed


def watch_device(folder: str, after: int, until: int) -> None:
    """Behind step ``after``, until ``until`` is trained: what stops the host until the stand-in is done, which of the
    plugin's own waits for it there are, and whether its generators are as they were, in a file for each worker.
    """
    train, await_event = Trainer.train, accelerator.await_event
    waits: Counter[str] = Counter()
    generators = []

    def counted(event: object, what: object, timeout_s: float) -> None:
        waits["an instruction" if isinstance(what, Instruction) else str(what)] += 1
        await_event(event, what, timeout_s)

    def trained(self: Trainer) -> float:
        from tests.support import standin

        loss = train(self)
        if self.step == after:
            standin.reset_synchronisations()
            waits.clear()
            generators.append(standin.generators_digest())
        if self.step == until:
            found = {
                "synchronisations": [[*each, count] for each, count in standin.synchronisations().items()],
                "waits": waits,
                "generators": [standin.generators_digest()] == generators,
            }
            Path(folder, f"{self.seat}.json").write_text(json.dumps(found))
        return loss

    accelerator.await_event, Trainer.train = counted, trained
