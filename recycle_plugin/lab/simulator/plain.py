"""Simulated plain iterators, which give numbers in place of batches."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.iterator_draws import Draw, Ended, Place
from recycle_plugin.lab.simulator.arithmetic import Batch, sampled

LONGEST = 100_000  # batches of one iterator


class PlainIterator:
    """The iterators of one end of ``replica``, as core.worker.iterator_data.DataIterator: both ends read the same."""

    def __init__(self, replica: int, length: int) -> None:
        """Gives ``length`` batches each; 0: any number."""
        self._replica, self._given, self._iterator, self._length = replica, 0, 1, length

    def begin_another(self) -> None:
        """Gives the next iterator, at its beginning."""
        self._given, self._iterator = 0, self._iterator + 1

    def read(self, step: int, position: int, draw: Draw | None) -> Batch | None:
        """Reads the next batch; returns it as it is kept, or None where ``draw`` is None and nobody needs it.  Raises
        Ended.
        """
        if self._length and self._given == self._length:
            raise Ended(f"the iterator of replica {self._replica} has ended in step {step}")
        self._given += 1
        if draw is None:
            return None
        number = (self._iterator - 1) * LONGEST + self._given
        return Batch(sampled(MicroBatch(self._replica, number), 0), draw, self._given, self._iterator)

    def skip_to(self, place: Place, read: int) -> None:
        """Reads what its replica has had, up to ``place``."""
        self._given += place.read - read

    def draw_of(self, batch: Batch) -> Draw:
        """The draw that ``batch`` came from."""
        return batch.drawn
