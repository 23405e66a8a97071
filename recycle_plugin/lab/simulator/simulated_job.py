"""A simulated job with failures, instruction by instruction, in virtual time: what one failure costs, and what it
leaves.

Each generation of the membership is a world of its own. When a worker dies, the others stop and report what they hold.
After regrouping and planning the survivors run what is left of the unfinished steps (core/vocabulary/recovery_plan.py);
a worker takes its step back if that needs the parameters before it. Then they go on with the new plan, as
runtime/worker/blocking_loop.py does. Workers that die meanwhile make another generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import of_layers
from recycle_plugin.core.vocabulary.faults import Fault, FaultScript
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.recovery_plan import Held, surviving, unfinished
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.lab.planner.machine_costs import MachineCosts
from recycle_plugin.lab.simulator.virtual import Conditions, VirtualState, VirtualWorld


@dataclass(frozen=True)
class Loss:
    """A loss of workers and its cost, in microseconds of the job's clock. ``redone_us``: compute that survivors repeat,
    of all workers together. ``undone``: how many take a step back.
    """

    seats: tuple[Seat, ...]
    died_us: int
    detected_us: int
    resumed_us: int
    committed: int
    undone: int
    redone_us: int


@dataclass(frozen=True)
class Ran:
    """The result of a simulated job. ``commits``: by step, in us. ``parameters``: of each live seat at the end."""

    spans: tuple[Span, ...]
    commits: Mapping[int, int]
    losses: tuple[Loss, ...]
    parameters: Mapping[Seat, Any]


@dataclass
class _Record:
    """The spans, commits and losses over all generations."""

    spans: list[Span] = field(default_factory=list)
    commits: dict[int, int] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)


@dataclass(frozen=True)
class SimulatedJob:
    """A job to be simulated. ``keep``: survivors keep what they have of an unfinished step; otherwise it starts from
    its beginning.
    """

    view: ClusterView
    costs: CostModel
    policy: Policy
    machine: MachineCosts
    keep: bool = True

    def run(
        self,
        steps: int,
        faults: Sequence[Fault] = (),
        deaths: Mapping[Seat, int] | None = None,
        world: type[VirtualWorld] = VirtualWorld,
        parameters: Mapping[Seat, Any] | None = None,
        torn: Callable[[Seat, Instruction], bool] | None = None,
    ) -> Ran:
        """Run steps 0 to ``steps`` - 1 with named ``faults``, and ``deaths`` of seats at microseconds of the job's
        clock. ``world``: what computes. ``parameters``: of each seat before the first step. ``torn``: who has no result
        if a peer dies in a REDUCE. PlanError if a stage has lost all its workers; Deadlock; Torn.
        """
        scripts = {seat: FaultScript(tuple(faults), seat) for seat in {fault.seat for fault in faults}}
        conditions = Conditions(self.machine.commit_us, self.machine.detection_us, scripts, dict(deaths or {}))
        conditions = replace(conditions, torn=torn) if torn else conditions
        view, first, record = self.view, 0, _Record()
        plan = planner.plan(view, self.costs, self.policy)
        state = VirtualState.fresh(plan, 0, parameters)
        while True:
            running = world(plan, self.costs, steps - first, first, conditions, state)
            record.spans += running.run()
            done = running.committed()
            record.commits |= {step: at for step, at in running.commits.items() if step <= done}
            if done >= first and done not in record.commits:  # all survivors have applied it, but a dead worker has not
                assert running.interrupted_us is not None, "a step that not all have applied was interrupted"
                record.commits[done] = running.interrupted_us
            if done == steps - 1:
                return Ran(
                    tuple(record.spans), record.commits, tuple(record.losses), _final(running.survivors(), steps)
                )
            view, plan, state, loss = self._regroup(running, view, record, conditions)
            record.losses.append(loss)
            first = done + 1
            conditions = replace(conditions, start_us=loss.resumed_us)

    def _regroup(
        self, ended: VirtualWorld, view: ClusterView, record: _Record, conditions: Conditions
    ) -> tuple[ClusterView, Plan, VirtualState, Loss]:
        """Return the view left, its plan, the state to go on from, and the loss, with deaths before all go on."""
        machine, dead = self.machine, dict(ended.dead)
        known = max(dead.values()) + machine.detection_us
        stopped = max(ended.stopped.values(), default=known)
        undone = 0
        while True:
            left = view.without(*dead)
            plan = planner.plan(left, self.costs, self.policy)
            state, undone = self._go_on(ended, plan)
            resumed = max(stopped, known) + machine.pause_us + (machine.undo_us if undone else 0)
            late = {seat: at for seat, at in conditions.deaths.items() if seat in left.live and at < resumed}
            if not late:
                break
            dead |= late
            known = max(known, max(late.values()) + machine.detection_us)
        redone = self._redone(record.spans, state, plan, ended.committed())
        return (
            left,
            plan,
            state,
            Loss(tuple(sorted(dead)), min(dead.values()), known, resumed, ended.committed(), undone, redone),
        )

    def _go_on(self, ended: VirtualWorld, plan: Plan) -> tuple[VirtualState, int]:
        """Return the state from which the live seats of ``plan`` go on, and how many of them take a step back."""
        left, live = ended.survivors(), plan.view.live
        state = VirtualState(
            {seat: left.store[seat].copy() for seat in live}, {seat: left.stepped[seat] for seat in live}
        )
        first = ended.committed() + 1
        if not self.keep:
            for seat in live:
                _take_back(state, seat, first - 1)
            return state, sum(left.stepped[seat] >= first for seat in live)
        held: Held = {seat: frozenset(have.held()) for seat, have in state.store.items()}
        recovery_plans = unfinished(partial(planner.recover, plan, self.costs), first - 1, held)
        for recovery in recovery_plans:
            state.recovery_plans[recovery.step] = {seat: recovery.program(seat) for seat in live}
            held = surviving(held, recovery)
            for seat in recovery.undo:
                state.store[seat].undo(recovery.step)
                state.stepped[seat] = recovery.step - 1
        return state, sum(len(recovery.undo) for recovery in recovery_plans)

    def _redone(self, spans: Sequence[Span], state: VirtualState, plan: Plan, committed: int) -> int:
        """Return the compute time of the coming instructions that have run before."""
        before = {
            span.instruction for span in spans if span.instruction.op in COMPUTE and span.instruction.step > committed
        }
        coming = [
            (seat, one)
            for recovery in state.recovery_plans.values()
            for seat, program in recovery.items()
            for one in program
            if one in before
        ]
        if not self.keep:
            coming = [(plan.route[one.stage, one.works_on], one) for one in before]
        return sum(self.costs.of(one.op, one.stage, seat) for seat, one in coming)


def _take_back(state: VirtualState, seat: Seat, committed: int) -> None:
    """Drop everything after ``committed`` at ``seat``."""
    store = state.store[seat]
    if state.stepped[seat] > committed:
        store.undo(committed + 1)
    store.discard_after(committed, store.valid_from + 1)
    state.stepped[seat] = committed


def _final(state: VirtualState, steps: int) -> dict[Seat, Any]:
    return {seat: have[of_layers("params", seat, steps)] for seat, have in state.store.items()}
