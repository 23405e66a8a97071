"""The position of a replica's micro-batches among all it has ever had: their number in a step may change between
steps.
"""

from __future__ import annotations


class DataCursor:
    """A count of the micro-batches that a replica has had.  ``micro_batches``: its number in each step, from the first,
    step 1, on.
    """

    def __init__(self, micro_batches: int) -> None:
        # from this step on, before which a replica had so many, it has so many each
        self._changes = [(1, 0, micro_batches)]

    def before(self, step: int) -> int:
        """The number of micro-batches that a replica has had before ``step``."""
        first, had, each = next(change for change in reversed(self._changes) if change[0] <= max(1, step))
        return had + (max(1, step) - first) * each

    def change(self, step: int, micro_batches: int) -> None:
        """Gives a replica ``micro_batches`` in each step from ``step`` on, whatever was said of later ones."""
        had = self.before(step)
        self._changes = [change for change in self._changes if change[0] < step] + [(step, had, micro_batches)]

    def changes(self) -> list[tuple[int, int, int]]:
        """All changes so far, for :meth:`take`: (first step, micro-batches before it, micro-batches in each step)."""
        return list(self._changes)

    def take(self, changes: list[tuple[int, int, int]]) -> None:
        """Takes the changes of another worker, or of an earlier time, in place of its own."""
        self._changes = list(changes)
