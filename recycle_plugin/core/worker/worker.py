"""The worker: it computes for ``core.worker.training_loop`` and runs instructions for ``core.worker.executor``, the
same for a real and a simulated worker.

Its data of uncommitted steps is in one store (core/worker/step_store.py); it waits for what the store lacks. It reports
losses and shares of the norm, judges the norm, and sends on what it draws from an iterator
(core/worker/iterator_data.py). The rest is its *machine*: a clock, lines, and what computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, TypeVar

from recycle_plugin.core.messages import from_workers
from recycle_plugin.core.messages.contributions import LOSS, NORM, SHARE
from recycle_plugin.core.messages.from_coordinator import Replay, Serve
from recycle_plugin.core.messages.from_workers import Contribution, OutOfData
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum, provides
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import IteratorState, Lacking, Place
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.step_batches import SUMMED, StepBatches
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.companion import Companion
from recycle_plugin.core.worker.executor import Interrupted, execute
from recycle_plugin.core.worker.helper import Helper
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.lockstep import JOINT, LEFT_OUT, Lockstep
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.machine import Machine
from recycle_plugin.core.worker.observer import Observer
from recycle_plugin.core.worker.serving import Applied, Service, Servings
from recycle_plugin.core.worker.step_store import StepStore

T = TypeVar("T")
AWAITS = RECEIVES | {Op.LOAD, Op.STEP}  # what comes from elsewhere


@dataclass(frozen=True)
class Judging:
    """How a job uses the gradient norm. ``waits``: VALIDATE waits for it, and the step is clipped by it; ``validates``:
    it is judged after the step (core/coordinator/facts/step_validation.py).
    """

    waits: bool = False
    validates: bool = False


class Worker:
    """The worker at ``store.seat``: it runs programs on its machine, and keeps its data in its store.

    ``observers``: those of its steps, in the order in which they are called; ``lockstep``: with the other shards of the
    seat, if there are any. ``applied(step)``: called for each applied step
    (core.worker.training_loop.TrainingLoop.applied). ``called``: the script trains a step in one call, in which it
    changes nothing of the state.
    """

    called = True

    def __init__(
        self,
        machine: Machine,
        shape: Topology,
        store: StepStore,
        steps: StepMachine,
        judging: Judging,
        iterator_data: IteratorData | None = None,
        observers: Sequence[Observer] = (),
        lockstep: Lockstep | None = None,
    ) -> None:
        self.store, self.seat = store, store.seat
        self._machine, self._control_view, self._shape, self._steps, self._judging, self.iterator_data = (
            machine,
            machine.control_view,
            shape,
            steps,
            judging,
            iterator_data,
        )
        self._observers, self._lockstep = observers, lockstep
        self._left_out: Instruction | None = None  # which the furthest shard of the seat may have run
        self.applied: Callable[[int], None] = lambda step: None
        self.helper: Helper | None = None  # of other stages' replays, in a job that logs
        self.companion: Companion | None = None  # of stages beside this one, in such a job
        self.servings = Servings()
        self.hash_at: set[int] = set()  # steps after which the state is to be hashed, once they are committed
        self._final = 0  # the step before which the script does nothing any more
        self.program: StepProgram | None = None
        self._last_forward: Instruction | None = None
        # core.worker.executor.InstructionRunner: what the machine does without the worker
        self.now_us, self.reach = machine.now_us, machine.reach

    @property
    def running(self) -> StepProgram:
        """The current or last program. Raises AssertionError before the first."""
        assert self.program is not None, "nothing has been run yet"
        return self.program

    def resize(self, shape: Topology) -> None:
        """Go on with steps of another number of micro-batches from now on."""
        self._shape = shape
        for each in self._observers:
            each.broke_off(self._steps.stepped + 1, "another number of micro-batches")

    def rewind(self, step: int) -> None:
        """Go on from the state of ``step``, which all load. Later data is valid from the generation that follows."""
        self.servings.close()
        self._final = 0
        self.store.rewind(step, self._control_view.number + 1)
        if self.iterator_data is not None:
            self.iterator_data.rewind()
        for each in self._observers:
            each.loaded(step)

    # what its training loop asks for (core/worker/training_loop.py)

    def execute(self, program: StepProgram) -> Iterator[Any]:
        """Run ``program`` after providing its data. Raises Interrupted."""
        self.program = program
        self._machine.operations.go_by(program.share)
        self._last_forward = next((one for one in reversed(program.instructions) if one.op is Op.F), None)
        with self._machine.running(program) as instructions:
            self.forget_committed()
            if program.step > 0:
                self._final = program.step if self.called else 0
                yield from self._begin(program)
            if program.resumed:
                self._say_losses(program.step)  # of forwards that the failure has cut off from the last one
            if self._lockstep is not None:
                yield from self._lockstep.come_to()
                yield from self._lockstep.begin(f"the program of step {program.step}")
            yield from execute(self.seat, instructions, self)

    def _begin(self, program: StepProgram) -> Iterator[Any]:
        for each in self._observers:
            each.begins(program)
        if self.iterator_data is None:
            return
        try:
            self.iterator_data.provide(program.step, self._control_view)
        except Lacking as lacking:
            view, text = self._control_view, f"all workers to learn that {lacking}"
            self._machine.send(OutOfData(view.rank, view.number, program.step))
            yield from self._machine.wait(text, lambda: None)

    @property
    def valid_from(self) -> int:
        """The generation from which this worker's data is valid."""
        return self.store.valid_from

    def held(self) -> set[Datum]:
        """Return the data of uncommitted steps that is here, which is pinned from now on."""
        self.forget_committed()
        return self.store.held()

    def held_draws(self) -> dict[str, str]:
        """Return the batches of plain iterators that are here, by step, packed, with what lost workers have sent."""
        if self.store.reads_iterator or self._meets_again():
            self._machine.hear_out()
        self._take_arrivals()
        return self.iterator_data.held_draws() if self.iterator_data is not None else {}

    def _meets_again(self) -> bool:
        """Return whether all regroup although nobody is lost: a message did not get through. A worker that hears nobody
        may be the last to wait for that, and others complain before it does, each time. So all listen then.
        """
        coming = self._control_view.interruption()
        return coming is not None and self._control_view.roster.workers <= coming.roster.workers

    @property
    def places(self) -> dict[str, Place]:
        """By step, ``place_behind`` the last applied step, and the next if begun; empty if there is none."""
        return self.iterator_data.places(self._steps.stepped) if self.iterator_data is not None else {}

    def place_behind(self, step: int) -> Place | None:
        """Return where the plain iterator stood after ``step``; None without one, or if not at its replica's place."""
        data = self.iterator_data
        return data.place_behind(step) if data is not None and self.store.reads_iterator else None

    def time_of(self, step: int) -> ComputeTime | None:
        """Return the time of ``step`` on the first call after it was applied, then None. None if nobody measures it."""
        return next((time for each in self._observers if (time := each.time_of(step)) is not None), None)

    @property
    def ended(self) -> int:
        """The number of the plain iterator if it has ended, else 0."""
        return self.iterator_data.ended if self.iterator_data is not None else 0

    @property
    def lacks(self) -> int:
        """The step for which this worker has found nothing to draw; 0 for none."""
        return self.iterator_data.lacks if self.iterator_data is not None else 0

    def leave_out(self, step: int, valid_from: int) -> None:
        """Drop all data of ``step``, which iterators can't fill; data is valid from generation ``valid_from``."""
        self.discard_after(step - 1, valid_from)
        if self.iterator_data is not None:
            self.iterator_data.leave_out(step)

    def skip_to(self, place: Place, enters: bool = False) -> None:
        """Bring a newcomer's plain iterator to ``place``; if the place is in a later iterator, to that iterator's
        beginning. It is in its place only if the newcomer ``enters`` now: before that its replica's place may change.
        """
        data = self.iterator_data
        if data is not None and self.store.reads_iterator and place.iterator <= data.stands.iterator:
            data.skip_to(place)
            data.in_place = enters

    def take_state(self, iterator_state: IteratorState) -> None:
        """Use this state of plain iterators, the same on all workers, until the next call."""
        if self.iterator_data is not None:
            self.iterator_data.take_state(iterator_state)

    def undo(self, step: int) -> None:
        """Take ``step``, the last applied one, back, in the weights and in the store."""
        self._machine.hashing.finish()
        self._machine.operations.undo(step)
        self.store.undo(step)

    def record_norm(self, step: int, norm: Any) -> None:
        """Record the ``norm`` of ``step``, by which it is to be clipped or skipped."""
        self.store.put(self.store.of_layers("norm", step), norm)

    def discard_after(self, after: int, valid_from: int) -> None:
        """Drop data of the steps after ``after``, made with rejected weights; data is valid from ``valid_from`` now."""
        for each in self._observers:
            each.rejected(after, valid_from)
        if any(datum.kind in SUMMED for datum in self.store.discard_after(after, valid_from)):
            self._machine.operations.forget_sums(after)

    def without(self, batches: StepBatches) -> None:
        """Drop the data of void steps that no longer counts."""
        if self.store.without(batches):
            self._machine.operations.forget_sums(batches.void - 1)

    def listen_to(self, members: Iterable[str]) -> None:
        self._machine.listen_to(members)

    def keep_only(self, members: Iterable[str]) -> None:
        self._machine.keep_only(members)

    # newcomers

    def serve_now(self, waiting: bool) -> bool | None:
        """Answer newcomers' requests, if that may be done now. Return whether there was anything to do, None if there
        are no newcomers. ``waiting``: this worker has nothing else to do.
        """
        view = self._control_view
        if not (view.serves or view.hashes or self.hash_at or self.servings) or view.outside:
            return None  # what a newcomer is to hash, it hashes as it follows
        for asked in view.take_serves():
            self._serve(asked)
        self.hash_at |= self._control_view.take_hashes()
        stepped, committed = self._steps.stepped, max(self._steps.committed, self._control_view.committed)
        final = self._final == stepped + 1
        if final and stepped <= committed:
            self._hash(stepped)
        if not self.servings:
            return None
        summed = self._has_sum(stepped + 1)
        if gave := self.servings.between(stepped, committed, self.store.valid_from, summed, waiting, final):
            self._machine.reach("serving.given")
        return gave

    def _serve(self, asked: Serve) -> None:
        """Open a line for a newcomer, and tell the coordinator where."""
        self._machine.reach("serving.told")
        state, outlet, address = self._machine.open_outlet(asked.newcomer)
        if not self.servings:
            self._machine.watch_state()
        self.servings.add(asked.newcomer, Service(state, outlet))
        self._machine.send(from_workers.Serving(self._control_view.rank, asked.newcomer, address, asked.number))

    def hand_over(self, newcomer: WorkerId, step: int) -> None:
        """Send a newcomer the ``on_join`` value of this worker's script after ``step``, if the newcomer has asked for
        it.
        """
        self.servings.hand_over(newcomer, step, self._machine.script_state)

    def _last_sum(self, step: int) -> Datum:
        """Return the last sum of ``step``, which STEP applies."""
        return self.store.of_layers("tied" if self._shape.tie(self.seat.chunk) else "reduced", step)

    def _has_sum(self, step: int) -> bool:
        return self._last_sum(step) in self.store

    def _summed(self, step: int) -> None:
        """Send newcomers the gradient sums of ``step``."""
        self.servings.summed(step)

    def _hash(self, stepped: int) -> None:
        if stepped in self.hash_at:
            self._machine.reach("serving.hash")
            self._machine.hashing.hash_state(stepped)
        self.hash_at = {step for step in self.hash_at if step > stepped}

    # core.worker.executor.InstructionRunner

    def check_generation(self) -> None:
        """Raise Interrupted for a membership change, JobEnded at the job's end; serve newcomers, drop old sums."""
        if self._lockstep is None:
            self._control_view.check()
        else:
            self._control_view.check_end()  # it hears of a change in await_inputs, with the others of its seat
        while self.serve_now(waiting=False):
            pass
        if self.store.sums:
            self.store.drop_sums(min(self._control_view.committed, self.running.step - 1))

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterable[Any]:
        """Wait for the instruction's inputs from other workers. Before a step, also wait for the commit of the step
        whose undo record it overwrites. Before a joint action, also wait for the seat's other shards.
        """
        self._left_out = None
        if self._lockstep is None:
            return self._await_inputs(instruction) if instruction.op in AWAITS else ()
        return self._await_inputs_together(instruction, self._lockstep)

    def _await_inputs_together(self, instruction: Instruction, lockstep: Lockstep) -> Iterator[Any]:
        yield from lockstep.come_to()
        if lockstep.stops:
            self._left_out = instruction if self._lacks(instruction) else None
            return
        try:
            yield from self._await_inputs(instruction)
        except Interrupted:
            yield from lockstep.stop()
            self._left_out = instruction
            return
        if instruction.op in JOINT:
            yield from lockstep.begin(str(instruction))

    def _lacks(self, instruction: Instruction) -> bool:
        """Return whether ``instruction``, which another shard of the seat has run, lacks an input here."""
        if instruction.op is Op.VALIDATE:
            return self._control_view.collected(instruction.step, NORM) is None
        return instruction.op in LEFT_OUT and bool(self.store.missing(instruction))

    def _await_inputs(self, instruction: Instruction) -> Iterator[Any]:
        if instruction.op in RECEIVES or instruction.op is Op.LOAD:
            for datum in self.store.missing(instruction):
                yield from self._machine.wait_for(
                    datum, instruction.peer or self._giver(datum), partial(self._has, datum)
                )
        elif instruction.op is Op.STEP and not self._steps.may_apply(instruction.step):
            before = instruction.step - 1
            yield from self._machine.wait_for_commit(before)
            self._steps.commit(before)

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Carry ``instruction`` out: compute, send, sum, validate or step."""
        if self._left_out is not None:
            return
        machine, op = self._machine, instruction.op
        try:
            machine.begin(instruction)
            try:
                yield from machine.spend(instruction)
                if op in COMPUTE or op is Op.LOAD:
                    self._compute(instruction)
                elif op in SENDS:
                    self._send(instruction)
                elif op is Op.REDUCE or op is Op.TIE:
                    yield from self._add_up(instruction)
                elif op is Op.VALIDATE:
                    yield from self._validate(instruction.step)
                elif op is Op.STEP:
                    self._step(instruction)
            finally:
                machine.end(instruction)
        except Interrupted:
            if self._lockstep is None:
                raise
            yield from self._lockstep.stop()

    def record(self, span: Span) -> None:
        """Record the time span of an instruction that has run, for the observers and the machine's trace."""
        if self._lockstep is not None:
            self._lockstep.finished += 1
        for over in self._machine.record(span):
            for each in self._observers:
                each.ran(over)

    # instructions

    def _compute(self, instruction: Instruction) -> None:
        program = self.running
        boundary_only = bool(program.boundary_only) and instruction in program.boundary_only
        self.store.run(instruction, self._machine.operations.compute, boundary_only)
        if instruction.step > 0:
            if instruction is self._last_forward:
                self._say_losses(instruction.step)
            if program.resumed or (instruction.op is Op.LOAD and self.store.reads_iterator):
                self._tell_made(instruction)

    def _tell_made(self, instruction: Instruction) -> None:
        """Tell observers of drawn batches, and of data that was made again after a failure. The first maker may not
        have logged such data, and it is sent only if another worker asks for it.
        """
        for drawn in self.store.requires(instruction) if instruction.op is Op.LOAD else ():
            self._tell_kept(drawn, self.store[drawn])
        for datum in provides(instruction) if self.running.resumed else ():
            if datum.kind in TRAVELS and datum in self.store:
                self._tell_kept(datum, self.store.move(datum, -1))

    def _tell_kept(self, datum: Datum, value: Any) -> None:
        for each in self._observers:
            each.kept(datum, value, self.store.valid_from)

    def _send(self, instruction: Instruction) -> None:
        (datum,) = self.store.requires(instruction)
        assert instruction.peer is not None, f"{instruction} has no peer"
        value = self.store.move(datum, -1)
        self._machine.transfer(datum, value, instruction.peer, self.store.valid_from)
        self._tell_kept(datum, value)
        self.store.sent(datum)

    def _add_up(self, instruction: Instruction) -> Iterator[Any]:
        """Make a sum with the others; nobody has it before all have come. Made again, it has the same bits."""
        (datum,) = provides(instruction)
        holder, began_us = self.running.holder if instruction.op is Op.REDUCE else None, self._machine.now_us()
        total = yield from self._machine.add_up(instruction, self.store, holder)
        for each in self._observers:
            each.summed(instruction, self._machine.now_us() - began_us)
        if datum not in self.store:
            self.store.conclude(instruction, {datum: total})
            if self._observers and instruction.op is Op.TIE:
                self._tell_kept(datum, self._machine.operations.tied_in_order(total))
            if datum == self._last_sum(datum.step):
                self._summed(datum.step)

    def _validate(self, step: int) -> Iterator[Any]:
        """Wait until all stages have their gradients, and for the norm over them if they are clipped."""
        self._say_share(step, NORM, self._machine.operations.share(step, self.store) if self._judging.waits else 0.0)
        shares = yield from self._machine.wait(
            f"all contributions to the {NORM} of step {step}", lambda: self._control_view.collected(step, NORM)
        )
        if self._judging.waits:
            self.record_norm(step, self._machine.operations.norm(shares))

    def _step(self, instruction: Instruction) -> None:
        step = instruction.step
        if self._judging.validates and self.store.of_layers("norm", step) not in self.store:
            self._validate_later(step)
        self._final = step
        self.serve_now(waiting=False)
        self.servings.before_step(step - 1, self.store.valid_from)
        self._machine.hashing.finish()
        settings = self._machine.units.settings() if self.servings else None
        self.store.run(instruction, self._machine.operations.compute)
        norm = self.store.get(self.store.of_layers("norm", step))  # STEP itself may have found it
        for each in self._observers:
            each.applied(step, norm)
        self.applied(step)
        if self.servings:
            self.servings.stepped(step, Applied(norm, settings, self.running.share))
            self._machine.watch_state()

    def _validate_later(self, step: int) -> None:
        """Send the coordinator this stage's share of the norm; it judges once it has all shares. A share that is not
        finite leaves nothing to judge, and no way back for some undo.
        """
        share = self._machine.operations.share(step, self.store)
        self._say_share(step, SHARE, share)
        if not isfinite(share):
            self.record_norm(step, share)

    # what it has and says

    def forget_evaluation(self, step: int) -> None:
        """Drop arrived data of the evaluation ``step`` (negative), which is over or given up."""
        self._take_arrivals()
        self.store.forget_evaluation(step)

    def forget_committed(self) -> None:
        """Take arrived data, and drop the data of committed steps, which no worker will ask for again."""
        self._take_arrivals()
        for each in self._observers:
            each.committed(self._control_view, self.store.valid_from)
        self.store.commit(self._control_view.committed)

    def park(self) -> None:
        """Prepare for a long wait for other workers, which may read this worker's log meanwhile."""
        self.forget_committed()
        for each in self._observers:
            each.parks()

    def accompany(self, replay: Replay) -> Iterator[Any]:
        """Replay this worker's stage beside its state (core/worker/companion.py)."""
        assert self.companion is not None, "only a job that logs replays stages"
        self._machine.hashing.finish()
        yield from self.companion.run(replay)

    def asked_to_help(self) -> bool | None:
        """Return True if a worker that replays a stage has asked this worker for help, else None."""
        return None if self.helper is None else self.helper.asked()

    def help(self, wanted: Callable[[int], bool]) -> Iterator[Any]:
        """Help such a worker (core/worker/helper.py)."""
        if self.helper is not None:
            yield from self.helper.work(wanted)

    def stop_helping(self) -> None:
        """Drop the helped stage."""
        if self.helper is not None:
            self.helper.leave()

    def losses(self, step: int) -> dict[str, Loss]:
        """Return the losses of ``step`` by micro-batch, of those whose last stage has run here."""
        return {
            str(micro_batch): self._machine.number(loss) for micro_batch, loss in self.store.of("loss", step).items()
        }

    def _giver(self, datum: Datum) -> Seat:
        """Return the seat that sends a batch which this worker has not read."""
        if datum.step < 0:
            return self.running.givers[datum]
        assert self.iterator_data is not None, f"nobody reads what the {datum} would come from"
        return self.iterator_data.giver(datum)

    def _has(self, datum: Datum) -> bool | None:
        self._take_arrivals()
        return True if datum in self.store else None

    def _take_arrivals(self) -> None:
        for datum, value, valid_from in self._machine.arrivals():
            self.store.arrive(datum, value, valid_from)

    def _say_share(self, step: int, name: str, share: float) -> None:
        self._machine.send(
            Contribution(
                self._control_view.rank,
                step,
                name,
                {str(self.seat.chunk): share},
                self._shape.stages,
                self._control_view.shard,
            )
        )

    def _say_losses(self, step: int) -> None:
        losses = self.losses(step)
        if losses:
            batch, share = len(self._shape.batch), self.running.share
            expected, shard = batch * share.live // share.total, self._control_view.shard
            self._machine.send(Contribution(self._control_view.rank, step, LOSS, losses, expected, shard))
