"""The plugin's own sums of what is on an accelerator, piece by piece through host memory.

While one piece is added up over the network, the next ones are on their way down, and the last ones on their way back.
All members cut alike, so that they start the same operations in the same order.
"""

from __future__ import annotations

from collections import deque

import torch

from recycle_plugin.core.vocabulary.worker_bytes import SUM_PIECE
from recycle_plugin.runtime.collectives.in_flight import SUMS, Asked, Call, Flight, Make
from recycle_plugin.runtime.devices.kinds import write
from recycle_plugin.runtime.devices.pieces import on_the_host

UNDER_WAY = 4  # pieces each on the way down and in sums: so many are in pinned memory at a time, twice


def in_pieces(flight: Flight, called: str, make: Make, flat: torch.Tensor) -> None:
    """Run the operation that ``make`` gives on ``flat``, a tensor on an accelerator with one dimension, in place.

    Raises what the operation raises; an interruption leaves ``flat`` partly changed.
    """
    under_way: deque[tuple[torch.Tensor, Call]] = deque()

    def finish() -> None:
        piece, call = under_way[0]
        flight.finish(call)
        under_way.popleft()
        write(piece, call.held[0], called)

    try:
        pieces = flat.split(SUM_PIECE)
        for piece, (here,) in zip(pieces, on_the_host((flat,), SUM_PIECE, called, UNDER_WAY), strict=True):
            if len(under_way) == UNDER_WAY:
                finish()
            under_way.append((piece, flight.begin(Asked(called, make, [here]), SUMS)))
        while under_way:
            finish()
    finally:
        for _, call in under_way:
            flight.break_off(call)
