"""Undo by copies: exact, for any optimizer whose state is tensors and plain values.

There is no ping-pong variant, because it would save nothing.  Two buffers that change places spare a
copy only where a step reads one and writes the other, and torch's optimizers (and DeepSpeed's) write
where they read: the other buffer has to be filled before every step, and that is the copy made here.
What is left to save is copying back, which happens after a failure only; exchanging storages instead
would leave views into flat buffers behind.
"""

from __future__ import annotations

from typing import Any, Callable, Hashable

import torch

from recycle_plugin.runtime.undo.kept import Bookkeeping, Copies


class Snapshot:
    """Of ``parameters``, ``optimizer`` (tensors, hyper-parameters) and what ``counters`` returns."""

    exact = True

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        counters: Callable[[], Any],
        set_counters: Callable[[Any], None],
    ) -> None:
        self._model = parameters
        self._books = Bookkeeping(optimizer, counters, set_counters)
        self._copies = Copies()

    @property
    def held_bytes(self) -> int:
        return self._copies.nbytes

    @torch.no_grad()
    def before_step(self) -> None:
        """Copy the present state over the last one."""
        self._copies.take(self._tensors())
        self._books.take()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copied state back, bit for bit; RuntimeError if none was taken."""
        if not self._books.taken:
            raise RuntimeError("no step to take back: before_step() was not called, or its step is taken back already")
        self._copies.put_back(self._tensors())
        self._books.restore()

    def _tensors(self) -> dict[Hashable, torch.Tensor]:
        """Parameters by identity (a mixed-precision optimizer's own are not the model's), state by (index, name)."""
        return {id(p): p.data for p in (*self._model, *self._books.parameters)} | self._books.tensors()
