"""A job with failures, instruction by instruction, in virtual time: what one failure costs, and what it leaves.

Each generation of the membership is a world of its own.  When a worker dies, the others stop, the
unfinished step is dropped, whoever is one step ahead takes it back, and after regrouping and planning
the survivors go on behind the last committed step, as ``runtime.loop`` does.  Workers that die
meanwhile make another generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence

from recycle_plugin import planner
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.executor import Span
from recycle_plugin.core.faults import Fault, FaultScript
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.topology import ClusterView
from recycle_plugin.simulator.machine import MachineCosts
from recycle_plugin.simulator.network import Network
from recycle_plugin.simulator.virtual import Conditions, VirtualWorld


@dataclass(frozen=True)
class Loss:
    """A change of the membership; microseconds of the job's clock.  ``redone_us``: from the last commit to the stop."""

    seats: tuple[Seat, ...]
    died_us: int
    detected_us: int
    resumed_us: int
    committed: int
    undone: int
    redone_us: int


@dataclass(frozen=True)
class Ran:
    """``commits``: when each step was committed; ``parameters``: of each live seat at the end."""

    spans: tuple[Span, ...]
    commits: Mapping[int, int]
    losses: tuple[Loss, ...]
    parameters: Mapping[Seat, Any]


@dataclass(frozen=True)
class Job:
    """``network()`` opens the lines of a generation; None: ``costs.transfer`` without contention."""

    view: ClusterView
    costs: CostModel
    policy: Policy
    machine: MachineCosts
    network: Callable[[], Network] | None = None

    def run(
        self, steps: int, faults: Sequence[Fault] = (), deaths: Mapping[Seat, int] | None = None,
        world: type[VirtualWorld] = VirtualWorld, parameters: Mapping[Seat, Any] | None = None,
    ) -> Ran:  # fmt: skip
        """Steps 0 to ``steps`` - 1.  Raises PlanError where a stage has lost all its workers; Deadlock."""
        scripts = {seat: FaultScript(tuple(faults), seat) for seat in {fault.seat for fault in faults}}
        conditions = Conditions(None, self.machine.commit_us, self.machine.detection_us, scripts, dict(deaths or {}))
        view, first = self.view, 0
        spans: list[Span] = []
        commits: dict[int, int] = {}
        losses: list[Loss] = []
        plan = planner.plan(view, self.costs, self.policy)
        while True:
            if self.network is not None:
                conditions = replace(conditions, network=self.network())
            running = world(plan, self.costs, steps - first, first, conditions, parameters)
            spans += running.run()
            done = running.committed()
            commits |= {step: at for step, at in running.commits.items() if step <= done}
            if done >= first:  # all survivors have applied it, a dead worker has not
                commits.setdefault(done, running.interrupted_us)
            parameters, undone = running.resume()
            if done == steps - 1:
                return Ran(tuple(spans), commits, tuple(losses), parameters)
            loss, view, plan = self._regroup(running, view, undone, commits, conditions)
            losses.append(loss)
            parameters = {seat: value for seat, value in parameters.items() if seat in view.live}
            first = done + 1
            conditions = replace(conditions, start_us=loss.resumed_us)

    def _regroup(
        self, ended: VirtualWorld, view: ClusterView, undone: int, commits: Mapping[int, int], conditions: Conditions
    ) -> tuple[Loss, ClusterView, Plan]:
        """The change, who is left, and their plan.  Deaths before the survivors go on are part of it."""
        machine = self.machine
        dead = dict(ended.dead)
        known = max(dead.values()) + machine.detection_us
        stopped = max(ended.stopped.values(), default=known)
        while True:
            resumed = max(stopped, known) + machine.pause_us + (machine.undo_us if undone else 0)
            late = {seat: at for seat, at in conditions.deaths.items() if seat in view.live and seat not in dead and at < resumed}
            if not late:
                break
            dead |= late
            known = max(known, max(late.values()) + machine.detection_us)
        left = view.without(*dead)
        committed = ended.committed()
        since = commits.get(committed, 0)
        loss = Loss(tuple(sorted(dead)), min(dead.values()), known, resumed, committed, undone, max(0, min(dead.values()) - since))
        return loss, left, planner.plan(left, self.costs, self.policy)
