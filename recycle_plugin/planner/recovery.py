"""Recovery plans: the instructions that a failure makes necessary again, and no others, in an order that can't
deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.packed_data import groups
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.recovery_plan import Held
from recycle_plugin.core.vocabulary.step_batches import StepBatches
from recycle_plugin.planner.closure import Rest, closure
from recycle_plugin.planner.flat import KINDS
from recycle_plugin.planner.lower import BoundaryRoute, lower, send
from recycle_plugin.planner.recovery_order import order_rest
from recycle_plugin.planner.rest_problem import rest_problem


def recover(
    plan: Plan,
    costs: CostModel,
    step: int,
    held: Held,
    batches: StepBatches | None = None,
    also_back: frozenset[Seat] = frozenset(),
) -> Recovery:
    """Return the least work that finishes ``step`` for the live seats of ``plan``, given what each of them holds.

    ``batches``: whose micro-batches the step has, if not all; ``also_back``: seats that take the step back in any case.
    Costs time in proportion to the data held and the micro-batches of all stages. Raises
    :class:`core.vocabulary.recovery_plan.Torn` if the survivors' data contradicts itself.
    """
    members = plan.view.live | held.keys()  # a joining worker holds something, and is given no work
    holders, lacking = _sums(members, _having("reduced", step, held))
    whose = range(plan.view.topology.replicas) if batches is None else batches.of(step)
    rest = closure(plan, step, held, whose, [stage for stage in lacking if stage not in holders])
    stepped = _having("params", step + 1, held)
    reads = rest.forward | rest.backward  # the parameters as they were
    readers = {
        Seat(replica, stage) for stage in range(plan.stages) for replica in set(rest.home[stage][reads[stage]].tolist())
    }
    undo = stepped & readers
    closing = Closing(plan, step, held, lacking, held.keys() - stepped | undo)
    return Recovery(plan, costs, step, rest, closing, holders, undo | also_back)


def _having(kind: str, step: int, held: Held) -> frozenset[Seat]:
    """Return the seats that hold the datum of ``kind`` and ``step`` of all their layers."""
    chunks = {group.stage for group in groups(*held.values()) if (group.kind, group.step) == (kind, step)}
    return frozenset(
        seat for seat, have in held.items() if seat.chunk in chunks and of_layers(kind, seat, step) in have
    )


def _sums(members: Collection[Seat], having: Collection[Seat]) -> tuple[dict[int, Seat], list[int]]:
    """Return the holder of the reduced gradient, by stage, if another member lacks it; and the stages where a member
    lacks it.
    """
    lacking = {seat.stage for seat in members if seat not in having}
    holders = {seat.stage: seat for seat in sorted(having, reverse=True) if seat.stage in lacking}
    return holders, sorted(lacking)


class Closing(Mapping[Seat, tuple[Instruction, ...]]):
    """The end of each seat's program, after its micro-batches: REDUCE if its stage lacks the result, TIE if a stage of
    its tie lacks it, then VALIDATE, by all seats or by none, and STEP, if the seat is ``behind``. If a worker has
    stepped, all were told the norm, and VALIDATE finds it (core/messages/contributions.py): no seat waits for it again.
    Each worker asks for its own seat only.
    """

    def __init__(self, plan: Plan, step: int, held: Held, lacking: Collection[int], behind: Collection[Seat]) -> None:
        self._ops, self._step, self._held = plan.policy.closing(tied=True), step, held
        self._lacking, self._behind, ties = lacking, behind, plan.view.topology.ties
        untied = (
            {seat.chunk for seat, have in held.items() if of_layers("tied", seat, step) not in have} if ties else ()
        )
        self._apart = {stage for tie in ties if set(tie).intersection(untied) for stage in tie}

    def __getitem__(self, seat: Seat) -> tuple[Instruction, ...]:
        if seat not in self._held:
            raise KeyError(seat)
        runs = {
            Op.REDUCE: seat.stage in self._lacking,
            Op.TIE: seat.chunk in self._apart,
            Op.VALIDATE: bool(self._behind),
            Op.STEP: seat in self._behind,
        }
        return tuple(Instruction(op, seat.chunk, None, self._step) for op in self._ops if runs[op])

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclass(frozen=True)
class Recovery:
    """The work left of ``step`` (core.vocabulary.recovery_plan.RecoveryPlan). ``closing``: by seat REDUCE to STEP."""

    plan: Plan
    costs: CostModel
    step: int
    rest: Rest
    closing: Mapping[Seat, tuple[Instruction, ...]]
    holders: Mapping[int, Seat]
    undo: frozenset[Seat]

    def program(self, seat: Seat) -> tuple[Instruction, ...]:
        """Return the program of ``seat``: sends of what it kept, computation (planner/lower.py), and the closing."""
        computed = lower(self.computed(seat), self.plan.stages, partial(self._way, seat))
        return (*self._kept(seat), *computed, *self.closing.get(seat, ()))

    def computed(self, seat: Seat) -> tuple[Instruction, ...]:
        """Return the F, I, W and B of ``seat``, in order."""
        width, order = self.rest.home.shape[1], self._order
        kinds, records = np.divmod(order, self.rest.home.size)
        mine = self._worker[records] == seat.stage * self._replicas + seat.replica
        return tuple(
            Instruction(KINDS[kind], seat.chunk, self._named(record % width), self.step)
            for kind, record in zip(kinds[mine].tolist(), records[mine].tolist())
        )

    def boundary_only(self, seat: Seat) -> frozenset[Instruction]:
        mine = self.rest.home[seat.stage] == seat.replica
        masks = {Op.F: self.rest.forward_only, Op.I: self.rest.boundary}
        return frozenset(
            Instruction(op, seat.chunk, self._named(column), self.step)
            for op, mask in masks.items()
            for column in np.flatnonzero(mask[seat.stage] & mine).tolist()
        )

    def forwards(self, stage: int) -> dict[MicroBatch, Seat]:
        columns = np.flatnonzero(self.rest.forward[stage])
        who = self.rest.home[stage][columns].tolist()
        return {self._named(column): Seat(replica, stage) for column, replica in zip(columns.tolist(), who)}

    def _kept(self, seat: Seat) -> Iterator[Instruction]:
        """Yield the data that ``seat`` has from before the failure and sends before anything else."""
        for kind, user in (("act", seat.stage + 1), ("grad", seat.stage - 1)):
            mine = self.rest.sent[kind][seat.stage] & (self.rest.kept[kind][seat.stage] == seat.replica)
            for column in np.flatnonzero(mine).tolist():
                target = Seat(int(self.rest.home[user, column]), user)
                yield send(Datum(kind, seat.chunk, self._named(column), self.step), target)

    def _way(self, seat: Seat, datum: Datum) -> BoundaryRoute:
        """Return the way of a boundary tensor, as far as ``seat`` has to receive or send it."""
        stage, column = datum.stage, self._column(datum.made_of)
        if not self.rest.sent[datum.kind][stage, column]:
            return BoundaryRoute(self.plan.route[stage, datum.made_of], None)
        kept, user = int(self.rest.kept[datum.kind][stage, column]), stage + (1 if datum.kind == "act" else -1)
        source = Seat(int(self.rest.home[stage, column]) if kept < 0 else kept, stage)
        sends = kept < 0 and source == seat
        return BoundaryRoute(source, Seat(int(self.rest.home[user, column]), user) if sends else None)

    @property
    def _replicas(self) -> int:
        return self.plan.view.topology.replicas

    def _named(self, column: int) -> MicroBatch:
        return MicroBatch(*divmod(column, self.plan.view.topology.micro_batches))

    def _column(self, micro_batch: MicroBatch) -> int:
        return micro_batch.replica * self.plan.view.topology.micro_batches + micro_batch.index

    @cached_property
    def _worker(self) -> NDArray[np.int64]:
        stages = np.arange(self.plan.stages)[:, None]
        return (stages * self._replicas + self.rest.home).reshape(-1)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """All operations in one global order, each as its kind's number * records + record."""
        order = np.empty(3 * self.rest.home.size, np.int64)
        return order[: order_rest(rest_problem(self.rest, self.plan, self.costs), order)]
