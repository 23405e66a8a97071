"""The movers of two neighbours, whose boundary tensors go over links (recycle_plugin/runtime/collectives/pairs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.runtime.collectives.pairs import LinkedPairs, OpenPair, Way
from recycle_plugin.runtime.devices.host import CPU, HOST
from recycle_plugin.runtime.devices.kept import Kept
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.movers.tcp import Transport
from tests.support.coordinator import FakeCoordinator
from tests.support.waiting import until

WAIT_S = 5.0


class OnHost:
    """Room for what comes, where the host itself is the device."""

    where, alone = HOST, staticmethod(nullcontext)


def kept(*tensors: torch.Tensor) -> Kept:
    """Tensors of such a device as a worker keeps them."""
    return Kept(tensors, lambda: CPU.to_host(tensors, "", shared=True))


def adopt(ends: list[LinkedPairs], number: int) -> None:
    """Have the two go on in this generation, as neighbours in a pipeline."""
    members = tuple(Member(rank, Seat(0, rank), end.address, "h") for rank, end in enumerate(ends))
    for end in ends:
        end._session.view.adopt(Generation(number, members, 0, "test", 0.0))
        end.cut()
    for end in ends:
        end.go_on()


def ways(end: LinkedPairs) -> tuple[Way, Way]:
    (out,), (comes,) = end._out.values(), end._in.values()
    return out, comes


@contextmanager
def two(
    coordinator: FakeCoordinator,
    open_pair: OpenPair,
    room: Callable[[], Any] = OnHost,
    device: Device = CPU,
    stand: bool = True,
) -> Iterator[list[LinkedPairs]]:
    ends = []
    for rank in (0, 1):
        session = coordinator.session(rank, wait_timeout_s=WAIT_S)
        ends.append(LinkedPairs(session, Transport(session, device), open_pair, room()))
    adopt(ends, 1)
    if stand:
        until(lambda: all(way.stands for end in ends for way in ways(end)), "links")
    try:
        yield ends
    finally:
        for end in ends:
            end.give_up_links()
            end.close()
