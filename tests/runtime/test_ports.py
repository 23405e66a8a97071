"""What all ports of a job have in common, whatever is said at them: what strangers leave behind, and what is refused of
those who know the secret.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pytest

from recycle_plugin.authentication.handshake import ANSWER, MAGIC, NONCE, Port
from recycle_plugin.core.messages.encoding import CONTROL, HEAD, LIMIT, Language
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.catch_up import listener
from recycle_plugin.runtime.catch_up import wire as state
from recycle_plugin.runtime.catch_up.listener import StateListener
from recycle_plugin.runtime.catch_up.rate import Rate
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.log import served
from recycle_plugin.runtime.movers import wire as tensors
from recycle_plugin.runtime.movers.tcp import Transport
from recycle_plugin.runtime.processes import log_server
from recycle_plugin.runtime.processes.log_server import LogServer
from tests.support.secret import SECRET, called
from tests.support.waiting import until

HERE, PATIENCE_S, NEWCOMER = "127.0.0.1", 30.0, WorkerId(3, 1)
EACH = 8  # strangers of a kind


class Listening(NamedTuple):
    """A port, the ``first`` message at it in its ``language``, and how long that may be."""

    address: tuple[str, int] | str
    port: Port
    language: Language
    first: object
    longest: int


@contextmanager
def control(coordinator, folder) -> Iterator[Listening]:
    loop, made = asyncio.new_event_loop(), []
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work) -> object:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE_S)

    async def start() -> None:
        made.append(Coordinator(4, lambda event, now: None, SECRET))
        await made[0].start(HERE, 0)

    run(start())
    try:
        address = made[0].address
        yield Listening(address, Port.CONTROL, CONTROL, Hello(2, "worker", 1, "h"), LIMIT)
    finally:
        run(made[0].close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


@contextmanager
def movers(coordinator, folder) -> Iterator[Listening]:
    made = Transport(coordinator.session(0), CPU)
    yield Listening(made.address, Port.TENSORS, tensors.LANGUAGE, tensors.Sender("x"), tensors.LONGEST_HEADER)
    made.close()


@contextmanager
def newcomers(coordinator, folder) -> Iterator[Listening]:
    made = StateListener(coordinator.session(0), None, Rate())
    made.expect(NEWCOMER)
    yield Listening(made.address, Port.STATE, state.LANGUAGE, state.Arrival("job", NEWCOMER), state.LONGEST_HELLO)
    made.close()


@contextmanager
def logs(coordinator, folder) -> Iterator[Listening]:
    token = served.token_of(folder, "run")
    made = LogServer(folder, "run", token, HERE, SECRET, lambda text: None, lambda *said: None)
    yield Listening(made.address, Port.LOGS, served.LANGUAGE, served.Ask("run", token), served.LONGEST_QUESTION)
    made.close()


@pytest.fixture(params=(control, movers, newcomers, logs), ids=lambda make: make.__name__)
def listening(request, coordinator, tmp_path) -> Iterator[Listening]:
    with request.param(coordinator, tmp_path) as made:
        yield made


def heard(connection: socket.socket) -> bytes:
    """All that comes until the other end hangs up."""
    answer = b""
    with suppress(ConnectionResetError):  # it has not read all
        while came := connection.recv(1 << 16):
            answer += came
    return answer


def taken(threads: int, descriptors: int) -> Callable[[], bool]:
    return lambda: threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= descriptors


def test_strangers_leave_nothing_behind(listening):
    """Neither those that say nothing, or half of what they should, nor those that are refused or just go."""
    host, _, port = str(listening.address).removeprefix("tcp://").rpartition(":")
    address = (host, int(port)) if isinstance(listening.address, str) else listening.address
    as_before = taken(threading.active_count(), len(os.listdir("/proc/self/fd")))
    for said in (b"", MAGIC, MAGIC + bytes(NONCE), b"GET / HTTP/1.1\r\n\r\n", MAGIC + bytes(NONCE + 32)):
        strangers = [socket.create_connection(address, PATIENCE_S) for _ in range(EACH)]
        for stranger in strangers:
            stranger.sendall(said)
        for number, stranger in enumerate(strangers):
            if number % 2:
                with suppress(OSError):  # it has been hung up on
                    stranger.shutdown(socket.SHUT_WR)
                assert len(heard(stranger)) in (0, ANSWER)
            stranger.close()
    until(as_before, "the end of the strangers' connections and threads")


def test_what_is_longer_than_it_may_be_is_refused_by_its_head(listening, monkeypatch):
    """... and not by the deadline for the rest of it."""
    for module in (listener, log_server):
        monkeypatch.setattr(module, "HELLO_S", 10 * PATIENCE_S)
    connection, _ = called(listening.address, listening.port)
    with connection:
        connection.sendall(HEAD.pack(b"RP", listening.language.version, listening.longest + 1))
        assert heard(connection) == b""


def test_a_message_that_does_not_fit_its_seal_is_not_taken(listening):
    connection, seals = called(listening.address, listening.port)
    with connection:
        made = listening.language.encode(listening.first)
        seal = bytearray(seals.out.of(made))
        seal[-1] ^= 1
        connection.sendall(made + seal)
        assert heard(connection) == b""
