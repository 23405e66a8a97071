"""A worker's training loop: run the program of each step, and recover when the membership changes.

Recovery: stop at the instruction boundary, plan for the survivors, and report the steps applied here and the data held
of unfinished ones. Once all workers know that of all, run what is left of the steps (core/vocabulary/recovery_plan.py),
and go on with the new plan. A worker whose last step stands in the way takes it back first. A further failure begins
this again.

Its waits are yielded, like the executor's: one process drives every worker of a simulated cluster, and a real worker,
whose waits block, drains it (runtime/worker/blocking_loop.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from recycle_plugin.core.messages.from_coordinator import BarrierPassed, Generation, Resume
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    Note,
    Resized,
    Stepped,
    SurvivorReport,
    Through,
)
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import of_layers
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE
from recycle_plugin.core.vocabulary.iterator_draws import Batches, IteratorState
from recycle_plugin.core.vocabulary.iterator_draws import unpack as unpack_drawn
from recycle_plugin.core.vocabulary.packed_data import groups, of_each, pack
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.recovery_plan import (
    Held,
    before,
    surviving,
    unfinished,
    without_later,
)
from recycle_plugin.core.vocabulary.step_batches import StepBatches
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.core.worker.collector import no_collections
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.executor import Interrupted, Waits
from recycle_plugin.core.worker.lockstep import Lockstep
from recycle_plugin.core.worker.loop_ports import LEAVE, DataEnded, Planner, Slowness, StepProgram
from recycle_plugin.core.worker.machine import Machine
from recycle_plugin.core.worker.worker import Worker

PLANS = 4  # that a worker keeps: each is as large as the job


class TrainingLoop:
    """The training loop of the worker at ``seat``. ``lockstep``: with the seat's other shards, if there are any."""

    def __init__(
        self,
        port: Machine,
        runner: Worker,
        planner: Planner,
        topology: Topology,
        seat: Seat,
        machine: StepMachine,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._port, self._control_view = port, port.control_view
        self._runner = runner
        self._planner = planner
        self._topology = topology
        self._plans: dict[tuple[frozenset[Seat], Slowness], Plan] = {}  # the last used last
        self._recovery_plans: dict[int, StepProgram] = {}  # of steps that a failure has interrupted
        self.seat = seat
        self.machine = machine
        self._lockstep = lockstep
        self._plan: Plan | None = None
        self._loaded = False  # a checkpoint that the coordinator does not know of yet
        self._unfilled = 0  # the step that the data does not fill, if any
        self._batches = StepBatches.full(topology.replicas)

    @property
    def plan(self) -> Plan:
        """The plan in force, from the start on."""
        assert self._plan is not None, "there is no plan before the start"
        return self._plan

    def start(self) -> Iterator[Any]:
        """Wait for all workers and agree on the first plan."""
        yield from self._port.wait("all workers to be ready", lambda: self._control_view.pending, interruptible=False)
        yield from self.recover()

    def train(self, step: int) -> Waits[float]:
        """Apply ``step``; the value is the mean loss. The commit may come later. Raises DataEnded."""
        while True:
            yield from self.advance(step)
            try:
                what = f"all contributions to the loss of step {step}"
                return (yield from self._port.wait(what, lambda: self._control_view.loss(step)))
            except Interrupted:
                loss = self._control_view.loss(step)
                if loss is not None and self._control_view.is_committed(step):
                    return loss  # the script may end here: the others may too, and wait for nobody then
                yield from self.recover()

    def advance(self, step: int) -> Iterator[Any]:
        """Return when ``step`` is applied here, and its data for peers is made. Raises DataEnded."""
        while (coming := min([*self._recovery_plans, self.machine.stepped + 1])) <= step:
            try:
                if coming == self._unfilled:
                    yield from self._end_data(coming)
                yield from self._change_at(coming)
                yield from self._runner.execute(self._recovery_plans.get(coming) or self._program(coming))
                self._recovery_plans.pop(coming, None)
            except Interrupted:
                yield from self.recover()

    def _end_data(self, step: int) -> Iterator[Any]:
        """Raise DataEnded once all are at ``step``, which the data does not fill, and know it."""
        yield from self._await_commit(step - 1)
        if self.machine.committed < step - 1:
            self.machine.commit(step - 1)
        yield from self.barrier(Barrier(Meets.DATA_ENDED, number=step), {})
        self._unfilled = 0
        raise DataEnded(step)

    def _program(self, step: int) -> StepProgram:
        program = self._planner.lowered(self.plan, self.seat, step)
        return StepProgram(step, program, share=self._batches.share(step))

    def applied(self, step: int) -> None:
        """Record that ``step`` has been applied here, and tell the coordinator."""
        self.machine.applied(step)
        self._tell_applied(self._control_view.number, step)

    def _tell_applied(self, generation: int, step: int) -> None:
        place, time = self._runner.place_behind(step), self._runner.time_of(step)
        self._port.send(Stepped(self._control_view.rank, generation, step, place, time))

    def settle(self) -> Iterator[Any]:
        """Return when all steps applied here are committed: only then may their effects be shown or saved."""
        step = self.machine.stepped
        while self.machine.committed < step:
            try:
                yield from self.advance(step)
                yield from self._await_commit(step)
                self.machine.commit(step)
            except Interrupted:
                yield from self.recover()

    def barrier(self, barrier: Barrier, values: dict[str, Any]) -> Waits[BarrierPassed]:
        """Wait at ``barrier``, outside a step, for all live workers; the value is the :class:`BarrierPassed`.
        ``values``: this worker's values for all. Raises Interrupted if the membership changes first.
        """
        number = self._control_view.number
        self._port.send(BarrierReached(self._control_view.rank, number, barrier, values))
        passed = yield from self._port.wait(
            f"all workers to be at {barrier}",
            lambda: self._control_view.barrier_passed(barrier, number),
            interruptible=False,
        )
        if not isinstance(passed, BarrierPassed):
            raise Interrupted(f"the membership has changed before all were at {barrier}")
        return passed

    def loaded(self, step: int) -> Iterator[Any]:
        """Go on from the state of ``step``, loaded from a checkpoint, as all do that have passed the barrier before."""
        self.machine.rewind(step)
        self._control_view.rewind(step)
        self._loaded = True
        view = self._control_view
        self._port.send(BarrierReached(view.rank, view.number, Barrier(Meets.LOADED), {}))
        yield from self._port.wait(
            "all workers to have loaded the checkpoint", self._control_view.interruption, interruptible=False
        )
        yield from self.recover()

    def plan_for(self, topology: Topology) -> None:
        """Plan for ``topology``, with another number of micro-batches, from now on."""
        self._topology = topology
        self._plans.clear()

    def resize(self, topology: Topology, batch: int, full_us: int) -> Iterator[Any]:
        """Go on with plans for ``topology``, with another number of micro-batches, like all that have passed the
        barrier before, at a commit. ``batch``: samples in a step; ``full_us``: the planned period with all seats.
        """
        self.plan_for(topology)
        self._port.send(
            Resized(self._control_view.rank, self._control_view.number, topology.micro_batches, batch, full_us)
        )
        yield from self._port.wait(
            "all workers to plan for another batch size", self._control_view.interruption, interruptible=False
        )
        yield from self.recover()

    def recover(self) -> Iterator[Any]:
        """Return when every member of the newest generation has agreed where to go on. Raises JobEnded."""
        self._port.reach("recovery.start")
        while (generation := self._control_view.interruption()) is not None:
            if self._lockstep is not None:
                self._lockstep.say_stopped(generation.number)
            if self._control_view.departed:
                raise JobEnded(LEAVE, failed=False)
            yield from self.enter(generation)

    def pass_over(self, past: int) -> None:
        """Record that this worker, a newcomer, enters no generation before ``past``."""
        if self._lockstep is not None:
            self._lockstep.pass_over(past)

    def catch_up(self) -> Iterator[Any]:
        """Recover between steps: return when all steps that the script knows of are applied (again) and committed."""
        stepped = self.machine.stepped
        yield from self.recover()
        yield from self.advance(stepped)
        yield from self.settle()

    def _await_commit(self, step: int) -> Iterator[Any]:
        """Wait for the commit of ``step``. A worker that knows it is not interrupted: it may need nobody any more."""
        try:
            yield from self._port.wait(f"the commit of step {step}", lambda: self._control_view.is_committed(step))
        except Interrupted:
            if not self._control_view.is_committed(step):
                raise

    # --- membership changes ------------------------------------------------------------------------

    def _change_at(self, step: int) -> Iterator[Any]:
        """Enter a planned change, or the planned end, that holds from ``step`` on."""
        while True:
            end, planned = self._control_view.end, self._control_view.pending
            if end is not None and end.step and step >= end.step:
                yield from self._await_commit(step - 1)
                raise JobEnded(end.reason, end.failed, end.code)
            if planned is None or not planned.from_step or step < planned.from_step:
                return
            if self._control_view.worker not in planned.roster.workers:
                yield from self._await_commit(step - 1)
                if self._control_view.pending is planned:
                    raise JobEnded(LEAVE, failed=False)
            else:
                yield from self.enter(planned)

    def enter(self, generation: Generation) -> Iterator[Any]:
        """Report for ``generation`` and adopt it, unless a newer one replaces it meanwhile. If a stage is empty in it,
        report nothing: data here stays until the stage was replayed.
        """
        if empty := self._empty_stages(generation):
            yield from self._await_stages(empty, generation)
            return
        self._runner.stop_helping()
        stopped = self._port.clock()
        plan = self._plan_for(generation)
        planned = self._port.clock()
        self._port.reach("recovery.report")
        timings = {"notice_s": round(stopped - generation.at, 4), "plan_s": round(planned - stopped, 4)}
        drawn = self._runner.held_draws()  # first: from here on nothing of a lost worker is accepted
        held = pack({*self._runner.held(), of_layers("params", self.seat, self.machine.stepped + 1)})
        report = SurvivorReport(
            self._control_view.rank,
            generation.number,
            self.machine.stepped,
            plan.digest,
            held,
            timings,
            self._loaded,
            plan.period_us,
            plan.bound_us,
            drawn,
            self._runner.valid_from,
            self._runner.places,
            self._runner.ended,
            self._runner.lacks,
            self._control_view.number,
        )
        # once all have reported newcomers send, and this worker may be slower to go on
        self._runner.listen_to(generation.roster.addresses)
        self._port.send(report)
        what = f"the other members' reports for generation {generation.number} ({generation.cause})"
        resume = yield from self._port.wait(what, lambda: self._control_view.resume_of(generation), interruptible=False)
        if not isinstance(resume, Resume):
            return
        if self._lockstep is not None and not (yield from self._lockstep.take_up(generation.number)):
            yield from self._port.wait(
                f"a generation newer than {generation.number}",
                lambda: True if self._control_view.pending is not generation else None,
                interruptible=False,
            )
            return
        self._port.reach("recovery.resume")
        self._take_up(plan, resume)
        self._runner.keep_only(generation.roster.addresses)
        self._hand_over(generation)
        self._control_view.adopt(generation)
        self._loaded = False
        if self.machine.stepped > self.machine.committed:
            self._tell_applied(generation.number, self.machine.stepped)
        self._plan = plan

    def _empty_stages(self, generation: Generation) -> tuple[int, ...]:
        return generation.roster.empty_stages(self._topology.stages)

    def finish(self) -> Iterator[Any]:
        """Report that the script is through; return once this worker may go. Help with replays until then."""
        view = self._control_view
        self._runner.park()
        self._port.send(Through(view.rank))
        while not view.may_go:
            generation = view.interruption()
            if generation is not None and (empty := self._empty_stages(generation)):
                yield from self._await_stages(empty, generation)
                continue
            expected = view.expected
            what = "the coordinator's permission to end" + f": {expected.what}" * bool(expected.what)

            def news(heard: int = view.replayed, before: Generation | None = generation) -> bool | None:
                return view.may_go or view.replayed > heard or view.interruption() is not before or None

            yield from self._port.wait(what, news, False, expected.limit_s)

    def _await_stages(self, empty: tuple[int, ...], generation: Generation) -> Iterator[Any]:
        """Wait for a newer generation without empty stages, or until this worker may go; help with replays."""
        self._runner.park()
        self._port.reach("recovery.parked")
        view, stages = self._control_view, ", ".join(map(str, empty))
        while view.pending is generation and not view.may_go:  # the deadline: one for the next replayed step
            expected = view.expected
            what = f"the replay of stage {stages} ({generation.cause})" + f": {expected.what}" * bool(expected.what)

            def news(heard: int = view.replayed) -> bool | None:
                over = view.pending is not generation or view.may_go
                over |= view.replayed > heard or view.replay is not None
                return over or self._runner.asked_to_help()

            yield from self._port.wait(what, news, False, expected.limit_s)
            if (replay := view.take_replay()) is not None:
                self._runner.stop_helping()
                yield from self._runner.accompany(replay)
            yield from self.help()

    def asked_to_help(self) -> bool | None:
        """Return True if a worker that replays a stage has asked this worker for help, else None."""
        return self._runner.asked_to_help()

    def help(self) -> Iterator[Any]:
        """Help such a worker, as long as its stage is empty."""
        yield from self._runner.help(self._is_away)

    def stop_helping(self) -> None:
        """Drop the helped stage."""
        self._runner.stop_helping()

    def _is_away(self, stage: int) -> bool:
        """Return whether ``stage`` is empty, as far as known: a newcomer may not have heard of any change yet."""
        view = self._control_view
        if view.outside:
            known = view.others
            return known is None or stage in known.empty_stages(self._topology.stages)
        pending = view.pending
        return pending is not None and stage in pending.roster.empty_stages(self._topology.stages)

    def _hand_over(self, generation: Generation) -> None:
        """Hand the script's own state to newcomers, if this worker is the first former member of its stage."""
        before, peers = (
            self._control_view.roster.workers,
            generation.roster.peers(self.seat.stage, self._control_view.shard),
        )
        if self._control_view.worker == next((each.worker for each in peers if each.worker in before), None):
            for one in peers:
                if one.worker not in before:
                    self._runner.hand_over(one.worker, self.machine.stepped)

    @no_collections()
    def _take_up(self, plan: Plan, resume: Resume) -> None:
        """Work out the unfinished work of the steps after the last commit. Take the last step back first if it is in
        the way.
        """
        started = self._port.clock()
        reported: Held = of_each(resume.held)
        if resume.unfilled:
            reported = before(reported, resume.unfilled)
        if resume.batches is not None:
            self._batches = resume.batches
            reported = resume.batches.counting(reported)
            self._runner.without(resume.batches)
        held = reported
        recover = partial(self._planner.recover, plan, self._batches)
        left = unfinished(recover, resume.committed, held, resume.rejected)
        recovery_plans = {recovery.step: recovery for recovery in left}
        self._recovery_plans, undo = {}, False
        if resume.norm is not None:
            self._runner.record_norm(resume.committed + 1, resume.norm)
        for recovery in recovery_plans.values():
            self._recovery_plans[recovery.step] = StepProgram(
                recovery.step,
                recovery.program(self.seat),
                recovery.boundary_only(self.seat),
                recovery.holders.get(self.seat.stage),
                resumed=True,
                share=self._batches.share(recovery.step),
                applied=any(group.kind == "params" and group.step > recovery.step for group in groups(*held.values())),
            )
            undo |= self.seat in recovery.undo
            held = surviving(held, recovery)
        counts = without_later(reported, resume.committed + 1) if resume.rejected else reported
        self._runner.take_state(
            IteratorState(
                plan,
                counts,
                {
                    Seat.parse(seat): _draws(packed, resume.unfilled, self._batches)
                    for seat, packed in resume.held_draws.items()
                },
                recovery_plans,
                frozenset(resume.placed),
                {int(replica): place for replica, place in resume.places.items()},
                {int(replica): number for replica, number in resume.ended.items()},
            )
        )
        self.machine.resume(resume.committed, undo)
        if undo:
            self._runner.undo(resume.committed + 1)
            self._port.reach("recovery.undone")
        if resume.rejected:
            self._runner.discard_after(resume.committed + 1, resume.generation)
        self._unfilled = resume.unfilled
        if resume.unfilled:
            self._runner.leave_out(resume.unfilled, resume.generation)
        if self._recovery_plans:
            self._say_recovery_plan(undo, self._port.clock() - started)

    def _say_recovery_plan(self, undone: bool, spent_s: float) -> None:
        first, also = min(self._recovery_plans), " and the next" * (len(self._recovery_plans) > 1)
        compute = sum(one.op in COMPUTE for program in self._recovery_plans.values() for one in program.instructions)
        details = {
            "seat": str(self.seat),
            "step": first,
            "compute": compute,
            "undone": undone,
            "work_out_s": round(spent_s, 4),
        }
        self._port.send(
            Note(
                self._control_view.rank,
                "recovery_plan",
                f"seat {self.seat} has {compute} instructions left to compute of step {first}{also}",
                details,
            )
        )

    def _plan_for(self, generation: Generation) -> Plan:
        case = generation.roster.working, generation.slowness
        plan = self._plans.pop(case, None)
        if plan is None:
            plan = self._planner.plan(ClusterView(self._topology, case[0]), generation)
        self._plans[case] = plan
        for old in [*self._plans][:-PLANS]:
            del self._plans[old]
        return plan


def _draws(packed: Mapping[str, str], unfilled: int, batches: StepBatches) -> dict[int, Batches]:
    """Return the batches by step, without steps that they don't fill and micro-batches that a step does not have."""
    return {
        step: {one: draw for one, draw in drawn.items() if batches.has(one, step)}
        for step, drawn in unpack_drawn(packed).items()
        if not unfilled or step < unfilled
    }
