"""Large tensors of a device in host memory, piece by piece: one piece is used while the next one comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import COPY_S, Copy


def on_the_host(
    tensors: Sequence[torch.Tensor], length: int, what: str, ahead: int = 1
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield equally long 1-D ``tensors`` in host memory, in pieces of ``length`` numbers. The next ``ahead`` pieces are
    copied meanwhile. Nobody may change pieces still to come.
    """
    size = tensors[0].numel() if tensors else 0
    begins, coming = iter(range(0, size, length)), deque[Copy]()

    def start() -> None:
        if (begin := next(begins, None)) is not None:
            parts = tuple(tensor[begin : begin + length] for tensor in tensors)
            coming.append(device_of(tensors[0].device).to_host(parts, what, shared=True))

    for _ in range(1 + ahead):
        start()
    while coming:
        here = coming.popleft().wait(COPY_S)
        start()
        yield here
