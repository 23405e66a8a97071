"""Simulated plain iterators, which give numbers in place of batches."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.iterator_draws import Draw, Ended, Place
from recycle_plugin.lab.simulator.arithmetic import Batch, sampled

LONGEST = 100_000  # batches of one iterator, at most


class PlainIterator:
    """The iterators of one end of ``replica``, as core.worker.iterator_data.DataIterator; both ends read the same."""

    def __init__(self, replica: int, length: int) -> None:
        """Give ``length`` batches from each iterator; 0: any number."""
        self._replica, self._given, self._iterator, self._length = replica, 0, 1, length

    def begin_another(self) -> None:
        """Begin the next iterator."""
        self._given, self._iterator = 0, self._iterator + 1

    def read(self, step: int, position: int, draw: Draw | None) -> Batch | None:
        """Read the next batch, and return it as it is kept; None if ``draw`` is None: nobody needs it. Raises Ended."""
        if self._length and self._given == self._length:
            raise Ended(f"the iterator of replica {self._replica} has ended in step {step}")
        self._given += 1
        if draw is None:
            return None
        number = (self._iterator - 1) * LONGEST + self._given
        return Batch(sampled(MicroBatch(self._replica, number), 0), draw, self._given, self._iterator)

    def skip_to(self, place: Place, read: int) -> None:
        """Read what the replica has had, up to ``place``."""
        self._given += place.read - read

    def draw_of(self, batch: Batch) -> Draw:
        """Return the draw that ``batch`` came from."""
        return batch.drawn
