"""The plugin's own sums, piece by piece, so that what is under way is bounded whatever a gradient's size.

What is on the host is added up where it is; several pieces at once keep the network busy while one is added. So is what
is on an accelerator that has links of its own (the setting ``device_link``); else it goes through host memory: while
one piece is added up over the network, the next ones are on their way down, and the last ones on their way back. All
members cut alike, so that they start the same operations in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from recycle_plugin.core.vocabulary.worker_bytes import SUM_PIECE
from recycle_plugin.runtime.collectives.asked import SUMS, Asked, Call
from recycle_plugin.runtime.collectives.in_flight import Flight
from recycle_plugin.runtime.devices.host import on_host
from recycle_plugin.runtime.devices.kinds import write
from recycle_plugin.runtime.devices.pieces import on_the_host

Parts = Sequence[torch.Tensor]
UNDER_WAY = 4  # pieces in sums at a time; of an accelerator's as many are on the way down, all in pinned memory
HOST_PIECE = 4 * SUM_PIECE  # numbers: in smaller pieces three and more members take longer than in one
DEVICE_PIECE = 16 * SUM_PIECE  # over a link of the device's own


def in_pieces(flight: Flight, asked: Asked, flat: torch.Tensor, parts: Parts = (), factor: float = 1.0) -> None:
    """Do what is ``asked`` for with ``flat``, a tensor of one dimension, in place, with at most UNDER_WAY pieces under
    way.

    ``parts``: what is written to ``flat`` before, one behind the other; each piece goes on its way once it is there.
    ``factor``: by which each result is multiplied, while the next pieces are under way.  Raises what the operation
    raises; an interruption leaves ``flat`` partly changed.
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
            under_way.append((piece, flight.begin(replace(asked, tensors=[here]), link)))
        while under_way:
            finish()
    finally:
        for _, call in under_way:
            flight.break_off(call)


def _cut(
    flat: torch.Tensor, parts: Parts, called: str, through_host: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The pieces of ``flat``, each where it is and where it is added up, once ``parts`` are written to it."""
    filled = _filled(flat, parts)
    if not through_host:
        there, size = 0 if parts else flat.numel(), HOST_PIECE if on_host(flat) else DEVICE_PIECE
        for end, piece in zip(range(size, flat.numel() + size, size), flat.split(size)):
            while there < min(end, flat.numel()):
                there = next(filled)
            yield piece, piece
        return
    deque(filled, maxlen=0)
    for piece, (here,) in zip(flat.split(SUM_PIECE), on_the_host((flat,), SUM_PIECE, called, UNDER_WAY), strict=True):
        yield piece, here


def _filled(flat: torch.Tensor, parts: Parts) -> Iterator[int]:
    """Writes ``parts`` to ``flat``; yields how many numbers are there."""
    there = 0
    for part in parts:
        for some in part.detach().reshape(-1).split(HOST_PIECE):
            flat[there : there + some.numel()].copy_(some)
            there += some.numel()
            yield there
