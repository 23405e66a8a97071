"""A host that loses power closes no connection: the other end has a deadline for its silence."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from recycle_plugin.authentication.handshake import Port
from recycle_plugin.core.coordinator.mirror import STANDBY
from recycle_plugin.core.messages import line_end
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello, Note
from recycle_plugin.core.messages.mirroring import StandsBy
from recycle_plugin.runtime.control import connections
from recycle_plugin.runtime.control.connections import SocketControl, connect
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.mirror import follow
from tests.support.hosts import NAMES, Hosts, NoHosts, hosts
from tests.support.secret import answered, way

PATIENCE_S = 60.0
FOREVER_S = 3600.0
HERE, THERE = NAMES
LIBC, CLONE_NEWNET = ctypes.CDLL(None), 0x40000000
T = TypeVar("T")


def on(pair: Hosts, name: str, call: Callable[[], T]) -> T:
    def enter() -> T:
        with open(f"/proc/{pair.pid(name)}/ns/net") as host:
            assert LIBC.setns(host.fileno(), CLONE_NEWNET) == 0, "setns"
        return call()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(enter).result(PATIENCE_S)


@pytest.fixture
def pair() -> Iterator[Hosts]:
    try:
        with hosts() as made:
            yield made
    except NoHosts as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture
def ends(pair, monkeypatch) -> Iterator[tuple[SocketControl, SocketControl]]:
    """(the end that has connected, the other one, on a host of its own)."""
    monkeypatch.setattr(connections, "PROBE_S", 1)
    monkeypatch.setattr(connections, "SILENT_S", 1.0)
    listener = on(pair, THERE, lambda: socket.create_server((pair.address(THERE), 0)))
    with listener, ThreadPoolExecutor(1) as threads:
        far = threads.submit(lambda: SocketControl(answered(listener.accept()[0], Port.CONTROL)))
        near = on(pair, HERE, lambda: connect(way(listener.getsockname()), PATIENCE_S))
        yield near, far.result(PATIENCE_S)
    near.close()
    far.result().close()


@pytest.mark.parametrize("sends", (False, True), ids=("idle", "while it sends"))
def test_a_connection_to_a_host_without_power_breaks_before_deadlines_are_known(pair, ends, sends):
    near, _ = ends
    pair.cut(THERE)
    if sends:
        near.send(Note(0, "a note", "that nobody gets", {}))
    assert near.receive(PATIENCE_S) is None and near.broken is not None
    assert "timed out" in near.broken.why or "No route" in near.broken.why


@pytest.mark.parametrize("stood_by", (False, True), ids=("alone", "with a standby elsewhere"))
def test_it_breaks_after_the_jobs_deadline(pair, ends, stood_by):
    near, _ = ends
    near.bear_silence(FOREVER_S if stood_by else 1.0)
    if stood_by:
        near.line = 1  # it was welcomed
        near._learn(StandsBy(1, "10.77.0.9", 9, 1.0))
    pair.cut(THERE)
    assert near.receive(PATIENCE_S) is None and near.broken is not None


NOTE = Note(0, "a note", "that nobody reads", {})
SILENT_S = 0.4


def stands_by(near: SocketControl, host: str, port: int) -> None:
    near.line = 1  # it was welcomed
    near._learn(StandsBy(1, host, port, SILENT_S))


def until_given_up(near: SocketControl) -> None:
    """Ask again and again, as heartbeats do."""
    deadline = time.monotonic() + PATIENCE_S
    while near.broken is None and time.monotonic() < deadline:
        near.give_up("nothing is heard", only_silent=True)
        time.sleep(SILENT_S / 10)


def test_a_process_that_answers_nothing_is_no_silent_host(pair, ends):
    """Its kernel acknowledges what it does not read."""
    near, _ = ends
    stands_by(near, "10.77.0.9", 9)
    for _ in range(20):
        near.send(NOTE)
        time.sleep(SILENT_S / 10)
        near.give_up("nothing is heard", only_silent=True)
    assert near.broken is None
    near.give_up("nothing is heard")
    assert near.broken is not None and not near.broken.silent


def test_a_silent_host_is_left_once_its_line_had_time_to_heal_and_the_next_one_hears_why(pair, ends, monkeypatch):
    """No process takes the coordinator's place there: who has died would have closed its connections."""
    monkeypatch.setattr(line_end, "AT_HOME_S", FOREVER_S)
    near, _ = ends
    with on(pair, HERE, lambda: socket.create_server((pair.address(HERE), 0))) as listener:
        stands_by(near, *listener.getsockname())
        pair.cut(THERE)
        near.send(NOTE)
        until_given_up(near)
        assert near.broken is not None and near.broken.silent
        with ThreadPoolExecutor(1) as threads:
            turned = threads.submit(on, pair, HERE, lambda: near.resume(Hello(1, "worker", 2, HERE), PATIENCE_S))
            next_one = SocketControl(answered(listener.accept()[0], Port.CONTROL))
            hello = next_one.receive(PATIENCE_S)
            next_one.send(Welcome("a job", line=1))
            assert turned.result(PATIENCE_S) is not None and hello.silent
        next_one.close()


def test_a_cut_line_is_no_death_within_the_deadline(pair, ends):
    near, far = ends
    near.bear_silence(FOREVER_S)
    pair.cut(THERE)
    note = Note(0, "a note", "that comes late", {})
    far.send(note)
    assert near.receive(3.0) is None and near.broken is None  # longer than it may be silent before
    pair.mend(THERE)
    assert near.receive(PATIENCE_S) == note


async def test_a_standby_follows_no_host_without_power(pair, ends):
    control = InLoop(ends[0])
    following = asyncio.create_task(follow(control, Hello(-1, STANDBY, 77, "h"), lambda known: None))
    pair.cut(THERE)
    assert await asyncio.wait_for(following, PATIENCE_S), "it may ask again"
