"""Recovery plans: what has to run again after a failure, and nothing else, because recovery is lineage.

To finish a step every live worker needs its stage's reduced gradient.  What of that survived, on whichever live worker,
stays as it is; what has to run is what is missing, back to something that a live worker holds (planner/closure.py).
Boundary tensors are kept by who made them until the step is committed, and sent once more.

Nothing surviving, this is the restart of the step; more surviving (a log), it is SWIFT's replay (PPoPP'23).

Where the closure runs through a worker that has already stepped, that worker takes its step back first and steps again
from the reduced gradient, which it keeps.  Where some live worker of a stage holds the whole reduced gradient, the
others get it from there (the stage rolls forward); otherwise it is summed again from untouched contributions.  Where
stages share weights (core/vocabulary/topology.py) and somebody lacks the sum over them, all of them make it again from
the reduced gradients, which everybody keeps: it comes out the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.packed_data import groups

Held = Mapping[Seat, AbstractSet[Datum]]
"""What each live worker still has."""


class Torn(Exception):
    """The survivors hold data that contradicts itself: going on would train with a wrong gradient."""


class RecoveryPlan(Protocol):
    """The work that is left of a step, for every live seat."""

    @property
    def step(self) -> int:
        """The step's number."""

    @property
    def holders(self) -> Mapping[int, Seat]:
        """By stage, from whom the others get the reduced gradient, where somebody has it."""

    @property
    def undo(self) -> frozenset[Seat]:
        """The seats that have to take the step back before that."""

    def program(self, seat: Seat) -> tuple[Instruction, ...]:
        """What ``seat`` executes."""

    def boundary_only(self, seat: Seat) -> frozenset[Instruction]:
        """Those F and I of ``seat`` that make a boundary tensor only, because the micro-batch's weight gradient has
        been counted already.
        """

    def forwards(self, stage: int) -> Mapping[MicroBatch, Seat]:
        """Who runs the micro-batches forward that run on ``stage``."""


class Recover(Protocol):
    """Works out what is left of ``step``, given what each live worker holds.  ``also_back``: who has to take it back,
    whatever else is found.  Raises :class:`Torn`.
    """

    def __call__(self, step: int, held: Held, also_back: frozenset[Seat] = frozenset()) -> RecoveryPlan: ...


def unfinished(recover: Recover, committed: int, held: Held, rejected: bool = False) -> tuple[RecoveryPlan, ...]:
    """The recovery plans of the steps after ``committed`` that somebody has begun, two at most
    (core/vocabulary/commit_rule.py).

    Stashes of the second step do not outlive a step that is taken back: their parameters are about to change.
    ``rejected``: the first was rejected (core/coordinator/facts/step_validation.py) and not everybody knows, so who has
    applied it astray takes it back, and nothing later counts, be it from somebody who has not stepped: a worker that
    has, and is lost, may have sent it.  Raises :class:`Torn`.
    """
    if rejected:
        back, held = _astray(held, committed + 1), without_later(held, committed + 1)
        return (recover(committed + 1, held, also_back=back),)
    recovery_plans: list[RecoveryPlan] = []
    for step in (committed + 1, committed + 2):
        if any(group.step == step and group.kind != "params" for have in held.values() for group in groups(have)):
            recovery_plans.append(recover(step, held))
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
        return datum.step <= recovery.step or (datum.kind != "stash" and datum != later._replace(stage=seat.chunk))

    return {
        seat: have if seat not in recovery.undo else frozenset(d for d in have if stays(seat, d))
        for seat, have in held.items()
    }
