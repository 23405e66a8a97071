"""Boundary tensors on their way, for tests of what moves them."""

from __future__ import annotations

import torch

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.runtime.movers.mover import Mover


def act(index: int, step: int = 1) -> Datum:
    return Datum("act", 0, MicroBatch(0, index), step)


class Inbox:
    """What has come to ``mover``, by datum."""

    def __init__(self, mover: Mover) -> None:
        self._mover, self.here = mover, {}

    def take(self) -> dict[Datum, tuple[torch.Tensor, ...]]:
        self.here |= {datum: tensors for datum, tensors, _ in self._mover.arrivals()}
        return self.here

    def wait(self, datum: Datum) -> tuple[torch.Tensor, ...]:
        return self._mover._session.waiting.until(str(datum), lambda: self.take().get(datum))
