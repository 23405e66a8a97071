"""Which replicas' micro-batches a step has where batches shrink, and what follows for its sum and its learning rate:
the rules of FT-HSDP (arXiv 2602.00277).

With ``batch: constant`` a step has all replicas' micro-batches, whoever computes them.  With ``shrink``, while a
replica is out nobody computes its own:

* A step's sum is divided by what has contributed to it.  That is the one exception to the rule that sums are divided by
  the logical number of micro-batches, and never by the number of the live.
* The step is applied with sqrt(live / total) of its learning rate (published).  What the script has set, or a
  scheduler, stays as it is: the factor holds for the one step, and is in no state.

The *decision* is the coordinator's, step by step.  When a generation comes about it works out which replicas steps have
from then on, and of each step that somebody has begun what becomes of the contributions of who was lost
(:meth:`StepBatches.changed`):

* They are in all sums, with the full divisor, where each stage has somebody left who holds its whole sum, so that the
  others take it from there; or where somebody live has applied the step, which nobody does before all stages have had
  their sums (core.vocabulary.plan.Policy.together): then what was lost of a sum meanwhile is computed again by others.
* Else they are in none: the step is *void*, all sums of it that anybody holds go, and the rest is added up again.

The decision travels with :class:`core.messages.from_coordinator.Resume`, which all members go on by.  A worker's
programs carry it to whatever computes (core.worker.loop_ports.StepProgram), so nobody counts the live for itself.  A
newcomer that follows without being a member has it with each marker (core/vocabulary/state_stream.py).  It is recorded
in the event ``committed`` of each step that has fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import NamedTuple

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.packed_data import groups

Held = Mapping[Seat, AbstractSet[Datum]]
SUMMED = frozenset({"inner", "wgrad", "reduced"})
"""What is in a worker's sums: of layers whose backward is not split, from I on."""
SUMS = frozenset({"reduced", "tied", "norm"})


class LiveShare(NamedTuple):
    """The part of a step's replicas, ``live`` of ``total``, that contribute to it."""

    live: int = 1
    total: int = 1

    @property
    def whole(self) -> bool:
        return self.live == self.total

    @property
    def sum_factor(self) -> float:
        """By what a sum is multiplied that all micro-batches would have been divided for."""
        return self.total / self.live

    @property
    def rate_factor(self) -> float:
        """By what the step's learning rate is multiplied."""
        return sqrt(self.live / self.total)

    def __str__(self) -> str:
        return f"{self.live} of {self.total} replicas"


@dataclass(frozen=True)
class StepBatches:
    """Whose micro-batches steps have, of ``total`` replicas: those of ``replicas``, but of unfinished ones those that
    ``of_steps`` has, by their numbers.  ``void``: the first step of which no sum counts that was made before; 0: none.
    """

    total: int
    replicas: tuple[int, ...]
    of_steps: dict[str, tuple[int, ...]] = field(default_factory=dict)
    void: int = 0

    @classmethod
    def full(cls, total: int) -> StepBatches:
        """Those of steps that have all replicas' micro-batches."""
        return cls(total, tuple(range(total)))

    def of(self, step: int) -> tuple[int, ...]:
        """The replicas whose micro-batches ``step`` has."""
        return self.of_steps.get(str(step), self.replicas)

    def has(self, micro_batch: MicroBatch, step: int) -> bool:
        """Whether ``micro_batch`` is one of ``step``.  Costs time in proportion to the replicas."""
        return micro_batch.replica in self.of(step)

    def share(self, step: int) -> LiveShare:
        """The part of the replicas that contribute to ``step``."""
        return LiveShare(len(self.of(step)), self.total)

    def changed(self, replicas: tuple[int, ...], committed: int, held: Held, stages: int) -> StepBatches:
        """Those of a generation in which ``replicas`` are whole, whose members hold ``held`` of the steps behind
        ``committed``.
        """
        of_steps, void = {}, 0
        for step in (committed + 1, committed + 2):
            had = self.of(step)
            if had == replicas or not _begun(step, held):
                continue
            if not void and _stays(step, held, stages):
                of_steps[str(step)] = had
            else:
                void = void or step
        return StepBatches(self.total, replicas, of_steps, void)

    def committed(self, step: int) -> StepBatches:
        """The same, once ``step`` is committed."""
        if not self.of_steps and not self.void:
            return self
        later = {number: those for number, those in self.of_steps.items() if int(number) > step}
        return replace(self, of_steps=later, void=0)

    def gone(self, have: AbstractSet[Datum]) -> set[Datum]:
        """What of a worker's data counts no more, ``have``: of void steps what belongs to no micro-batch of theirs, and
        all sums; with a sum goes what is in it, since nothing can be taken out of it again.
        """
        if not self.void:
            return set()
        late = {datum for datum in have if datum.step >= self.void and datum.kind != "params"}
        strange = {datum for datum in late if datum.micro_batch is not None and not self.has(datum.made_of, datum.step)}
        torn = any(datum.kind in SUMMED for datum in strange) or any(datum.kind == "reduced" for datum in late)
        return strange | {datum for datum in late if datum.kind in SUMS or (torn and datum.kind in SUMMED)}

    def counting(self, held: Held) -> Held:
        """The part of ``held`` that counts."""
        return {seat: frozenset(have - self.gone(have)) for seat, have in held.items()} if self.void else held


def _begun(step: int, held: Held) -> bool:
    return any(group.step == step and group.kind != "params" for have in held.values() for group in groups(have))


def _stays(step: int, held: Held, stages: int) -> bool:
    """Whether what the lost have contributed to ``step`` is in all sums, or is to be."""
    have = [group for each in held.values() for group in groups(each)]
    summed = {group.stage for group in have if group.kind == "reduced" and group.step == step}
    applied = any(group.kind == "params" and group.step > step for group in have)
    return applied or len(summed) == stages
