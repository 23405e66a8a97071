"""Failure normalisation: spread losses over the stages if that pays (ReCycle, SOSP'24).

The number of workers left in each stage nearly alone decides the period. A healthy worker of a stage with slack takes a
lost seat of the busiest stage: it copies that stage's state from a live peer, and its own seat counts as lost from then
on. A move is planned only if it is predicted to gain more, over the coming steps, than its copy costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.planner.make import prepare, solve

CANDIDATES = 4  # source stages that are tried per move


@dataclass(frozen=True, slots=True)
class WorkerMove:
    """A move: the worker of seat ``worker`` becomes that of ``seat``, which was lost."""

    worker: Seat
    seat: Seat

    def __str__(self) -> str:
        return f"{self.worker} -> {self.seat}"


@dataclass(frozen=True, slots=True)
class Normalisation:
    """The moves of a normalisation and their worth; periods and copies in microseconds. ``view``: after the moves."""

    view: ClusterView
    moves: tuple[WorkerMove, ...]
    before_us: int
    after_us: int
    copy_us: int

    @property
    def payback_steps(self) -> float:
        """After how many steps the copies have paid for themselves; 0 without moves."""
        return self.copy_us / (self.before_us - self.after_us) if self.moves else 0.0

    def __str__(self) -> str:
        if not self.moves:
            return f"no move pays; the period stays {self.before_us} us"
        names = ", ".join(map(str, self.moves))
        return (
            f"move {names}: {self.before_us} -> {self.after_us} us a step, "
            f"{self.copy_us} us of copies, paid back after {self.payback_steps:.1f} steps"
        )


def normalise(view: ClusterView, costs: CostModel, policy: Policy, copy_us: Sequence[int], steps: int) -> Normalisation:
    """Return the moves that pay within ``steps`` steps. ``copy_us``: time to copy each stage's state to one worker.
    Copies of different stages run side by side, those of one stage as many at a time as it has live workers. Each move
    costs up to four plans. PlanError if ``view`` itself has no plan.
    """
    before = _period(view, costs, policy)
    best = Normalisation(view, (), before, before, 0)
    while (tried := _next(best, view, costs, policy, copy_us)) is not None:
        gained, spent = best.after_us - tried.after_us, tried.copy_us - best.copy_us
        if gained <= 0 or gained * steps <= spent:
            break
        best = tried
    return best


def _next(
    now: Normalisation, start: ClusterView, costs: CostModel, policy: Policy, copy_us: Sequence[int]
) -> Normalisation | None:
    """Return the best single further move, or None if there is none to try."""
    topology, view = now.view.topology, now.view
    share = {stage: _load(view, costs, stage) for stage in range(topology.stages)}
    hurt = max(
        (stage for stage in share if len(view.live_replicas(stage)) < topology.replicas),
        key=share.__getitem__,
        default=None,
    )
    if hurt is None:
        return None
    options = []
    for stage in sorted(share, key=share.__getitem__)[:CANDIDATES]:
        if stage == hurt or len(view.live_replicas(stage)) < 2:
            continue
        move = _move(view, stage, hurt)
        after = ClusterView(topology, view.live - {move.worker} | {move.seat})
        moves = (*now.moves, move)
        if len({one.worker for one in moves} | {one.seat for one in moves}) == 2 * len(moves):  # nobody moves twice
            options.append(
                Normalisation(
                    after, moves, now.before_us, _period(after, costs, policy), _copies(start, moves, copy_us)
                )
            )
    return min(options, key=lambda option: (option.after_us, option.copy_us), default=None)


def _load(view: ClusterView, costs: CostModel, stage: int) -> float:
    return (costs.forward[stage] + costs.input[stage] + costs.weight[stage]) / len(view.live_replicas(stage))


def _move(view: ClusterView, source: int, target: int) -> WorkerMove:
    """Return the move from the replica that lost most to the one that lost least: whole replicas stay whole."""
    losses = Counter(seat.replica for seat in view.lost)
    worker = max(view.live_replicas(source), key=lambda replica: (losses[replica], replica))
    empty = [seat.replica for seat in view.lost if seat.stage == target]
    return WorkerMove(Seat(worker, source), Seat(min(empty, key=lambda replica: (losses[replica], replica)), target))


def _copies(start: ClusterView, moves: Sequence[WorkerMove], copy_us: Sequence[int]) -> int:
    arriving = Counter(move.seat.stage for move in moves)
    return max(copy_us[stage] * -(-count // len(start.live_replicas(stage))) for stage, count in arriving.items())


def _period(view: ClusterView, costs: CostModel, policy: Policy) -> int:
    solution, _ = solve(prepare(view, costs, policy))
    return solution.period
