"""Movers over TCP, and over links of two, do what every mover does (tests/support/mover_port.py)."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.movers.tcp import Transport
from recycle_plugin.runtime.worker.tiers import Host
from tests.support.late_device import LateDevice
from tests.support.mover_port import *  # noqa: F403  tests
from tests.support.paired import kept, two
from tests.support.thread_links import Links


@contextmanager
def over_tcp(coordinator):
    ends = [Transport(coordinator.session(rank, wait_timeout_s=5.0), CPU) for rank in (0, 1)]
    yield ends
    for end in ends:
        end.close()


MOVERS = {"tcp": over_tcp, "links of two": lambda coordinator: two(coordinator, Links().open)}
KEPT = {
    "on the host": lambda *tensors: Host(CPU).keep(tensors),
    "by one whose copies are late": lambda *tensors: Host(LateDevice()).keep(tensors),
    "on the device": kept,
}


@pytest.fixture(params=MOVERS)
def pair(request, coordinator):
    with MOVERS[request.param](coordinator) as ends:
        yield ends


@pytest.fixture(params=KEPT)
def on_host(request):
    """Tensors as a worker keeps those that it sends."""
    return KEPT[request.param]
