"""Which replicas' micro-batches a step has when batches shrink, and what follows for its sum and its learning rate: the
rules of FT-HSDP (arXiv 2602.00277).

With ``batch: constant`` a step has all replicas' micro-batches, whoever computes them. With ``shrink`` nobody computes
a replica's micro-batches while the replica is out:

* A step's sum is divided by what has contributed to it. This is the one exception to the rule that sums are divided by
  the logical number of micro-batches, never by the number of live replicas.
* The step is applied with sqrt(live / total) of its learning rate (published). The factor holds for the one step and is
  in no state; what the script or a scheduler has set stays as it is.

The coordinator *decides*, step by step. When a generation comes about it works out which replicas contribute to steps
from then on, and for each step begun, what becomes of the lost workers' contributions (:meth:`StepBatches.changed`):

* They are in all sums, with the full divisor, if each stage has a survivor with its whole sum, from which the others
  take it. The same holds if a survivor has applied the step, which nobody does before all stages have their sums
  (core.vocabulary.plan.Policy.together); then other workers compute again what was lost of a sum.
* Else they are in none: the step is *void*, all its sums are dropped, and the rest is added up again. A member may not
  know that, because a newer generation was announced before it went on, and still have the old sums. Then the step
  stays void in the next generation, unless a worker has applied it: for that it had a new sum of all members.

The decision travels with :class:`core.messages.from_coordinator.Resume`, by which all members go on. A worker's
programs carry it to whatever computes (core.worker.loop_ports.StepProgram), so nobody else counts live replicas. A
newcomer that follows gets it with each marker (core/vocabulary/state_stream.py). The event ``committed`` records it.
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
"""What is in a worker's sums; for layers whose backward is not split, from I on."""
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
        """The factor for a sum that was divided for all micro-batches."""
        return self.total / self.live

    @property
    def rate_factor(self) -> float:
        return sqrt(self.live / self.total)

    def __str__(self) -> str:
        return f"{self.live} of {self.total} replicas"


@dataclass(frozen=True)
class StepBatches:
    """The replicas, of ``total``, whose micro-batches steps have: ``replicas``, but for unfinished steps those in
    ``of_steps``, by step number. ``void``: the first step of which no earlier sum counts; 0: none.
    """

    total: int
    replicas: tuple[int, ...]
    of_steps: dict[str, tuple[int, ...]] = field(default_factory=dict)
    void: int = 0

    @classmethod
    def full(cls, total: int) -> StepBatches:
        return cls(total, tuple(range(total)))

    def of(self, step: int) -> tuple[int, ...]:
        return self.of_steps.get(str(step), self.replicas)

    def has(self, micro_batch: MicroBatch, step: int) -> bool:
        return micro_batch.replica in self.of(step)

    def share(self, step: int) -> LiveShare:
        """Return the part of the replicas that contribute to ``step``."""
        return LiveShare(len(self.of(step)), self.total)

    def changed(
        self, replicas: tuple[int, ...], committed: int, held: Held, stages: int, heard: bool = True
    ) -> StepBatches:
        """Return the batches of a generation with whole ``replicas`` whose members hold ``held`` of later steps.
        ``heard``: each of them that was a member before has dropped what these batches say is void.
        """
        of_steps, void = {}, 0
        for step in (committed + 1, committed + 2):
            had, still_void = self.of(step), not heard and 0 < self.void <= step and not _applied(step, held)
            if not _begun(step, held) or (had == replicas and not still_void):
                continue
            if not void and not still_void and _stays(step, held, stages):
                of_steps[str(step)] = had
            else:
                void = void or step
        return StepBatches(self.total, replicas, of_steps, void)

    def committed(self, step: int) -> StepBatches:
        if not self.of_steps and not self.void:
            return self
        later = {number: those for number, those in self.of_steps.items() if int(number) > step}
        return replace(self, of_steps=later, void=self.void if self.void > step else 0)

    def gone(self, have: AbstractSet[Datum]) -> set[Datum]:
        """Return the part of a worker's data ``have`` that no longer counts: all sums of void steps, and data of
        micro-batches that the step does not include. If such data is in a sum, the whole sum goes: nothing can be
        subtracted.
        """
        if not self.void:
            return set()
        late = {datum for datum in have if datum.step >= self.void and datum.kind != "params"}
        strange = {datum for datum in late if datum.micro_batch is not None and not self.has(datum.made_of, datum.step)}
        torn = any(datum.kind in SUMMED for datum in strange) or any(datum.kind == "reduced" for datum in late)
        return strange | {datum for datum in late if datum.kind in SUMS or (torn and datum.kind in SUMMED)}

    def counting(self, held: Held) -> Held:
        return {seat: frozenset(have - self.gone(have)) for seat, have in held.items()} if self.void else held


def _begun(step: int, held: Held) -> bool:
    return any(group.step == step and group.kind != "params" for group in groups(*held.values()))


def _stays(step: int, held: Held, stages: int) -> bool:
    """Return whether the lost workers' contributions to ``step`` are in all sums, or will be."""
    have = (group for each in held.values() for group in groups(each))
    summed = {group.stage for group in have if group.kind == "reduced" and group.step == step}
    return len(summed) == stages or _applied(step, held)


def _applied(step: int, held: Held) -> bool:
    return any(group.kind == "params" and group.step > step for group in groups(*held.values()))
