"""Where a worker's micro-batches come from.

Either a source is addressed by step and micro-batch, or the script's plain iterator is read
(core/vocabulary/iterator_draws.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import Batches
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.movers.batches import Tensors
from recycle_plugin.runtime.worker.data import ScriptsIterator
from recycle_plugin.runtime.worker.ports import Source


class Feed:
    """Gives one worker its micro-batches; the iterator's go to its ``store``.

    ``reads``: its stage needs data.  ``next_batch(what)`` reads the iterator; ``hand_on(datum, batch, taker)`` gives a
    copy of a batch to a peer.  ``source`` None: the iterator is read.  ``settled``: a step was trained, so that where
    data comes from stays as it is.
    """

    def __init__(
        self,
        session: Session,
        store: StepStore,
        reads: bool,
        next_batch: Callable[[str], Any],
        hand_on: Callable[[Datum, Tensors, Seat], None],
    ) -> None:
        self._session, self._store = session, store
        self.reads = reads
        self.iterator_data = (
            IteratorData(store, ScriptsIterator(session, next_batch), hand_on, self._say_dealt, self._say_stays_out)
            if reads
            else None
        )
        if self.iterator_data is not None and session.newcomer:
            self.iterator_data.in_place = False
        self._last_given: object = None
        self.source: Source | None = None
        self.settled = False

    def begin(self) -> None:
        """Prepare for a step; tells the user once where data comes from plain iterators."""
        self._store.reads_iterator = self.source is None
        if self._store.reads_iterator and self.reads and not self.settled and self._session.is_first:
            self._session.note(
                "data",
                "data comes from plain iterators: a step that a loss interrupts is finished with its own data, "
                "after that the survivors' iterators give the lost replica's share; "
                "engine.set_data_source() would keep every step's data, and needs no replica with both ends alive",
            )
        self.settled = True

    def given(self, data_iter: object) -> None:
        """Note which iterator the script gives for a step."""
        if self.iterator_data is not None and self._last_given is not None and self._last_given is not data_iter:
            self.iterator_data.iterators += 1
        self._last_given = data_iter

    def batch(self, step: int, micro_batch: MicroBatch) -> Any:
        """The batch of a micro-batch, from the source (ports.Source)."""
        assert self.source is not None, "the iterator is read"
        return self.source(step, micro_batch)

    def _say_stays_out(self, why: str) -> None:
        seat = self._store.seat
        self._session.note(
            "data",
            f"seat {seat}, which has come back, {why}: replica {seat.replica} stays no source of data, and the others' "
            "iterators give its share; engine.set_data_source() has no such limit",
            seat=str(seat),
        )

    def _say_dealt(self, step: int, retired: set[int], dealt: Batches) -> None:
        names, by = (
            ", ".join(map(str, sorted(retired))),
            ", ".join(map(str, sorted({draw.source for draw in dealt.values()}))),
        )
        self._session.note(
            "data",
            f"from step {step} on the share of replica {names}, {len(dealt)} micro-batches a step, is drawn from the "
            f"iterators of replica {by}",
            step=step,
            replicas=sorted(retired),
            drawn={str(one): str(draw) for one, draw in sorted(dealt.items())},
        )
