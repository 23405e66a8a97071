"""What is left of a step and its order, worked out object by object: what the planner's arrays (planner/closure.py and
planner/recovery_order.py) have to come to as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers, provides, requires
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.recovery_plan import Held, Torn
from recycle_plugin.core.vocabulary.step_batches import StepBatches
from recycle_plugin.planner.flat import KINDS
from recycle_plugin.planner.lower import BoundaryRoute, lower, send
from recycle_plugin.planner.memory import StageMemory, memory

MADE_OF_BLOCK = ("wgrad", "inner", "stash")  # what of it is only with its worker, most of it first


@dataclass(frozen=True, slots=True)
class BoundaryMove:
    """The way of one boundary tensor in a recovery plan, from ``source`` to ``target``.  ``kept``: the source has it
    from before, and sends it before anything else.
    """

    source: Seat
    target: Seat
    kept: bool


@dataclass(frozen=True)
class RecoveryPlan:
    """The work that is left of ``step``, for every live seat, in no particular order.

    ``compute``: F, I, W and B.  ``boundary_only``: those F and I that make a boundary tensor only, because the
    micro-batch's weight gradient has been counted already.  ``closing``: REDUCE, TIE, VALIDATE and STEP, in this order.
    ``holders``: by stage, from whom the others get the reduced gradient, where somebody has it.  ``moves``: how
    boundary tensors that are not on their consumer's worker get there.  ``undo``: who has to take the step back before
    that.
    """

    step: int
    compute: Mapping[Seat, tuple[Instruction, ...]]
    boundary_only: frozenset[Instruction]
    closing: Mapping[Seat, tuple[Instruction, ...]]
    holders: Mapping[int, Seat]
    moves: Mapping[Datum, BoundaryMove]
    undo: frozenset[Seat]


def plan_recovery(plan: Plan, step: int, held: Held, batches: StepBatches | None = None) -> RecoveryPlan:
    """The least work that finishes ``step`` for the live seats of ``plan``, given what each of them holds.
    ``batches``: as for :func:`unfinished`.

    What has to start from its forward runs where ``plan`` routes it.  Costs time in proportion to the data held and the
    micro-batches of all stages.  Raises :class:`Torn` where the survivors' data contradicts itself.
    """
    whose = frozenset(range(plan.view.topology.replicas) if batches is None else batches.of(step))
    batch = [one for one in plan.view.topology.batch if one.replica in whose]
    closure = _Closure(plan, step, held)
    for stage in range(plan.stages):
        closure.finish(stage, batch)
    closure.close()
    seats = sorted(plan.view.live | held.keys())  # who is joining holds something, and is given no work
    return RecoveryPlan(
        step,
        {seat: tuple(sorted(closure.compute[seat], key=str)) for seat in seats},
        closure.boundary_only(),
        {seat: tuple(closure.closing[seat]) for seat in seats},
        closure.holders,
        closure.moves,
        frozenset(closure.undo),
    )


class _Closure:
    """Collects what is needed, depth first."""

    def __init__(self, plan: Plan, step: int, held: Held) -> None:
        self._plan, self._step, self._held = plan, step, held
        members = plan.view.live | held.keys()
        self._seats = {stage: sorted(seat for seat in members if seat.stage == stage) for stage in range(plan.stages)}
        self._blocks = plan.policy.blocks(plan.view.topology)
        self._where = _index(held, step)
        self._homes = self._begun()
        self._lacking: set[int] = set()  # stages in which somebody has no reduced gradient
        self._whole: set[Instruction] = set()  # input gradients that leave their weights' half
        self.holders: dict[int, Seat] = {}
        self.compute: dict[Seat, set[Instruction]] = {seat: set() for seat in members}
        self.closing: dict[Seat, list[Instruction]] = {seat: [] for seat in members}
        self.moves: dict[Datum, BoundaryMove] = {}
        self.undo: set[Seat] = set()

    # --- a stage ------------------------------------------------------------------------------------

    def finish(self, stage: int, batch: Iterable[MicroBatch]) -> None:
        """Sees to it that every live worker of ``stage`` gets the gradient reduced over ``batch``."""
        reduced = Datum("reduced", stage, None, self._step)
        holders = [seat for seat in self._seats[stage] if reduced in self._held[seat]]
        if len(holders) == len(self._seats[stage]):
            return
        self._lacking.add(stage)
        if holders:
            self.holders[stage] = holders[0]
            return
        missing: set[Block] = set()
        for micro_batch in batch:
            found, block = (
                self._where.get(Datum("wgrad", stage, micro_batch, self._step), ()),
                self._blocks.of(micro_batch),
            )
            if len(found) > 1:
                self._torn(stage, micro_batch, f"is in the sums of seats {_names(found)}, and would be counted twice")
            if not found:
                missing.add(block)
                self._weight(stage, micro_batch)
            elif block in missing or found[0] != self._homes[stage, block]:
                self._torn(
                    stage, micro_batch, f"is in the sum of seat {found[0]}, and what its block adds before it is not"
                )

    def _torn(self, stage: int, micro_batch: MicroBatch, how: str) -> None:
        raise Torn(
            f"the weight gradient of micro-batch {micro_batch} on stage {stage}, step {self._step}, {how}: "
            "this is a mistake of the plugin; go on from the last checkpoint, and report it with the run's events.jsonl"
        )

    def close(self) -> None:
        """Adds REDUCE where a stage lacks its result, TIE where one of a tie lacks its own, then VALIDATE, by all or by
        nobody, and STEP.

        Where somebody has stepped the norm was told to all, and VALIDATE finds it there
        (core/messages/contributions.py): nobody waits for one again.
        """
        behind = {seat for seat in self._held if not self._stepped(seat)} | self.undo
        apart = self._apart()
        for seat in sorted(self._held):
            runs = {
                Op.REDUCE: seat.stage in self._lacking,
                Op.TIE: seat.stage in apart,
                Op.VALIDATE: bool(behind),
                Op.STEP: seat in behind,
            }
            self.closing[seat] = [
                Instruction(op, seat.stage, None, self._step) for op in self._plan.policy.closing(tied=True) if runs[op]
            ]

    def _apart(self) -> set[int]:
        """Stages that share weights, and somebody there has no sum over all that share them."""
        lacks = {seat.stage for seat, have in self._held.items() if of_layers("tied", seat, self._step) not in have}
        return {stage for tie in self._plan.view.topology.ties if lacks.intersection(tie) for stage in tie}

    def boundary_only(self) -> frozenset[Instruction]:
        found = set()
        for work in self.compute.values():
            backwards = {(one.stage, one.micro_batch) for one in work if one.op in (Op.I, Op.B)}
            found |= {one for one in work if one.op is Op.F and (one.stage, one.micro_batch) not in backwards}
            found |= {one for one in work if one.op is Op.I and one not in self._whole}
        return frozenset(found)

    def _stepped(self, seat: Seat) -> bool:
        return of_layers("params", seat, self._step + 1) in self._held[seat]

    # --- a micro-batch ------------------------------------------------------------------------------

    def _weight(self, stage: int, micro_batch: MicroBatch) -> None:
        seat = self._seat_of(stage, micro_batch)
        if Datum("inner", stage, micro_batch, self._step) in self._held[seat]:
            self.compute[seat].add(Instruction(Op.W, stage, micro_batch, self._step))
            return
        split = self._plan.policy.split_backward
        gradient = Instruction(Op.I, stage, micro_batch, self._step)
        self.compute[seat].discard(gradient)  # one that makes the boundary tensor only
        for op in (Op.I, Op.W) if split else (Op.B,):
            self.compute[seat].add(Instruction(op, stage, micro_batch, self._step))
        self._whole.add(gradient)
        self._inputs_of(gradient, seat)

    def _make(self, datum: Datum) -> Seat:
        """Has a boundary tensor made (again); returns the seat that does."""
        seat = self._seat_of(datum.stage, datum.made_of)
        if datum.kind == "act":
            self._forward(seat, datum.stage, datum.made_of)
        else:
            one, fused = (Instruction(op, datum.stage, datum.micro_batch, self._step) for op in (Op.I, Op.B))
            if self.compute[seat].isdisjoint((one, fused)):
                self.compute[seat].add(one)
                self._inputs_of(one, seat)
        return seat

    def _forward(self, seat: Seat, stage: int, micro_batch: MicroBatch) -> None:
        one = Instruction(Op.F, stage, micro_batch, self._step)
        if one not in self.compute[seat]:
            self.compute[seat].add(one)
            self._inputs_of(one, seat)

    def _inputs_of(self, instruction: Instruction, seat: Seat) -> None:
        for datum in requires(instruction, self._plan.stages):
            if datum.kind == "stash" and datum not in self._held[seat]:
                self._forward(seat, datum.stage, datum.made_of)
            elif datum.kind == "params" and self._stepped(seat):
                self.undo.add(seat)
            elif datum.kind in ("act", "grad") and datum not in self._held[seat] and datum not in self.moves:
                makers = self._where.get(datum)
                self.moves[datum] = BoundaryMove(makers[0] if makers else self._make(datum), seat, bool(makers))

    def _seat_of(self, stage: int, micro_batch: MicroBatch) -> Seat:
        """The seat that works on the micro-batch: where most of its block is, or else where the plan routes it."""
        return self._homes.get((stage, self._blocks.of(micro_batch))) or self._plan.route[stage, micro_batch]

    def _begun(self) -> dict[tuple[int, Block], Seat]:
        """The seat that has most of each block that somebody has begun.

        A stash may be left of what was run for its boundary tensor only.
        """
        homes: dict[tuple[int, Block], tuple[int, Seat]] = {}
        for datum, seats in self._where.items():
            if datum.kind in MADE_OF_BLOCK:
                key = datum.stage, self._blocks.of(datum.made_of)
                homes[key] = min(
                    homes.get(key, (len(MADE_OF_BLOCK), seats[0])), (MADE_OF_BLOCK.index(datum.kind), seats[0])
                )
        return {key: seat for key, (_, seat) in homes.items()}


def _index(held: Held, step: int) -> dict[Datum, list[Seat]]:
    """The seats of the stage that makes it which have each datum of ``step``."""
    where: dict[Datum, list[Seat]] = {}
    for seat in sorted(held):
        for datum in held[seat]:
            if datum.step == step and datum.stage == seat.stage:
                where.setdefault(datum, []).append(seat)
    return where


def _names(seats: list[Seat]) -> str:
    return ", ".join(map(str, seats))


def programs(recovery: RecoveryPlan, plan: Plan, costs: CostModel, held: Held) -> dict[Seat, tuple[Instruction, ...]]:
    """What every live seat executes: first what it keeps for others, then what it computes, then the closing."""
    order = _Order(recovery, plan, costs, held).run()
    kept: dict[Seat, list[Instruction]] = {seat: [] for seat in order}
    for datum, move in sorted((datum, move) for datum, move in recovery.moves.items() if move.kept):
        kept[move.source].append(send(datum, move.target))

    def way(seat: Seat, datum: Datum) -> BoundaryRoute:
        move = recovery.moves.get(datum)
        if move is None:
            return BoundaryRoute(plan.route[datum.stage, datum.made_of], None)
        return BoundaryRoute(move.source, move.target if not move.kept and move.source == seat else None)

    return {
        seat: (*kept[seat], *lower(order[seat], plan.stages, partial(way, seat)), *recovery.closing[seat])
        for seat in order
    }


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
        self._events: list[tuple] = []  # time, order at one time, and which operation of whom is ready or has ended
        self._since: dict[tuple[Seat, Instruction], int] = {}  # when what is kept for it is there
        self._missing: dict[tuple[Seat, Instruction], int] = {}
        self._users: dict[Datum, tuple[Seat, Instruction]] = {}
        self._now = 0
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
                _, ready, *_, seat, one = heappop(self._events)
                self._offer(seat, one) if ready else self._end(seat, one)
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
        moves = [self._recovery.moves.get(datum) for datum in requires(one, self._costs.stages)]
        on_the_way = [self._costs.transfer(move.source, seat) for move in moves if move is not None and move.kept]
        self._since[seat, one] = max(on_the_way, default=0)
        if not made:
            self._push(self._since[seat, one], seat, one, False)

    def _push(self, at: int, seat: Seat, one: Instruction, ended: bool) -> None:
        heappush(self._events, (at, not ended, KINDS.index(one.op), one.stage, one.works_on, seat, one))

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
                    there = self._now + (self._costs.transfer(seat, user) if user != seat else 0)
                    self._push(max(there, self._since[user, wanted]), user, wanted, False)

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
