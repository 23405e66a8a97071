"""Undo by copies: exact, for any optimizer whose state is tensors and plain values.

Copies are on their tensors' device, made just before the step; or in host memory, which costs a device no memory, and
no time if its links to the host are idle: they are made while it computes gradients.

A ping-pong variant would save nothing. Two alternating buffers spare a copy only if a step reads one and writes the
other, but torch's and DeepSpeed's optimizers write where they read. So the other buffer has to be filled before every
step, which is the copy made here. Exchanging storages would spare only the copy back, after a failure, and would leave
views into flat buffers behind.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.state.undo.kept import HostCopies, Keeper, KeptCopies, Small


class Snapshot:
    """Undo by ``copies`` of all parts of ``state``, except those that follow from others. Needs no ``keeper``."""

    exact = True

    def __init__(
        self,
        state: StageState,
        keeper: Keeper | None = None,
        copies: Callable[[], KeptCopies | HostCopies] = KeptCopies,
    ) -> None:
        self._state = state
        self._small, self._copies = Small(state), copies()

    @property
    def held_bytes(self) -> int:
        return self._copies.nbytes

    @torch.no_grad()
    def prepare(self) -> None:
        """Forget the last step, and begin to copy the present state if that runs in the background."""
        self._small.forget()
        self._copies.start(lambda: self._state.tensors(following=False))

    @torch.no_grad()
    def before_step(self) -> None:
        """Copy the present state over the previous copy."""
        self._copies.take(self._state.tensors(following=False))
        self._small.take()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copied state back, bit for bit. Raises RuntimeError if none was taken."""
        self._small.put_back()
        self._copies.put_back(self._state.tensors(following=False))
        self._state.rewritten()
