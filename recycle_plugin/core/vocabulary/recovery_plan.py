"""Recovery plans: what has to run again after a failure, and nothing else, because recovery is lineage.

To finish a step every live worker needs its stage's reduced gradient. Whatever of its inputs survived on a live worker
stays; what is missing runs again, back to something that a live worker holds (planner/closure.py). Boundary tensors are
kept by their makers until the step is committed, and sent once more. If nothing survives, this restarts the step; if
more survives (a log), it is SWIFT's replay (PPoPP'23).

If the closure needs the old parameters of a worker that has already stepped, that worker takes its step back first, and
steps again from the reduced gradient, which it keeps. If a live worker of a stage holds the whole reduced gradient, the
others get it from there (the stage rolls forward). Otherwise it is summed again from untouched contributions. If stages
share weights (core/vocabulary/topology.py) and a worker lacks the sum over them, all make it again from the reduced
gradients, which everybody keeps; it has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.packed_data import Group, groups

Held = Mapping[Seat, AbstractSet[Datum]]
"""What each live worker still has."""


OF_FORWARD = frozenset({"stash", "inner", "wgrad"})
"""What comes of a forward, and stays with its worker until the stage's sum is made."""


class Torn(Exception):
    """The survivors hold contradictory data: going on would train with a wrong gradient."""


class RecoveryPlan(Protocol):
    """The work that is left of a step, for every live seat."""

    @property
    def step(self) -> int:
        """The step's number."""

    @property
    def holders(self) -> Mapping[int, Seat]:
        """By stage, the seat from which the others get the reduced gradient, if a live worker has it."""

    @property
    def undo(self) -> frozenset[Seat]:
        """The seats that take the step back before they run their programs."""

    def program(self, seat: Seat) -> tuple[Instruction, ...]:
        """Return the instructions for ``seat``."""

    def boundary_only(self, seat: Seat) -> frozenset[Instruction]:
        """Return the F and I of ``seat`` that make a boundary tensor only: their weight gradient already counts."""

    def forwards(self, stage: int) -> Mapping[MicroBatch, Seat]:
        """Return the seat of each micro-batch that runs forward on ``stage``."""


class Recover(Protocol):
    """Plan the rest of ``step``, given the data that each worker holds. Workers in ``also_back`` undo in any case.
    Raises :class:`Torn`.
    """

    def __call__(self, step: int, held: Held, also_back: frozenset[Seat] = frozenset()) -> RecoveryPlan: ...


def unfinished(recover: Recover, committed: int, held: Held, rejected: bool = False) -> tuple[RecoveryPlan, ...]:
    """Return the recovery plans of the steps after ``committed`` that a worker has begun, two at most
    (core/vocabulary/commit_rule.py). Raises :class:`Torn`.

    Stashes of the second step do not outlive an undo of the first: their parameters are about to change. ``rejected``:
    the first step was rejected (core/coordinator/facts/step_validation.py) and not every worker knows. Workers that
    applied it unaware take it back, and nothing later counts: a lost worker that had stepped may have sent it.
    """
    if rejected:
        back, held = _astray(held, committed + 1), without_later(held, committed + 1)
        return (recover(committed + 1, held, also_back=back),)
    recovery_plans: list[RecoveryPlan] = []
    for step in (committed + 1, committed + 2):
        if any(group.step == step and group.kind != "params" for group in groups(*held.values())):
            recovery_plans.append(recover(step, held))
            held = surviving(held, recovery_plans[-1])
    return tuple(recovery_plans)


def uninformed(held: Held, step: int) -> frozenset[Seat]:
    """Return the seats whose worker does not know the norm that ``step`` was rejected for."""
    return frozenset(seat for seat, have in held.items() if of_layers("norm", seat, step) not in have)


def counted(have: Iterable[AbstractSet[Datum]], step: int, stage: int) -> set[MicroBatch] | None:
    """Return the micro-batches whose forward on ``stage`` is done for ``step``, given the data ``have`` of its workers.
    None if the stage's sum includes all of them.
    """
    found: set[MicroBatch] = set()
    for each in have:
        kinds = {group.kind for group in groups(each) if group.stage == stage and group.step == step}
        if "reduced" in kinds or Group("params", stage, step + 1) in groups(each):
            return None
        if kinds & OF_FORWARD:
            found |= {datum.made_of for datum in each if datum.kind in OF_FORWARD and datum[1::2] == (stage, step)}
    return found


def _astray(held: Held, step: int) -> frozenset[Seat]:
    """Return the seats whose worker has applied ``step`` without knowing that it was rejected."""
    return frozenset(seat for seat in uninformed(held, step) if of_layers("params", seat, step + 1) in held[seat])


def without_later(held: Held, step: int) -> Held:
    """Return the part of ``held`` that still counts if ``step`` was rejected: no later data, and no parameters applied
    by a worker that did not know.
    """
    back = _astray(held, step)
    return {
        seat: frozenset(datum for datum in have if datum.step <= step or (datum.kind == "params" and seat not in back))
        for seat, have in held.items()
    }


def before(held: Held, step: int) -> Held:
    """Return the part of ``held`` that counts if the data does not fill ``step``, which no worker has applied."""
    return {
        seat: frozenset(datum for datum in have if datum.step < step or datum.kind == "params")
        for seat, have in held.items()
    }


def surviving(held: Held, recovery: RecoveryPlan) -> Held:
    """Return the data that is still held after the undos of ``recovery``."""
    later = Datum("params", 0, None, recovery.step + 1)

    def stays(seat: Seat, datum: Datum) -> bool:
        return datum.step <= recovery.step or (datum.kind != "stash" and datum != later._replace(stage=seat.chunk))

    return {
        seat: have if seat not in recovery.undo else frozenset(d for d in have if stays(seat, d))
        for seat, have in held.items()
    }
