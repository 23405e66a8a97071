"""Hours of training under failures and returns, from the step times of each membership.

Between two changes a step time tells everything, so hours cost no more than the memberships that occur. Memberships
that differ only in the numbering of replicas count as one.

A loss costs detection, stopping, regrouping and planning, copies of moved stages, and what died with the worker.
Survivors keep what they have (core/vocabulary/recovery_plan.py), so the unfinished step goes on with the new period. At
fraction f of it, a stage that loses k of n workers has lost k/n of its work so far, and its peers run that again: f *
k/n of a step with the new period. At a random instant that is half of the lost workers' share.

Approximations, all compared with lab/simulator/simulated_job.py, instruction by instruction
(tests/pure/test_simulator_history.py):
* Work is spread evenly over a step, and stages end it together. A worker that dies in a step's last few instructions
  may have summed its gradients, so that nothing is lost; here it costs its whole share.
* Stopping costs half of the longest instruction: survivors wait so long for those that finish theirs.
* Nobody works while a death is being noticed. Real survivors do, on what doesn't wait for the lost worker.

A returning worker gets ready and copies its stage's state while the others go on, assumed not to be slowed. It enters
at a commit line, which costs regrouping, planning and the fill of an empty pipeline.

In a job that logs, a stage that loses its last worker waits for the next process that comes, and this one replays the
steps since the last checkpoint (lab/simulator/replay_cost.py) while all others wait. Checkpoints are there at once and
cost nothing: one every so many steps, and one whenever the membership changes, as in a job.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count

from recycle_plugin import planner
from recycle_plugin.core.coordinator.facts.enrolment import WAIT_S
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.lab.planner.machine_costs import MachineCosts
from recycle_plugin.lab.simulator.peers.normalise import normalise
from recycle_plugin.lab.simulator.predict import predict
from recycle_plugin.lab.simulator.replay_cost import SimulatedLog

# the most (stage, micro-batch) pairs of a step that is simulated; a larger step has its plan's time
SIMULATED = 4_000
STEPS = 4  # simulated per membership
NO_REPLAY = "without a log (--log) the job ends there"
PAYBACK_S = 1800.0  # within this time a moved stage has to pay for its copy


@dataclass(frozen=True)
class StepPeriod:
    """A membership's step times, in us. ``first_us``: from an empty pipeline. ``bound_us``: the lower bound."""

    first_us: int
    period_us: int
    bound_us: int

    @property
    def fill_us(self) -> int:
        """By how many microseconds a step on an empty pipeline is longer."""
        return self.first_us - self.period_us


class StepPeriods:
    """The step times by membership, worked out once for all numberings of the replicas."""

    def __init__(self, costs: CostModel, policy: Policy) -> None:
        self._costs, self._policy = costs, policy
        self._known: dict[tuple[Topology, tuple[tuple[int, ...], ...]], StepPeriod] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, view: ClusterView) -> StepPeriod:
        """Return the step times of the membership ``view``. PlanError if it has no plan."""
        key = view.topology, pattern(view)
        if key not in self._known:
            self._known[key] = self._measure(renumbered(view))
        return self._known[key]

    def _measure(self, view: ClusterView) -> StepPeriod:
        plan = planner.plan(view, self._costs, self._policy)
        shape = view.topology
        if shape.stages * shape.replicas * shape.micro_batches > SIMULATED:
            return StepPeriod(max(plan.span_us, plan.period_us), plan.period_us, plan.bound_us)
        predicted = predict(plan, self._costs, STEPS)
        return StepPeriod(predicted.first_step_us, predicted.period_us, plan.bound_us)


def pattern(view: ClusterView) -> tuple[tuple[int, ...], ...]:
    """Return the live stages of each replica, replicas sorted: equal for memberships that differ only in names."""
    rows: list[list[int]] = [[] for _ in range(view.topology.replicas)]
    for replica, stage in sorted(view.live):
        rows[replica].append(stage)
    return tuple(sorted(map(tuple, rows), key=lambda row: (-len(row), row)))


def renumbered(view: ClusterView) -> ClusterView:
    """Return the membership that stands for all with the same :func:`pattern`."""
    return ClusterView(
        view.topology, frozenset(Seat(replica, stage) for replica, row in enumerate(pattern(view)) for stage in row)
    )


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A change at ``at_s`` seconds: ``lost`` or ``joined`` random workers, or the loss of the named ``seats``."""

    at_s: float
    lost: int = 0
    joined: int = 0
    seats: tuple[Seat, ...] = ()


@dataclass(frozen=True)
class HistoryTransition:
    """The cost of one change, in seconds. ``redone_s``: work that died with workers and runs again. ``fill_s``: by how
    much filling the pipeline takes longer than before; after a return all of its filling. ``copy_s``: copies that
    training waited for. ``restart_s``: from the stop until the next process of an empty stage has its model;
    ``replay_s``: until it has replayed.
    """

    at_s: float
    lost: tuple[Seat, ...]
    joined: tuple[Seat, ...]
    moves: tuple[str, ...]
    detection_s: float
    stop_s: float
    regroup_s: float
    copy_s: float
    restart_s: float
    replay_s: float
    redone_s: float
    fill_s: float

    @property
    def pause_s(self) -> float:
        """The seconds in which nobody trains."""
        return self.detection_s + self.stop_s + self.regroup_s + self.copy_s + self.restart_s + self.replay_s

    @property
    def cost_s(self) -> float:
        """The seconds that the change costs in all."""
        return self.pause_s + self.redone_s + self.fill_s


@dataclass(frozen=True)
class HistorySegment:
    """The time between two changes, in seconds: ``steps`` by ``live`` workers at ``pace``, the first at ``first_s``."""

    start_s: float
    first_s: float
    end_s: float
    live: int
    lost_by_stage: tuple[int, ...]
    pace: StepPeriod
    steps: int


@dataclass
class SimulatedHistory:
    """The history of a job. ``hours_s``: its length in seconds. ``memberships``: how many were worked out."""

    full: StepPeriod
    hours_s: float = 0.0
    memberships: int = 0
    segments: list[HistorySegment] = field(default_factory=list)
    transitions: list[HistoryTransition] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of committed steps."""
        return sum(segment.steps for segment in self.segments)

    @property
    def steps_per_s(self) -> float:
        """The average number of steps per second, transitions included."""
        return self.steps / self.hours_s if self.hours_s else 0.0

    @property
    def fraction(self) -> float:
        """The throughput as a fraction of the same schedule's without failures."""
        return self.steps_per_s * self.full.period_us / 1e6

    @property
    def lost_s(self) -> float:
        """The seconds that all changes cost together."""
        return sum(transition.cost_s for transition in self.transitions)


class SimulatedTrainer:
    """A trainer that plays changes of the membership. ``copy_us``: time to copy each stage's state to one worker.
    ``normalise``: move workers if that pays. ``log``: the job's, None without one.
    """

    def __init__(
        self,
        topology: Topology,
        costs: CostModel,
        policy: Policy,
        machine: MachineCosts,
        copy_us: Sequence[int] | None = None,
        normalise: bool = True,
        seed: int = 0,
        log: SimulatedLog | None = None,
    ) -> None:
        self.costs, self.policy, self.machine, self.log = costs, policy, machine, log
        self.copy_us = tuple(copy_us or (0,) * topology.stages)
        self.periods = StepPeriods(costs, policy)
        self.view = topology.full()
        self._normalise, self._random = normalise, random.Random(seed)
        self._full = self.periods.of(self.view)
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._ticket = count()
        # when work began after the last change, and when it commits a step
        self._since, self._first = (0.0, self._full.first_us / 1e6)
        self._history = SimulatedHistory(self._full)
        self._coming: list[float] = []  # when workers that are not there will hold a state, or have held one since
        self._entry: object | None = None  # stands for the commit line that those wait for

    @cached_property
    def longest_us(self) -> int:
        """The microseconds of the longest instruction."""
        return max(
            max(row) for row in (self.costs.forward, self.costs.input, self.costs.weight, self.costs.backward or (0,))
        )

    @property
    def _stop_s(self) -> tuple[float, float]:
        """The seconds until a loss is noticed, and then until all have stopped."""
        return self.machine.detection_us / 1e6, self.longest_us / 2e6

    def run(self, changes: Iterable[MembershipChange], length_s: float) -> SimulatedHistory:
        """Play ``changes`` over ``length_s`` seconds. ValueError for a loss that ends the job, and PlanError."""
        for change in changes:
            self._at(change.at_s, partial(self._happen, change=change))
            if change.joined:
                ready = change.at_s + (self.machine.return_us + max(self.copy_us)) / 1e6
                self._coming += [ready] * change.joined
                self._at(ready, self._ready)
        self._coming.sort()
        while self._agenda and self._agenda[0][0] < length_s:
            at, _, happen = heappop(self._agenda)
            happen(at)
        self._close(length_s)
        self._history.hours_s, self._history.memberships = length_s, len(self.periods)
        return self._history

    # --- changes -----------------------------------------------------------------------------------

    def _happen(self, now: float, change: MembershipChange) -> None:
        lost = change.seats or self._draw(change.lost)
        if lost:
            self._lose(now, tuple(lost))

    def _lose(self, now: float, lost: tuple[Seat, ...]) -> None:
        for seat in lost:
            if seat not in self.view.live:
                raise ValueError(f"at {now / 3600:.2f} h the trace loses seat {seat}, which no live worker holds")
        before, period, to_do = self.view, self.periods.of(self.view), self._left(now)
        self._close(now)
        left = before.without(*lost)
        back, restart, replay = self._replay(now, left, lost) if left.empty_stages() else ((), 0.0, 0.0)
        self.view, moves, copy = self._spread(ClusterView(left.topology, left.live | set(back)))
        slower = self.periods.of(self.view)
        redone = max(0.0, 1 - to_do) * before.lost_share({*lost, *(before.live - self.view.live)}) * slower.period_us
        fill = max(0, slower.fill_us - period.fill_us)
        pauses = (*self._stop_s, self.machine.pause_us / 1e6, copy, restart, replay)
        self._go_on(HistoryTransition(now, lost, back, moves, *pauses, redone / 1e6, fill / 1e6), to_do)
        if self._entry is not None:
            self._await_line(self._since)

    def _replay(self, now: float, left: ClusterView, lost: tuple[Seat, ...]) -> tuple[tuple[Seat, ...], float, float]:
        """Return the seats of the ``lost`` that hold the empty stages of ``left`` again, and the seconds until their
        processes are there, and then until these have replayed. ValueError if the job ends instead.
        """
        empty = left.empty_stages()
        there = [ready - max(self.copy_us) / 1e6 - now for ready in self._coming[: len(empty)]]
        late = len(there) < len(empty) or there[-1] > WAIT_S
        if self.log is None or late or not left.live:
            why = NO_REPLAY if self.log is None else f"nobody replays it within {WAIT_S:g} s (wait_timeout_s)"
            raise ValueError(f"at {now / 3600:.2f} h stage {empty[0]} loses its last worker: {why}")
        del self._coming[: len(empty)]
        since = [self._history.steps % self.log.every, *(each.steps for each in self._history.segments[-1:])]
        back = tuple(min(seat for seat in lost if seat.stage == stage) for stage in empty)
        return back, max(0.0, there[-1] - sum(self._stop_s)), self.log.replay_s(left, min(since))

    def _ready(self, now: float) -> None:
        """Await a commit line for workers that hold a state."""
        if self._entry is None:
            self._await_line(now)

    def _await_line(self, now: float) -> None:
        self._entry = entry = object()
        self._at(self._next_line(now), lambda line: self._enter(line, entry))

    def _enter(self, line: float, entry: object) -> None:
        """Let the waiting workers in at a commit line, unless a loss has moved it meanwhile."""
        if entry is not self._entry:
            return
        number = bisect_right(self._coming, line)
        joined, self._entry = self._empty(number), None
        del self._coming[:number]
        if joined:
            self._close(line)
            self.view = ClusterView(self.view.topology, self.view.live | set(joined))
            fill = self.periods.of(self.view).fill_us / 1e6
            self._go_on(
                HistoryTransition(line, (), joined, (), 0, 0, self.machine.pause_us / 1e6, 0, 0, 0, 0, fill), 1.0
            )

    def _go_on(self, transition: HistoryTransition, left: float) -> None:
        """Go on after ``transition``, with ``left`` of a step to do until the next commit."""
        self._since = max(self._since, transition.at_s + transition.pause_s)
        self._first = (
            self._since + transition.redone_s + transition.fill_s + left * self.periods.of(self.view).period_us / 1e6
        )
        self._history.transitions.append(transition)

    def _done(self, now: float) -> int:
        """Return the steps committed since the last change, one that ends ``now`` included, whatever the rounding."""
        period, spent = self.periods.of(self.view).period_us, (now - self._first) * 1e6 + 0.5
        return 0 if spent < 0 else 1 + int(spent // period)

    def _next_line(self, now: float) -> float:
        """Return when the step that runs at ``now``, or at the end of the present pause, will be committed."""
        return self._first + self._done(max(now, self._since)) * self.periods.of(self.view).period_us / 1e6

    def _left(self, now: float) -> float:
        """Return the rest of that step in steps of the current period; above 1 on an empty pipeline."""
        return (self._next_line(now) - max(now, self._since)) * 1e6 / self.periods.of(self.view).period_us

    def _close(self, now: float) -> None:
        """End the running segment."""
        topology = self.view.topology
        lost = tuple(topology.replicas - len(self.view.live_replicas(stage)) for stage in range(topology.stages))
        if now > self._since:
            self._history.segments.append(
                HistorySegment(
                    self._since,
                    self._first,
                    now,
                    len(self.view.live),
                    lost,
                    self.periods.of(self.view),
                    self._done(now),
                )
            )

    # --- who ---------------------------------------------------------------------------------------

    def _draw(self, number: int) -> list[Seat]:
        """Draw live workers at random; without a log, of stages that keep one."""
        drawn: list[Seat] = []
        for _ in range(number):
            left = self.view.without(*drawn)
            able = [seat for seat in sorted(left.live) if self.log or len(left.live_replicas(seat.stage)) > 1]
            if not able:
                lost = len(self.view.lost) + len(drawn)
                raise ValueError(f"a loss more than {lost} leaves a stage without a worker: {NO_REPLAY}")
            drawn.append(self._random.choice(able))
        return drawn

    def _empty(self, number: int) -> tuple[Seat, ...]:
        """Return seats for ``number`` returning workers, each of the stage that then lacks most."""
        taken: list[Seat] = []
        for _ in range(min(number, len(self.view.lost))):
            now = ClusterView(self.view.topology, self.view.live | set(taken))
            taken.append(min(now.lost, key=lambda seat: (len(now.live_replicas(seat.stage)), seat)))
        return tuple(taken)

    def _spread(self, view: ClusterView) -> tuple[ClusterView, tuple[str, ...], float]:
        if not self._normalise or len(view.lost) < 2:
            return view, (), 0.0
        steps = int(PAYBACK_S * 1e6 / self._full.period_us)
        found = normalise(view, self.costs, self.policy, self.copy_us, steps)
        return found.view, tuple(map(str, found.moves)), found.copy_us / 1e6

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heappush(self._agenda, (when, next(self._ticket), happen))
