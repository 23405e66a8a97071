"""The plugin's own sums, piece by piece, so that what is under way is bounded whatever a gradient's size.

What is on the host is added up where it is; several pieces at once keep the network busy while one is added. What is on
an accelerator goes through host memory: while one piece is added up over the network, the next ones are on their way
down, and the last ones on their way back.  All members cut alike, so that they start the same operations in the same
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch

from recycle_plugin.core.vocabulary.worker_bytes import SUM_PIECE
from recycle_plugin.runtime.collectives.in_flight import SUMS, Asked, Call, Flight
from recycle_plugin.runtime.devices.host import on_host
from recycle_plugin.runtime.devices.kinds import write
from recycle_plugin.runtime.devices.pieces import on_the_host

UNDER_WAY = 4  # pieces in sums at a time; of an accelerator's as many are on the way down, all in pinned memory
HOST_PIECE = 4 * SUM_PIECE  # numbers: in smaller pieces three and more members take longer than in one


def in_pieces(flight: Flight, asked: Asked, flat: torch.Tensor) -> None:
    """Do what is ``asked`` for with ``flat``, a tensor of one dimension, in place, with at most UNDER_WAY pieces under
    way.

    Raises what the operation raises; an interruption leaves ``flat`` partly changed.
    """
    under_way: deque[tuple[torch.Tensor, Call]] = deque()

    def finish() -> None:
        piece, call = under_way[0]
        flight.finish(call)
        under_way.popleft()
        if not on_host(piece):
            write(piece, call.held[0], asked.called)

    try:
        for piece, here in _cut(flat, asked.called):
            if len(under_way) == UNDER_WAY:
                finish()
            under_way.append((piece, flight.begin(replace(asked, tensors=[here]), SUMS)))
        while under_way:
            finish()
    finally:
        for _, call in under_way:
            flight.break_off(call)


def _cut(flat: torch.Tensor, called: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The pieces of ``flat``, each where it is and in host memory."""
    if on_host(flat):
        yield from ((piece, piece) for piece in flat.split(HOST_PIECE))
        return
    for piece, (here,) in zip(flat.split(SUM_PIECE), on_the_host((flat,), SUM_PIECE, called, UNDER_WAY), strict=True):
        yield piece, here
