"""Boundary tensors that this worker has made, kept until their step is committed: a peer may need them once more.

They stand in host memory, where the transport has brought them in order to send them: keeping them costs an
accelerator nothing.  Where that is too much, a budget lets the oldest go; what is gone is run again (core/lineage.py).
"""

from __future__ import annotations

import torch

from recycle_plugin.core.dataflow import Datum

Tensors = tuple[torch.Tensor, ...]


class Kept:
    """``budget_bytes``: how much may stay once it has been sent; None: all.  ``peak_bytes``: the most there was."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self._tensors: dict[Datum, Tensors] = {}
        self._sent: dict[Datum, None] = {}  # oldest first
        self._bytes = 0
        self.peak_bytes = 0
        self.dropped = 0

    def put(self, datum: Datum, tensors: Tensors) -> None:
        """Made here; not to be changed in place afterwards."""
        self._remove(datum)
        self._tensors[datum] = tuple(tensor.detach() for tensor in tensors)
        self._bytes += _size(tensors)
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def get(self, datum: Datum) -> Tensors:
        return self._tensors[datum]

    def sent(self, datum: Datum, on_host: Tensors) -> None:
        """``on_host`` is the copy that was sent.  From now on the budget may let it go."""
        self._tensors[datum] = on_host
        self._sent[datum] = None
        while self._budget_bytes is not None and self._bytes > self._budget_bytes and self._sent:
            self._remove(next(iter(self._sent)))
            self.dropped += 1

    def promise(self) -> set[Datum]:
        """What is here.  Peers plan with that: it stays, whatever the budget, until it is sent once more or its step is committed."""
        self._sent.clear()
        return set(self._tensors)

    def drop(self, step: int) -> None:
        """``step`` is committed."""
        for datum in [datum for datum in self._tensors if datum.step <= step]:
            self._remove(datum)

    def void(self, after: int) -> None:
        """What was made of the steps after ``after`` is of no use."""
        for datum in [datum for datum in self._tensors if datum.step > after]:
            self._remove(datum)

    def _remove(self, datum: Datum) -> None:
        self._bytes -= _size(self._tensors.pop(datum, ()))
        self._sent.pop(datum, None)


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
