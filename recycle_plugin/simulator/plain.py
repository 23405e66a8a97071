"""A simulated plain iterator, which gives numbers in place of batches."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.iterator_draws import Draw
from recycle_plugin.simulator.arithmetic import Batch, sampled


class PlainIterator:
    """The iterator of one end of ``replica``, as core.worker.iterator_data.DataIterator: both ends read the same."""

    def __init__(self, replica: int) -> None:
        self._replica, self._given = replica, 0

    def read(self, step: int, position: int, draw: Draw | None) -> Batch | None:
        """Reads the next batch; returns it as it is kept, or None where ``draw`` is None and nobody needs it."""
        self._given += 1
        return None if draw is None else Batch(sampled(MicroBatch(self._replica, self._given), 0), draw, self._given)

    def skip(self, number: int, until: int) -> None:
        """Reads a batch that its replica has had."""
        self._given += 1

    def draw_of(self, batch: Batch) -> Draw:
        """The draw that ``batch`` came from."""
        return batch.drawn
