"""A store of plans made before they are needed, for the likeliest next failures.

Replicas that lost the same stages are interchangeable, so a solution is kept per *pattern* (who is lost or slow, by
rank) and not per membership: in a fault-free job of DP x PP workers the loss of any one has only PP patterns. A stored
plan has the digest that ``planner.plan`` would give it, so a worker with a store and one without agree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.planner.flat import Array
from recycle_plugin.planner.list_scheduling import timed
from recycle_plugin.planner.make import finish, prepare, solve
from recycle_plugin.planner.plan_error import PlanError
from recycle_plugin.planner.reroute import canonical_replicas
from recycle_plugin.planner.shrunk import shrunk

MEMORY = 64 << 20
"""Bytes of a store: 48 patterns of 32 x 48 workers with 64 micro-batches take 57 MB."""
Pattern = tuple[Topology, tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]


def pattern(view: ClusterView, costs: CostModel) -> Pattern:
    """Return a view's pattern: topology, the lost (rank, stage), the slow (rank, stage, percent); canonical ranks."""
    rank = {replica: number for number, replica in enumerate(canonical_replicas(view, costs))}
    lost = tuple(sorted((rank[seat.replica], seat.stage) for seat in view.lost))
    slow = (
        (rank[seat.replica], seat.stage, percent)
        for seat, percent in costs.slowness
        if seat in view.live and percent != 100
    )
    return view.topology, lost, tuple(sorted(slow))


def next_failures(view: ClusterView, costs: CostModel, hosts: Iterable[Iterable[Seat]] = ()) -> Iterator[ClusterView]:
    """Yield the views that single failures lead to, one per pattern, the likeliest first: any worker, then any host. A
    pattern is as likely as many workers lead to it. ``hosts``: seats that die together. Costs workers times stages.
    """
    slow = dict(costs.slowness)
    kinds: dict[tuple, list[Seat]] = {}
    for seat in sorted(view.live):
        others = tuple(
            (stage, (seat.replica, stage) in view.live, slow.get(Seat(seat.replica, stage), 100))
            for stage in range(view.topology.stages)
        )
        kinds.setdefault((seat.stage, others), []).append(seat)
    for seats in sorted(kinds.values(), key=lambda seats: (-len(seats), seats[0])):
        yield view.without(seats[0])
    seen = set()
    for host in hosts:
        after = view.without(*host)
        if after.live != view.live and (shape := pattern(after, costs)) not in seen:
            seen.add(shape)
            yield after


class PlanStore:
    """A store of solutions by pattern, for one thread; beyond ``memory`` bytes the least recently used are dropped."""

    def __init__(self, costs: CostModel, policy: Policy, memory: int = MEMORY, whole: bool = False) -> None:
        """``whole``: replicas are lost whole."""
        self.costs, self.policy, self._memory, self._whole = costs, policy, memory, whole
        self._solutions: OrderedDict[Pattern, tuple[NDArray[np.int32], int]] = OrderedDict()  # order, lower bound
        self._kept = 0  # bytes

    def __contains__(self, view: ClusterView) -> bool:
        return pattern(view, self.costs) in self._solutions

    def __len__(self) -> int:
        return len(self._solutions)

    def plan(self, view: ClusterView) -> Plan:
        """Return the verified plan of ``view``, as ``planner.plan`` makes it; keep its solution. Raises PlanError."""
        if self.policy.shrinks and view.lost:
            return shrunk(view, self.costs, self.policy, self._plan)
        return self._plan(view, self.costs, self.policy)

    def _plan(self, view: ClusterView, costs: CostModel, policy: Policy) -> Plan:
        problem = prepare(view, costs, policy)
        shape = pattern(view, costs)
        if shape not in self._solutions:
            solution, least = solve(problem)
            self._keep(shape, solution.order, least)
        else:
            self._solutions.move_to_end(shape)
            order, least = self._solutions[shape]
            solution = timed(problem, order.astype(np.int64), least)
        return finish(view, costs, policy, problem, solution, least)

    def _keep(self, shape: Pattern, order: Array, least: int) -> None:
        """Keep an order, of which :func:`timed` finds the starts again; forget the least recently used."""
        self._solutions[shape] = order.astype(np.int32), least
        self._kept += self._solutions[shape][0].nbytes
        while self._kept > self._memory and len(self._solutions) > 1:
            self._kept -= self._solutions.popitem(last=False)[1][0].nbytes

    def prepare(self, view: ClusterView, hosts: Iterable[Iterable[Seat]] = ()) -> Iterator[ClusterView]:
        """Plan for the likeliest next failures of ``view``, one at each step of the iterator, so that the caller
        decides how much time this takes. Yield what is now in store. A failure that leaves no plan is skipped.
        """
        for after in next_failures(view, self.costs, hosts):
            if self._whole:
                torn = set(view.whole) - set(after.whole)
                after = after.without(*(seat for seat in after.live if seat.replica in torn))
            try:
                if after not in self:
                    self.plan(after)
            except PlanError:
                continue
            yield after
