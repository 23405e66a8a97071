"""Plans for batches that shrink (core/vocabulary/step_batches.py): of the whole replicas, under their own names.

The micro-batches of lost replicas have a route too, for a step that had them already when their replica was lost: each
goes to one whole replica, in turn, so that nothing of it crosses replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.program import (
    OP_SHIFT,
    OPS,
    PLACE_MASK,
    REPLICA_SHIFT,
    Packed,
    Programs,
    Route,
)
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.planner.plan_error import PlanError

Planner = Callable[[ClusterView, CostModel, Policy], Plan]


def shrunk(view: ClusterView, costs: CostModel, policy: Policy, plan: Planner) -> Plan:
    """Return ``plan``'s plan for the replicas left in ``view``. Raises PlanError if none is, or one is lost in part."""
    replicas = view.whole
    if not replicas:
        raise PlanError("no replica is whole: with batch: shrink no other worker computes for the rest of one")
    torn = sorted({seat.replica for seat in view.live} - set(replicas))
    if torn:
        raise PlanError(
            f"replica {torn[0]} is lost in part: with batch: shrink only whole replicas are lost (unit: replica)"
        )
    place = {replica: number for number, replica in enumerate(replicas)}
    slowness = tuple(
        (Seat(place[seat.replica], seat.stage), percent) for seat, percent in costs.slowness if seat.replica in place
    )
    small = replace(view.topology, replicas=len(replicas)).full()
    planned = plan(small, replace(costs, slowness=slowness), policy)
    names = np.array(replicas, np.int64)
    return Plan(
        view,
        policy,
        _route(view, planned.route, names),
        Programs(_seats(planned.programs, replicas), planned.programs.ends, _codes(planned.programs, names)),
        Packed(_seats(planned.starts, replicas), planned.starts.ends, planned.starts.data),
        planned.period_us,
        planned.bound_us,
        planned.span_us,
    )


def _seats(rows: Packed, replicas: tuple[int, ...]) -> tuple[Seat, ...]:
    """Return the seats of ``rows`` under their names, in the same order."""
    return tuple(Seat(replicas[seat.replica], seat.stage) for seat in rows.seats)


def _codes(programs: Programs, names: NDArray[np.int64]) -> bytes:
    codes = np.frombuffer(programs.data, np.int64).copy()
    wide = np.array([op in STAGE_WIDE for op in OPS])
    named = ~wide[codes >> OP_SHIFT]
    numbers = codes[named] >> REPLICA_SHIFT & PLACE_MASK
    codes[named] += (names[numbers] - numbers) << REPLICA_SHIFT
    return codes.tobytes()


def _route(view: ClusterView, route: Route, names: NDArray[np.int64]) -> Route:
    topology = view.topology
    made = np.empty((topology.stages, topology.replicas, topology.micro_batches), np.int32)
    small = np.frombuffer(route.data, np.int32).reshape(topology.stages, len(names), topology.micro_batches)
    made[:, names] = names[small]
    lost = np.setdiff1d(np.arange(topology.replicas), names)
    turn = np.arange(len(lost) * topology.micro_batches).reshape(len(lost), topology.micro_batches)
    made[:, lost] = names[turn % len(names)]
    return Route(topology, made.tobytes())
