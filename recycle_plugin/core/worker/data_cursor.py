"""The position of a replica's micro-batches in its data; their number in a step may change between steps."""

from __future__ import annotations


class DataCursor:
    """A count of a replica's micro-batches so far. ``micro_batches``: their number in each step, from step 1 on."""

    def __init__(self, micro_batches: int) -> None:
        # (first step, micro-batches before it, micro-batches in each step from it on)
        self._changes = [(1, 0, micro_batches)]

    def before(self, step: int) -> int:
        """Return the number of micro-batches that a replica has had before ``step``."""
        first, had, each = next(change for change in reversed(self._changes) if change[0] <= max(1, step))
        return had + (max(1, step) - first) * each

    def change(self, step: int, micro_batches: int) -> None:
        """Give a replica ``micro_batches`` in each step from ``step`` on; later changes are dropped."""
        had = self.before(step)
        self._changes = [change for change in self._changes if change[0] < step] + [(step, had, micro_batches)]

    def changes(self) -> list[tuple[int, int, int]]:
        """Return all changes, for :meth:`take`: (first step, micro-batches before it, micro-batches in each step)."""
        return list(self._changes)

    def take(self, changes: list[tuple[int, int, int]]) -> None:
        """Replace the changes by those of another worker, or of an earlier time."""
        self._changes = list(changes)
