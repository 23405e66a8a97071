"""The order in which a :class:`core.vocabulary.recovery_plan.RecoveryPlan` runs: list scheduling over what is left of a
step.

As for a whole step there is one global order, projected on the workers, so that it can't deadlock.  It is made once per
failure for a part of one step, so it takes the plain rule: I before F where memory allows before W, micro-batches by
index.  Every worker finds the same order from the same inventories.  Weight gradients of a block
(core/vocabulary/blocks.py) wait for each other.

It keeps to the memory cap, which the plan's own order would not: what survivors hold comes on top of what starts anew.
The price is time where there are many workers: 0.1 s for 32 of them, some 5 s for 1,536 (and as much again for the
closure).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from heapq import heappop, heappush

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, provides, requires
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.recovery_plan import Held, RecoveryPlan
from recycle_plugin.planner.lower import BoundaryRoute, lower, send
from recycle_plugin.planner.memory import StageMemory, memory

Programs = Mapping[Seat, tuple[Instruction, ...]]


def arrange(recovery: RecoveryPlan, plan: Plan, costs: CostModel, held: Held) -> Programs:
    """The program of every live seat that carries ``recovery`` out: first what it keeps for others, then what it
    computes, then the closing.

    LOAD and transport are put around it (planner/lower.py) once somebody asks for a seat's program, since each worker
    asks for its own only.  Raises PlanError where memory holds no micro-batch.
    """
    return Arranged(recovery, plan, _Order(recovery, plan, costs, held).run())


class Arranged(Mapping[Seat, tuple[Instruction, ...]]):
    """The programs of a recovery plan by seat, each made when it is asked for.  ``computed``: each seat's F, I, W and B
    in the global order.
    """

    def __init__(self, recovery: RecoveryPlan, plan: Plan, computed: Mapping[Seat, list[Instruction]]) -> None:
        self._recovery, self._plan, self._computed = recovery, plan, computed
        self._kept: dict[Seat, list[Instruction]] = {}
        for datum, move in sorted((datum, move) for datum, move in recovery.moves.items() if move.kept):
            self._kept.setdefault(move.source, []).append(send(datum, move.target))

    def __getitem__(self, seat: Seat) -> tuple[Instruction, ...]:
        computed = lower(self._computed[seat], self._plan.stages, partial(self._way, seat))
        return (*self._kept.get(seat, ()), *computed, *self._recovery.closing[seat])

    def _way(self, seat: Seat, datum: Datum) -> BoundaryRoute:
        """The way of a boundary tensor: ``seat`` has from before what has no move here, and what others send needs no
        sending by it.
        """
        move = self._recovery.moves.get(datum)
        if move is None:
            return BoundaryRoute(self._plan.route[datum.stage, datum.made_of], None)
        return BoundaryRoute(move.source, move.target if not move.kept and move.source == seat else None)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._computed)

    def __len__(self) -> int:
        return len(self._computed)


class _Worker:
    """One seat's queues of what it may do next, and how much memory it has left."""

    __slots__ = ("backwards", "busy", "forwards", "room", "weights")

    def __init__(self, room: int) -> None:
        self.backwards: list[tuple] = []
        self.forwards: list[tuple] = []
        self.weights: deque[Instruction] = deque()
        self.room = room
        self.busy = False


class _Order:
    """An event-driven scheduler: an instruction is offered to its seat once all that it needs of the recovery plan is
    there.
    """

    def __init__(self, recovery: RecoveryPlan, plan: Plan, costs: CostModel, held: Held) -> None:
        self._recovery, self._costs, self._memory = recovery, costs, memory(costs, plan.policy)
        self._blocks = plan.policy.blocks(plan.view.topology)
        self._workers = {
            seat: _Worker(_room(self._memory, seat, held[seat], recovery.step)) for seat in recovery.compute
        }
        self._events: list[tuple[int, int, Seat, Instruction, bool]] = []
        self._missing: dict[tuple[Seat, Instruction], int] = {}
        self._users: dict[Datum, tuple[Seat, Instruction]] = {}
        self._now, self._count = 0, 0
        self._order: dict[Seat, list[Instruction]] = {seat: [] for seat in recovery.compute}
        self._left = sum(map(len, recovery.compute.values()))
        made = {datum for work in recovery.compute.values() for one in work for datum in provides(one)}
        for seat, work in sorted(recovery.compute.items()):
            for one in work:
                self._await(
                    seat, one, [datum for datum in (*requires(one, plan.stages), *self._in_turn(one)) if datum in made]
                )

    def run(self) -> dict[Seat, list[Instruction]]:
        while self._left:
            if not self._events:
                self._force()
            self._now = self._events[0][0]
            touched = []
            while self._events and self._events[0][0] == self._now:
                _, _, seat, one, ended = heappop(self._events)
                self._end(seat, one) if ended else self._offer(seat, one)
                touched.append(seat)
            for seat in touched:
                self._start(seat)
        return self._order

    def _in_turn(self, one: Instruction) -> Iterator[Datum]:
        before = self._blocks.before(one.works_on)
        if before is not None and one.op in (Op.W, Op.B):
            yield Datum("wgrad", one.stage, before, one.step)

    def _await(self, seat: Seat, one: Instruction, made: list[Datum]) -> None:
        self._missing[seat, one] = len(made)
        for datum in made:
            self._users[datum] = (seat, one)
        if not made:
            kept = [
                move
                for datum in requires(one, self._costs.stages)
                if (move := self._recovery.moves.get(datum)) and move.kept
            ]
            self._push(max((self._costs.transfer(move.source, seat) for move in kept), default=0), seat, one, False)

    def _push(self, at: int, seat: Seat, one: Instruction, ended: bool) -> None:
        self._count += 1
        heappush(self._events, (at, self._count, seat, one, ended))

    def _offer(self, seat: Seat, one: Instruction) -> None:
        worker, key = self._workers[seat], (one.works_on.index, one.works_on.replica)
        if one.op is Op.W:
            worker.weights.append(one)
        else:
            heappush(worker.forwards if one.op is Op.F else worker.backwards, (*key, str(one), one))

    def _end(self, seat: Seat, one: Instruction) -> None:
        worker, (activation, pending) = self._workers[seat], self._holds(seat)
        worker.busy = False
        kept = pending if one not in self._recovery.boundary_only else 0
        worker.room += {Op.F: 0, Op.I: activation - kept, Op.W: pending, Op.B: activation}[one.op]
        for datum in provides(one):
            if datum in self._users:
                user, wanted = self._users[datum]
                self._missing[user, wanted] -= 1
                if not self._missing[user, wanted]:
                    self._push(
                        self._now + (self._costs.transfer(seat, user) if user != seat else 0), user, wanted, False
                    )

    def _start(self, seat: Seat) -> None:
        worker, (activation, pending) = self._workers[seat], self._holds(seat)
        if worker.busy:
            return
        if worker.backwards and (worker.room >= pending - activation or not worker.weights):
            self._run(seat, heappop(worker.backwards)[-1])
        elif worker.forwards and worker.room >= activation:
            self._run(seat, heappop(worker.forwards)[-1])
        elif worker.weights:
            self._run(seat, worker.weights.popleft())

    def _run(self, seat: Seat, one: Instruction) -> None:
        worker = self._workers[seat]
        worker.busy = True
        if one.op is Op.F and one not in self._recovery.boundary_only:
            worker.room -= self._holds(seat)[0]
        self._order[seat].append(one)
        self._left -= 1
        self._push(self._now + self._costs.of(one.op, seat.stage, seat), seat, one, True)

    def _force(self) -> None:
        """Goes past the memory cap, since nobody can go on within it: what survived of the old routes and what is new
        don't fit.
        """
        seat = min(
            (seat for seat, worker in self._workers.items() if worker.forwards), key=lambda seat: (-seat.stage, seat)
        )
        self._run(seat, heappop(self._workers[seat].forwards)[-1])

    def _holds(self, seat: Seat) -> tuple[int, int]:
        """The memory that an activation and a pending weight gradient take."""
        return int(self._memory.activation[seat.stage]), int(self._memory.pending[seat.stage])


def _room(memory: StageMemory, seat: Seat, held: AbstractSet[Datum], step: int) -> int:
    """The memory of a worker that is left beside what it holds of ``step``."""
    each = {"stash": memory.activation[seat.stage], "inner": memory.pending[seat.stage]}
    return int(memory.cap[seat.stage] - sum(each.get(datum.kind, 0) for datum in held if datum.step == step))
