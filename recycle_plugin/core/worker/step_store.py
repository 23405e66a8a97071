"""The store of a worker's data of uncommitted steps: how a datum arrives, is used up, is pinned, and goes.

What an instruction needs, uses up and leaves behind follows from ``core.vocabulary.dataflow``. Values are opaque:
tensors in a real worker, numbers in a simulated one. A datum goes

* when the instruction that needs it has run (core.vocabulary.dataflow.USES_UP);
* when its step is *committed*;
* when it is *discarded*: computed with rejected weights (core/coordinator/facts/step_validation.py). Data carries the
  generation ``valid_from`` in which its maker last went on from other weights; earlier data is not accepted;
* a stash, when the weights that it was made with are about to change;
* for want of room: boundary tensors that this worker has made and sent stay because a peer may need them again, but
  over a budget the oldest go. Data that peers were told of is *pinned*: they plan with it, so it stays until sent
  again.

Of one thread: received data is handed over between two instructions. Each step costs time in proportion to the data
here, a few for each micro-batch that the worker runs, however many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

from recycle_plugin.core.vocabulary.dataflow import TRAVELS, USES_UP, Datum, goes_to, of_layers, requires
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.step_batches import SUMMED, StepBatches

REPORTED = frozenset({"act", "grad", "stash", "inner", "wgrad", "reduced", "tied", "norm", "params"})
"""Kinds that peers plan with after a failure (core/vocabulary/recovery_plan.py); drawn batches are reported apart."""
SUMS = frozenset({"reduced", "tied"})
"""Kinds that are as large as the weights."""
GIVEN = frozenset({"drawn", "params"})
"""Kinds that rejected weights have no part in: data that can't be read again, and the weights to go back to."""
Compute = Callable[[Instruction, "StepStore", bool], Mapping[Datum, Any]]


class Tier(Protocol):
    """A kind of memory: a device's, a host's, a disk."""

    def keep(self, value: Any) -> Any:
        """Return the value as this tier keeps it, from any tier."""

    def weigh(self, kept: Any) -> int:
        """Return the share of a budget that a kept value takes, in the budget's unit."""


class AsItIs:
    """A tier in which values stay as they are made, and each weighs 1."""

    def keep(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def weigh(self, kept: Any) -> int:
        """Return 1."""
        return 1


class _Entry(NamedTuple):
    value: Any
    valid_from: int
    weight: int  # in the budget's unit


class StepStore:
    """The data of uncommitted steps of the worker at ``seat``, in a pipeline of ``stages`` stages.

    ``tied``: its stage shares weights. ``reads_iterator``: its data is read from an iterator. ``budget``: what its own
    boundary tensors may weigh before sent ones are dropped; None: no limit. ``tiers``: where values may be; they are
    made in the first. Read-only: ``committed``, ``valid_from``; ``sums``, the data here of the kinds in SUMS;
    ``peak_weight``, the most that its own boundary tensors have weighed; ``peak``, the most micro-batches that had a
    stash or a pending weight gradient at once; ``let_go``, how many went for want of room.
    """

    def __init__(
        self,
        seat: Seat,
        stages: int,
        tied: bool = False,
        budget: int | None = None,
        tiers: Sequence[Tier] = (AsItIs(),),
        committed: int = 0,
    ) -> None:
        self.seat, self._stages, self.tied, self._budget, self._tiers = seat, stages, tied, budget, tiers
        self._chunk = seat.chunk
        self.reads_iterator = False
        self.committed, self.valid_from = committed, 0
        self.peak = self.peak_weight = self.let_go = 0
        self._data: dict[Datum, _Entry] = {of_layers("params", seat, committed + 1): _Entry(None, 0, 0)}
        self._before: tuple[Datum, Any] | None = None  # the weights that the last step has changed
        self._sent: dict[Datum, None] = {}  # oldest first, without what is pinned
        self._weight = 0
        self.sums: set[Datum] = set()
        self._open: dict[tuple[int, MicroBatch | None], int] = {}  # stashes and pending weight gradients

    # --- what is here ------------------------------------------------------------------------------

    def of_layers(self, kind: str, step: int) -> Datum:
        """Return the name of the datum that exists once per ``step`` for all layers of this worker."""
        return Datum(kind, self._chunk, None, step)

    def __contains__(self, datum: Datum) -> bool:
        return datum in self._data

    def __iter__(self) -> Iterator[Datum]:
        return iter(tuple(self._data))

    def __getitem__(self, datum: Datum) -> Any:
        """Return a value. Raises KeyError."""
        return self._data[datum].value

    def get(self, datum: Datum, default: Any = None) -> Any:
        """Return the value of ``datum``, or ``default`` if it is not here."""
        found = self._data.get(datum)
        return default if found is None else found.value

    def of(self, kind: str, step: int) -> dict[MicroBatch | None, Any]:
        """Return all values of ``kind`` of ``step``, by micro-batch. Costs one pass over the store."""
        return {
            datum.micro_batch: found.value
            for datum, found in self._data.items()
            if datum.kind == kind and datum.step == step
        }

    def requires(self, instruction: Instruction, own: tuple[MicroBatch, ...] = ()) -> tuple[Datum, ...]:
        """Return the inputs of ``instruction`` here (core.vocabulary.dataflow); an evaluation reads iterators too."""
        return requires(instruction, self._stages, own, self.tied, self.reads_iterator or instruction.step < 0)

    def missing(self, instruction: Instruction, own: tuple[MicroBatch, ...] = ()) -> list[Datum]:
        """Return the data that ``instruction`` requires and that is not here (yet). ``own``: the micro-batches whose
        weight gradients a REDUCE needs.
        """
        return self._lacking(self.requires(instruction, own))

    def _lacking(self, needed: Iterable[Datum]) -> list[Datum]:
        """Return the part of ``needed`` that is not here. An evaluation has no weights of its own."""
        return [each for each in needed if each not in self._data and (each.kind != "params" or each.step >= 0)]

    def held(self) -> set[Datum]:
        """Return the data of uncommitted steps that is here, for peers to plan with; it is pinned until sent again."""
        self._sent.clear()
        return {datum for datum in self._data if datum.kind in REPORTED and datum.step > self.committed}

    @property
    def weight(self) -> int:
        """The weight of the boundary tensors that this worker has made."""
        return self._weight

    @property
    def spare(self) -> tuple[Datum, ...]:
        """The boundary tensors that may be dropped to make room, the first to be dropped first."""
        return tuple(self._sent)

    def copy(self) -> StepStore:
        """Return an independent copy with the same values."""
        found = copy(self)
        found._data, found._sent, found._open = dict(self._data), dict(self._sent), dict(self._open)
        found.sums = set(self.sums)
        return found

    # --- how it comes ------------------------------------------------------------------------------

    def put(self, datum: Datum, value: Any = None) -> None:
        """Add a value made here, not to be changed any more. Raises AssertionError for a second weight gradient."""
        self._put(datum, value, self.valid_from)

    def arrive(self, datum: Datum, value: Any, valid_from: int) -> bool:
        """Add a value from a worker whose data is valid from generation ``valid_from``; return whether it is of use. A
        second copy does no harm: a datum has the same numbers whoever makes it.
        """
        if 0 <= datum.step <= self.committed or valid_from < self.valid_from:
            return False
        self._put(datum, value, valid_from)
        return True

    def run(self, instruction: Instruction, compute: Compute, boundary_only: bool = False) -> None:
        """Have ``compute(instruction, self, boundary_only)`` make the results of ``instruction``. Raises AssertionError
        if an input is missing. ``boundary_only``: only the boundary tensor is needed, so nothing else is kept.
        """
        needed = self.requires(instruction, self.own(instruction))
        if lacking := self._lacking(needed):
            raise AssertionError(f"{instruction} needs {lacking[0]}, which seat {self.seat} does not have")
        self._conclude(instruction, needed, compute(instruction, self, boundary_only), boundary_only)

    def conclude(self, instruction: Instruction, made: Mapping[Datum, Any]) -> None:
        """Drop the data that ``instruction`` uses up, and add ``made``, its results."""
        self._conclude(instruction, self.requires(instruction, self.own(instruction)), made, False)

    def _conclude(
        self, instruction: Instruction, needed: Iterable[Datum], made: Mapping[Datum, Any], boundary_only: bool
    ) -> None:
        if instruction.op in USES_UP:
            for datum in needed:
                if datum.kind != "params":
                    self._remove(datum)
        elif instruction.op is Op.STEP:
            self._step(instruction)
        for datum, value in made.items():
            nobodys = datum.kind in TRAVELS and goes_to(datum, self._stages) is None
            if not nobodys and not (boundary_only and datum.kind in ("stash", "inner")):
                self._put(datum, value, self.valid_from)

    def own(self, instruction: Instruction) -> tuple[MicroBatch, ...]:
        """Return the micro-batches whose weight gradients a REDUCE sums here; () for other instructions."""
        if instruction.op is not Op.REDUCE:
            return ()
        return tuple(micro_batch for micro_batch in self.of("wgrad", instruction.step) if micro_batch is not None)

    def move(self, datum: Datum, tier: int) -> Any:
        """Keep ``datum`` in the given tier from now on; return the value as it is there."""
        kept = self._tiers[tier].keep(self._data[datum].value)
        self._data[datum] = self._data[datum]._replace(value=kept)
        return kept

    def sent(self, datum: Datum) -> int:
        """Record that a boundary tensor was sent, so it may go for want of room. Return how many go now."""
        self._sent[datum] = None
        before = self.let_go
        while self._budget is not None and self._weight > self._budget and self._sent:
            self._remove(next(iter(self._sent)))
            self.let_go += 1
        return self.let_go - before

    # --- how it goes -------------------------------------------------------------------------------

    def commit(self, step: int) -> None:
        """Drop all data of ``step`` and before, which all stages have applied, and the weights to take it back."""
        self.committed = max(self.committed, step)
        self._remove_all([datum for datum in self._data if 0 <= datum.step <= step and datum.kind != "params"])
        if self._before is not None and self._before[0].step <= step:
            self._before = None

    def drop_sums(self, step: int) -> None:
        """Drop the sums of the committed steps up to ``step`` in the middle of a later one, whose own sum needs as much
        room. The rest that :meth:`commit` drops is small, or on the host, and waits for the step's end.
        """
        for datum in [datum for datum in self.sums if datum.step <= step]:
            self._remove(datum)

    def undo(self, step: int) -> None:
        """Take back ``step``, the last one applied: restore the weights before it, and drop stashes made after it."""
        assert self._before is not None, f"nothing is kept of the weights before step {step}"
        before, value = self._before
        self._remove(before._replace(step=step + 1))
        self._before = None
        self._put(before, value, self.valid_from)
        self._forget_stashes(step)

    def discard_after(self, after: int, valid_from: int) -> set[Datum]:
        """Drop data of the steps after ``after``, whoever made it, that was computed with rejected weights, except data
        of generation ``valid_from`` or later; return it. Data is valid from that generation now.
        """
        self.valid_from = valid_from
        later = [
            datum
            for datum, found in self._data.items()
            if datum.step > after and datum.kind not in GIVEN and found.valid_from < valid_from
        ]
        self._remove_all(later)
        return set(later)

    def without(self, batches: StepBatches) -> bool:
        """Drop the data of void steps that no longer counts; return whether a sum here included any of it."""
        gone = batches.gone(self._data.keys())
        here = [datum for datum in self._data if datum in gone]
        self._remove_all(here)
        return any(datum.kind in SUMMED for datum in here)

    def drop_draws(self, step: int) -> None:
        """Drop the data of plain iterators for ``step``, which they can't fill."""
        self._remove_all([datum for datum in self._data if datum.step == step and datum.kind == "drawn"])

    def rewind(self, step: int, valid_from: int) -> None:
        """Empty the store for a checkpoint's state of ``step``; later data is valid from generation ``valid_from``."""
        self._remove_all([*self._data])
        self.committed, self.valid_from, self._before = step, valid_from, None
        self.put(self.of_layers("params", step + 1))

    def forget_evaluation(self, step: int) -> None:
        """Drop the data of evaluation ``step`` (negative) and all before it, which are through or given up."""
        self._remove_all([datum for datum in self._data if step <= datum.step < 0])

    def _step(self, instruction: Instruction) -> None:
        """Keep the old weights for an undo, and drop stashes made with them that a failure has made needless."""
        before = Datum("params", instruction.stage, None, instruction.step)
        self._before = before, self[before]
        self._remove(before)
        self._forget_stashes(instruction.step - 1)

    def _forget_stashes(self, after: int) -> None:
        self._remove_all([datum for datum in self._data if datum.kind == "stash" and datum.step > after])

    def _put(self, datum: Datum, value: Any, valid_from: int) -> None:
        if datum in self._data:
            if datum.kind == "wgrad":
                raise AssertionError(f"the {datum} would be counted twice")
            self._remove(datum)
        weight = 0
        if datum.kind in TRAVELS and datum.stage == self._chunk:
            weight = self._tiers[0].weigh(value)
            self._weight += weight
            if self._weight > self.peak_weight:
                self.peak_weight = self._weight
        elif datum.kind in ("stash", "inner"):
            key = datum.step, datum.micro_batch
            self._open[key] = self._open.get(key, 0) + 1
            if len(self._open) > self.peak:
                self.peak = len(self._open)
        elif datum.kind in SUMS:
            self.sums.add(datum)
        self._data[datum] = _Entry(value, valid_from, weight)

    def _remove(self, datum: Datum) -> None:
        found = self._data.pop(datum, None)
        if found is None:
            return
        self._weight -= found.weight
        if datum.kind in TRAVELS:
            self._sent.pop(datum, None)
        elif datum.kind in SUMS:
            self.sums.discard(datum)
        elif datum.kind in ("stash", "inner"):
            key = datum.step, datum.micro_batch
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    def _remove_all(self, data: Iterable[Datum]) -> None:
        for datum in data:
            self._remove(datum)
