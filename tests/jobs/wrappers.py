"""Changes to a job from outside of it: what a broken recovery would do, and gates that fix an order of events."""

from __future__ import annotations

import inspect
import io
import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe import p2p, topology

from recycle_plugin.adapters.deepspeed import checkpoint
from recycle_plugin.adapters.deepspeed import engine as engine_module
from recycle_plugin.adapters.deepspeed.engine import RecycleEngine
from recycle_plugin.compose import Job
from recycle_plugin.core.instruction import COMPUTE, Op
from recycle_plugin.core.stepstore import StepStore
from recycle_plugin.core.worker import Worker
from recycle_plugin.runtime.gloo import GlooLink
from recycle_plugin.runtime.heart import Heart
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.tied import TiedWeight
from recycle_plugin.runtime.worker.gradients import Gradients
from recycle_plugin.runtime.worker.operations import Operations
from recycle_plugin.runtime.worker.stage import Stage
from recycle_plugin.runtime.world import TorchMachine

DEADLINE_S = 150.0
POLL_S = 0.002
UNIT_S = 0.05  # more than an instruction of the tests' jobs takes


# --- configuration ----------------------------------------------------------------------------------


def with_config(**sections: dict) -> None:
    """The job's DeepSpeed config has ``sections`` besides."""
    made = Job.deepspeed_config
    Job.deepspeed_config = lambda self: made(self) | sections


# --- the model --------------------------------------------------------------------------------------


class Mixer(torch.nn.Linear):
    """A linear layer beside the identity; its bias is not tied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def mixers(after: list[int]) -> None:
    """Behind each of these layers of the job's GPT stands another one, all with one weight."""
    from recycle_plugin.adapters.megatron import gpt

    made = gpt.gpt_layers

    def changed(shape: gpt.GPTShape, *others: object, **named: object) -> list:
        specs = made(shape, *others, **named)
        for place in sorted(after, reverse=True):
            specs.insert(place + 1, TiedLayerSpec("mixer", Mixer, shape.hidden, shape.hidden))
        return specs

    gpt.gpt_layers = changed


# --- ways through the code --------------------------------------------------------------------------


def note_way(folder: str, at: str) -> None:
    """The packages of ours that call each other from the script's train_batch to the model's forward in the instruction ``at``, outermost first, and how many
    calls of ours that is, stand in a file."""
    forward = Stage.forward

    def changed(self: Stage, key, *given):
        step, micro_batch = key
        if f"F{micro_batch}@{step}" == at:
            frames = [frame.filename.partition("recycle_plugin/")[2] for frame in reversed(inspect.stack())]
            inside = frames[next(place for place, name in enumerate(frames) if name.startswith("adapters/deepspeed/engine")) :]
            packages = [name.split("/")[0] for name in inside if name]
            crossed = [name for name, before in zip(packages, ["", *packages]) if name != before]
            Path(folder, f"way-{os.environ['RANK']}.json").write_text(json.dumps({"packages": crossed, "calls": len(packages)}))
        return forward(self, key, *given)

    Stage.forward = changed


# --- negative controls ------------------------------------------------------------------------------


def scale_micro_batch(micro_batch: str, step: int, factor: float) -> None:
    """The micro-batch counts ``factor`` times in ``step``: 0 drops it, 2 doubles it."""
    compute = Stage.compute

    def changed(self: Stage, instruction, have, bare: bool) -> dict:
        made = compute(self, instruction, have, bare)
        if (instruction.op, instruction.step, str(instruction.micro_batch)) == (Op.F, step, micro_batch) and self._model.last:
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
    """What ``stage`` brings to the sums over the stages that share weights counts ``factor`` times: 0 leaves it out, 2 counts it twice."""
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


def keep_rejected(**gated: object) -> None:
    """What was computed with rejected weights is used, and not replaced by what comes later; ``gated``: see :func:`gate`."""
    gate(**gated)
    arrive = StepStore.arrive
    Worker.void = lambda self, after, era: None
    StepStore.arrive = lambda self, datum, *come: False if datum in self else arrive(self, datum, *come)


def fp16_section(section: dict) -> None:
    """The DeepSpeed config has this section besides."""
    config = Job.deepspeed_config
    Job.deepspeed_config = lambda self: {**config(self), "fp16": section}


def masks_by_worker() -> None:
    """Random numbers are keyed by who runs a micro-batch: a peer that takes it over draws another mask."""
    rank = int(os.environ["RANK"])
    replicas = 2
    key = engine_module.key

    def changed(seed: int, step: int, micro_batch, stage: int, half: str = "") -> int:
        own = rank == stage * replicas + micro_batch.replica
        return key(seed if own else seed + 1, step, micro_batch, stage, half)

    engine_module.key = changed


# --- order of events --------------------------------------------------------------------------------


def gate(folder: str, before: str, until: str, by: list[str]) -> None:
    """Whoever is about to run ``before`` waits until the seats ``by`` have run ``until``."""
    reach = TorchMachine.reach
    flags = Path(folder)
    flags.mkdir(parents=True, exist_ok=True)

    def changed(self: TorchMachine, when: str, seat=None, instruction=None) -> None:
        if (when, str(instruction)) == ("after", until):
            (flags / str(seat)).touch()
        if (when, str(instruction)) == ("before", before):
            _wait(lambda: all((flags / name).exists() for name in by), f"{until} by {by}")
        reach(self, when, seat, instruction)

    TorchMachine.reach = changed


def lose_result(seats: list[str], reduce: str, folder: str = "", before: str = "", by: list[str] = ()) -> None:
    """``seats`` take part in the collective of ``reduce``, whose result the others get, and a membership change comes before they
    have it themselves.  ``before``, ``by``: a gate, so that whoever is about to run that waits until these have the result.
    """
    if by:
        gate(folder, before, reduce, by)
    collective = Gradients._sum

    def changed(self: Gradients, bucket, step: int, *of: object) -> torch.Tensor:
        made, engine = collective(self, bucket, step, *of), self._buckets._engine
        if str(engine.seat) in seats and f"{engine.stage_id}REDUCE@{step}" == reduce and not engine._worker.program.resumed:
            engine._job.session.wait("a membership change", lambda: None)
        return made

    Gradients._sum = changed


def lose_tied(seats: list[str], step: int) -> None:
    """``seats`` take part in the TIE of ``step``, whose result the others get, and a membership change comes before they have it themselves."""
    tie = Gradients.tie

    def changed(self: Gradients, of: int) -> dict[int, torch.Tensor]:
        engine = self._buckets._engine
        if str(engine.seat) in seats and of == step and not engine._worker.program.resumed:
            for place, weight in self._tied.items():
                weight.total(self._whole(step)[place])
            engine._job.session.wait("a membership change", lambda: None)
        return tie(self, of)

    Gradients.tie = changed


def hold_files(folder: str) -> None:
    """Whoever has a checkpoint's file to write waits for the file ``folder``/go."""
    save = checkpoint.Durable.save

    def changed(self, state_dict, path: str) -> None:
        _wait((Path(folder) / "go").exists, f"{folder}/go")
        save(self, state_dict, path)

    checkpoint.Durable.save = changed


def _wait(ready, what: str) -> None:
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


def flip_loaded(seat: str) -> None:
    """The lowest bit of one of the worker's parameters turns round while it loads a checkpoint."""
    load = RecycleEngine._load_beside

    def changed(self: RecycleEngine, path: Path, with_optimizer: bool) -> None:
        load(self, path, with_optimizer)
        if str(self.seat) == seat:
            self._parameters[0].data.view(torch.int32).view(-1)[3] ^= 1

    RecycleEngine._load_beside = changed


# --- what scripts do with weights between steps -------------------------------------------------------


def _parameters_of(engine: RecycleEngine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for _, parameter in engine.module.named_parameters()]


def _saved(engine: RecycleEngine) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(list(engine.module.parameters()), file)
    file.seek(0)
    return [parameter.detach() for parameter in torch.load(file, weights_only=False)]


def _evaluated(engine: RecycleEngine) -> list[torch.Tensor]:
    """By hand, first in another precision; the smallest GPT's shapes."""
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    given = torch.arange(16)[None] if engine.is_first_stage() else torch.linspace(-1, 1, 256, dtype=dtype).view(16, 1, 16)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.module(given)
        return [engine.module(given)]


def _moments(engine: RecycleEngine) -> list[torch.Tensor]:
    return [state["exp_avg"].clone() for state in engine.basic_optimizer.state.values()]


def _averaged(engine: RecycleEngine) -> list[torch.Tensor]:
    trained = list(engine.module.parameters())
    averages = vars(engine).setdefault("averages", [torch.zeros_like(parameter, requires_grad=False) for parameter in trained])
    with torch.no_grad():
        torch._foreach_lerp_(averages, trained, 0.1)
    return [average.clone() for average in averages]


def _shrunk(engine: RecycleEngine) -> list[torch.Tensor]:
    """A write."""
    for parameter in engine.module.parameters():
        parameter.data.mul_(0.999)
    return _parameters_of(engine)


def touch_weights(folder: str, alone: str, flag_at: int = 0) -> None:
    """After each step a script reads and writes weights, each time in another order: what it found goes to folder/seat<replica.stage>.pt.  After every third
    step only the seat ``alone`` reads, and nobody writes; every second time the others wait for it in a collective.  Before that of step ``flag_at`` folder/<seat> is made."""
    train, ways, found = RecycleEngine.train_batch, [_parameters_of, _saved, _evaluated, _moments, _averaged, _shrunk], {}
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)

    def changed(self: RecycleEngine, data_iter=None) -> torch.Tensor:
        loss = train(self, data_iter)
        step, together = self.global_steps, self.global_steps % 3 > 0
        if step == flag_at:
            (place / str(self.seat)).touch()
        self.module.eval()
        if together or str(self.seat) == alone:
            mine = ways if together else ways[:-1]
            first = step % len(mine)
            found[step] = {way.__name__: way(self) for way in mine[first:] + mine[:first]}
        if step % 6 == 3:
            torch.distributed.barrier()
        torch.save(found, place / f"seat{self.seat}.pt")
        return loss

    RecycleEngine.train_batch = changed


def wait_for_reader(folder: str, alone: str) -> None:
    """After each step the script's workers wait, where the plugin does not see it, until the one at ``alone`` has read its weights."""
    train = RecycleEngine.train_batch
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)

    def changed(self: RecycleEngine, data_iter=None) -> torch.Tensor:
        loss, flag = train(self, data_iter), place / f"step{self.global_steps}"
        if str(self.seat) == alone:
            _parameters_of(self)
            flag.touch()
        _wait(flag.exists, str(flag))
        return loss

    RecycleEngine.train_batch = changed


# --- slow and stuck workers --------------------------------------------------------------------------


def slow(seat: str, times: float, steps: list[int]) -> None:
    """From the first to the last of ``steps`` the worker at ``seat`` needs ``times`` as long to compute, all others as long as they do."""
    compute = Operations.compute

    def changed(self: Operations, instruction, have, *given) -> dict:
        start = time.monotonic()
        made = compute(self, instruction, have, *given)
        if instruction.op in COMPUTE:
            slowly = str(have.seat) == seat and steps[0] <= instruction.step <= steps[1]
            time.sleep(UNIT_S * (times if slowly else 1) - min(time.monotonic() - start, UNIT_S))
        return made

    Operations.compute = changed


def linger(seat: str, seconds: float, step: int, only: str = "") -> None:
    """The worker at ``seat`` spends ``seconds`` in each compute instruction of ``step``, or in the instruction ``only``."""
    compute = Operations.compute

    def changed(self: Operations, instruction, have, *given) -> dict:
        if str(have.seat) == seat and instruction.step == step and instruction.op in COMPUTE and only in ("", str(instruction)):
            time.sleep(seconds)
        return compute(self, instruction, have, *given)

    Operations.compute = changed


def restless(unit_s: float, times: float, first_s: float, pauses: list[int], pause_s: float) -> None:
    """Every computation takes ``unit_s`` longer, or up to ``times`` that; the first one ``first_s``; before the steps ``pauses`` replica 0's data come
    ``pause_s`` late."""
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
    """The first ``times`` that the worker at ``seat`` begins its stage's sum of ``step``, the connections to the others break."""
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
    """From ``step`` on nothing gets through between the worker at ``seat`` and the coordinator, and neither end sees a broken line."""
    execute, send, take, heard = Worker.execute, Session.send, Session.take, Heart.heard
    cut = []

    def changed(self: Worker, program):
        if str(self.seat) == seat and program.step == step:
            cut.append(True)
        return execute(self, program)

    Worker.execute = changed
    for owner, name, function in ((Session, "send", send), (Session, "take", take), (Heart, "heard", heard)):
        setattr(owner, name, lambda self, message, function=function: None if cut else function(self, message))


# --- several hosts -----------------------------------------------------------------------------------


def a_replica_a_host() -> None:
    """Ranks go through a replica's stages first: where a host has as many as there are stages, it has one replica."""
    topology.PipeDataParallelTopology = lambda num_pp, num_dp: topology.ProcessTopology(axes=["data", "pipe"], dims=[num_dp, num_pp])


def config_file() -> None:
    """The script takes --deepspeed_config FILE, whose "recycle" section goes before what else the job says."""
    place = sys.argv.index("--deepspeed_config")
    section = json.loads(Path(sys.argv[place + 1]).read_text())["recycle"]
    del sys.argv[place : place + 2]
    made = Job.deepspeed_config
    Job.deepspeed_config = lambda self: (config := made(self)) | {"recycle": config["recycle"] | section}


def save_each(folder: str, steps: int) -> None:
    """A checkpoint every ``steps`` steps; who has saved one notes its step in folder/seat<replica.stage>.txt."""
    train = RecycleEngine.train_batch

    def changed(self: RecycleEngine, data_iter=None) -> torch.Tensor:
        loss = train(self, data_iter)
        if (step := self._loop.machine.stepped) % steps == 0:
            self.save_checkpoint(folder, tag=f"step{step}")
            with (Path(folder) / f"seat{self.seat}.txt").open("a") as file:
                file.write(f"{step}\n")
        return loss

    RecycleEngine.train_batch = changed


# --- what the engine knows --------------------------------------------------------------------------


def record_norms(folder: str) -> None:
    """At each clipping by a norm that is known, that norm, this stage's own sum of squares, and that of what other stages have too, go to folder/rank<r>.txt."""
    clip = RecycleEngine.clip_fp32_gradients
    path = Path(folder) / f"rank{os.environ['RANK']}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)

    def changed(self: RecycleEngine) -> None:
        squares = sum(parameter.grad.double().pow(2).sum().item() for parameter in self._parameters)
        tied = sum(weight.parameter.grad.double().pow(2).sum().item() for weight in self._ties.weights)
        if self._stepping.norm() is not None:
            with path.open("a") as file:
                file.write(f"{self._stepping.norm().item()!r} {squares!r} {tied!r}\n")
        clip(self)

    RecycleEngine.clip_fp32_gradients = changed


def record_states(folder: str) -> None:
    """After each optimizer step its number and the hash of all that it changes go to folder/rank<r>.txt."""
    apply = Gradients.apply
    path = Path(folder) / f"rank{os.environ['RANK']}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)

    def changed(self: Gradients, step: int, optimizer, *others) -> None:
        apply(self, step, optimizer, *others)
        with path.open("a") as file:
            file.write(f"{step} {self._buckets._engine._stage_state.digest()}\n")

    Gradients.apply = changed


def strike_at(moment: str, rank: int, flag: str = "") -> None:
    """At a moment before the first step or after the last one that worker is killed; or, where there is a ``flag``, it makes that file and waits."""
    owner, name, before = {
        "meeting": (torch.distributed, "init_process_group", True),
        "initialize": (p2p, "init_process_groups", True),
        "enrolling": (RecycleEngine, "_start", True),
        "finishing": (RecycleEngine, "finish", True),
        "left": (Session, "leave", False),
    }[moment]
    function = getattr(owner, name)

    def strike() -> None:
        if not flag:
            os.kill(os.getpid(), signal.SIGKILL)
        Path(flag).touch()
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

    if int(os.environ["RANK"]) == rank:
        setattr(owner, name, changed)


def uneven_end(apart_s: float, steps: int) -> None:
    """Rank r's script ends r × ``apart_s`` later than the first one's."""
    train = RecycleEngine.train_batch

    def changed(self: RecycleEngine, data_iter=None) -> torch.Tensor:
        loss = train(self, data_iter)
        if self._loop.machine.stepped == steps:
            time.sleep(apart_s * self.global_rank)
        return loss

    RecycleEngine.train_batch = changed
