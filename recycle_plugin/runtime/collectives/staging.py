"""The plugin's own sums, piece by piece, so that memory under way is bounded for gradients of any size.

Host tensors are summed in place; several pieces at once keep the network busy while one is added. The same holds on an
accelerator with links of its own (the setting ``device_link``). Otherwise pieces go through host memory: while one is
summed over the network, the next ones are copied down, and the last ones back. All members cut alike, so they start the
same operations in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from recycle_plugin.core.vocabulary.worker_bytes import SUM_PIECE
from recycle_plugin.runtime.collectives.asked import SUMS, Asked, Call
from recycle_plugin.runtime.collectives.in_flight import Flight
from recycle_plugin.runtime.devices.host import on_host
from recycle_plugin.runtime.devices.kinds import write
from recycle_plugin.runtime.devices.pieces import on_the_host

Parts = Sequence[torch.Tensor]
UNDER_WAY = 4  # pieces in sums at a time; as many more are copied down from an accelerator, all in pinned memory
HOST_PIECE = 4 * SUM_PIECE  # elements; among three or more members smaller pieces are slower than a single one
DEVICE_PIECE = 16 * SUM_PIECE  # over a link of the device's own


def in_pieces(flight: Flight, asked: Asked, flat: torch.Tensor, parts: Parts = (), factor: float = 1.0) -> None:
    """Run ``asked`` on the 1-D tensor ``flat`` in place, with at most UNDER_WAY pieces under way.

    ``parts``: written to ``flat`` first, concatenated; each piece starts once it is filled. ``factor``: multiplies each
    result while the next pieces are under way. Raises the operation's error; an interruption leaves ``flat`` partly
    changed.
    """
    under_way: deque[tuple[torch.Tensor, Call]] = deque()

    def finish() -> None:
        piece, call = under_way[0]
        flight.finish(call)
        under_way.popleft()
        if call.held[0] is not piece:
            write(piece, call.held[0], asked.called)
        if factor != 1.0:
            piece.mul_(factor)

    link = flight.link_of(flat)
    try:
        for piece, here in _cut(flat, parts, asked.called, through_host=link == SUMS and not on_host(flat)):
            if len(under_way) == UNDER_WAY:
                finish()
            under_way.append((piece, flight.begin(asked._replace(tensors=[here]), link)))
        while under_way:
            finish()
    finally:
        for _, call in under_way:
            flight.break_off(call)


def _cut(
    flat: torch.Tensor, parts: Parts, called: str, through_host: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (piece of ``flat``, where it is summed) once ``parts`` are written to that piece."""
    filled = _filled(flat, parts)
    if not through_host:
        whole, size = flat.numel(), HOST_PIECE if on_host(flat) else DEVICE_PIECE
        there = 0 if parts else whole
        for end, piece in zip(range(size, whole + size, size), flat.split(size) if whole > size else (flat,)):
            while there < min(end, whole):
                there = next(filled)
            yield piece, piece
        return
    deque(filled, maxlen=0)
    pieces = flat.split(SUM_PIECE) if flat.numel() else ()  # torch splits no numbers into one piece
    for piece, (here,) in zip(pieces, on_the_host((flat,), SUM_PIECE, called, UNDER_WAY), strict=True):
        yield piece, here


def _filled(flat: torch.Tensor, parts: Parts) -> Iterator[int]:
    """Write ``parts`` to ``flat``; yield the number of elements written so far."""
    there = 0
    for part in parts:
        for some in part.detach().reshape(-1).split(HOST_PIECE):
            flat[there : there + some.numel()].copy_(some)
            there += some.numel()
            yield there
