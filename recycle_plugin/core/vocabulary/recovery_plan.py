"""Recovery plans: what has to run again after a failure, and nothing else, because recovery is lineage.

To finish a step every live worker needs its stage's reduced gradient, and that needs every micro-batch's weight
gradient.  What of these survived, on whichever live worker, stays as it is.  What has to run is the *backward closure*
of what is missing, through ``core.vocabulary.dataflow``: a weight gradient needs what its input gradient left, that
needs the stash and the gradient from one stage down, and so on, until something is met that a live worker holds.
Boundary tensors are kept by who made them until the step is committed, and sent once more.

In exact mode weight gradients are in the sums of blocks (core/vocabulary/blocks.py).  A block that a live worker has
begun goes on there, in order; one whose worker has died is made again, all of it, by one worker.

Nothing surviving, this is the restart of the step; more surviving (a log), it is SWIFT's replay (PPoPP'23).

Where the closure runs through a worker that has already stepped, that worker takes its step back first and steps again
from the reduced gradient, which it keeps.  Where some live worker of a stage holds the whole reduced gradient, the
others get it from there (the stage rolls forward); otherwise it is summed again from untouched contributions.  Where
stages share weights (core/vocabulary/topology.py) and somebody lacks the sum over them, all of them make it again from
the reduced gradients, which everybody keeps: it comes out the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers, requires
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.step_batches import StepBatches

Held = Mapping[Seat, AbstractSet[Datum]]
"""What each live worker still has."""


MADE_OF_BLOCK = ("wgrad", "inner", "stash")  # what of it is only with its worker, most of it first


class Torn(Exception):
    """The survivors hold data that contradicts itself: going on would train with a wrong gradient."""


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


def unfinished(
    plan: Plan, committed: int, held: Held, rejected: bool = False, batches: StepBatches | None = None
) -> tuple[RecoveryPlan, ...]:
    """The recovery plans of the steps after ``committed`` that somebody has begun, two at most
    (core/vocabulary/commit_rule.py).

    Stashes of the second step do not outlive a step that is taken back: their parameters are about to change.
    ``rejected``: the first was rejected (core/coordinator/step_validation.py) and not everybody knows, so who has
    applied it astray takes it back, and nothing later counts, be it from somebody who has not stepped: a worker that
    has, and is lost, may have sent it.  ``batches``: whose micro-batches each step has, where that is not all.  Raises
    :class:`Torn`.
    """
    if rejected:
        back, held = _astray(held, committed + 1), without_later(held, committed + 1)
        recovery = plan_recovery(plan, committed + 1, held, batches)
        return (replace(recovery, undo=recovery.undo | back),)
    recovery_plans: list[RecoveryPlan] = []
    for step in (committed + 1, committed + 2):
        if any(datum.step == step and datum.kind != "params" for have in held.values() for datum in have):
            recovery_plans.append(plan_recovery(plan, step, held, batches))
            held = surviving(held, recovery_plans[-1])
    return tuple(recovery_plans)


def uninformed(held: Held, step: int) -> frozenset[Seat]:
    """The seats whose worker does not know the norm that ``step`` was rejected for."""
    return frozenset(seat for seat, have in held.items() if of_layers("norm", seat, step) not in have)


def _astray(held: Held, step: int) -> frozenset[Seat]:
    """The seats whose worker has applied ``step`` without knowing that it was rejected."""
    return frozenset(seat for seat in uninformed(held, step) if of_layers("params", seat, step + 1) in held[seat])


def without_later(held: Held, step: int) -> Held:
    """The part of ``held`` that counts where ``step`` was rejected: no data of later steps, and no parameters of who
    has applied it astray.
    """
    back = _astray(held, step)
    return {
        seat: frozenset(datum for datum in have if datum.step <= step or (datum.kind == "params" and seat not in back))
        for seat, have in held.items()
    }


def before(held: Held, step: int) -> Held:
    """The part of ``held`` that counts where data does not fill ``step``, which nobody has applied."""
    return {
        seat: frozenset(datum for datum in have if datum.step < step or datum.kind == "params")
        for seat, have in held.items()
    }


def surviving(held: Held, recovery: RecoveryPlan) -> Held:
    """The data that is still held once those who take the step of ``recovery`` back have done so."""
    later = Datum("params", 0, None, recovery.step + 1)

    def stays(seat: Seat, datum: Datum) -> bool:
        return datum.step <= recovery.step or (datum.kind != "stash" and datum != later._replace(stage=seat.stage))

    return {
        seat: have if seat not in recovery.undo else frozenset(d for d in have if stays(seat, d))
        for seat, have in held.items()
    }


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
