"""A broken connection to the coordinator is made again: at the same address, or with who stands by on another host."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import AT
from recycle_plugin.core.messages import line_end
from recycle_plugin.core.messages.from_coordinator import Placed, Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.mirroring import Knows, SentBack, StandsBy
from recycle_plugin.runtime.control import session
from recycle_plugin.runtime.control.connections import SocketControl, connect
from recycle_plugin.runtime.control.framed import Disconnected
from tests.support.secret import answered, way, written

PATIENCE_S = 60.0
HELLO = Hello(1, "worker", 2, "h")
WELCOME = Welcome("a job")


class Listening:
    """A coordinator that welcomes who comes, or says nothing, with what each has said first."""

    def __init__(self, host: str, answers: bool = True) -> None:
        self.listener, self.answers = socket.create_server((host, 0)), answers
        self.address = self.listener.getsockname()
        self.hellos: queue.Queue[Hello] = queue.Queue()
        self.ends: list[SocketControl] = []
        self.first: list[object] = []  # what is said before the answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            end = SocketControl(answered(connection, Port.CONTROL))
            self.ends.append(end)
            self.hellos.put(end.receive(PATIENCE_S))
            for message in self.first:
                end.send(message)
            if self.answers:
                end.send(replace(WELCOME, line=4, token="its own"))

    def gone(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def listening():
    made: list[Listening] = []

    def listen(host: str, **options: bool) -> Listening:
        made.append(Listening(host, **options))
        return made[-1]

    yield listen
    for each in made:
        with suppress(OSError):
            each.gone()


@pytest.fixture
def home(listening):
    """(a coordinator, a connection to it that was welcomed)."""
    coordinator = listening("127.0.0.1")
    near = connect(way(coordinator.address), PATIENCE_S)
    near.send(HELLO)
    assert isinstance(near.receive(PATIENCE_S), Welcome)
    yield coordinator, near
    near.close()


def learn(coordinator: Listening, near: SocketControl, term: StandsBy) -> None:
    coordinator.ends[-1].send(term)
    coordinator.ends[-1].send(Placed(1))
    assert near.receive(PATIENCE_S) == Placed(1)


def test_who_stands_by_elsewhere_is_turned_to_once_nobody_answers_at_home(home, listening):
    """Not while somebody does; and what is said first there is the last term."""
    coordinator, near = home
    elsewhere = listening("127.0.0.2")
    learn(coordinator, near, StandsBy(3, *elsewhere.address, 1.0))
    assert coordinator.hellos.get(timeout=PATIENCE_S).term == 0
    coordinator.ends[-1].close()
    assert near.receive(PATIENCE_S) is None
    assert near.resume(HELLO, PATIENCE_S) is not None and near.address == coordinator.address
    assert coordinator.hellos.get(timeout=PATIENCE_S).term == 3 and elsewhere.hellos.empty()
    coordinator.gone()
    assert near.receive(PATIENCE_S) is None
    assert near.resume(HELLO, PATIENCE_S) is not None and near.address == near.there == elsewhere.address
    assert elsewhere.hellos.get(timeout=PATIENCE_S).line == 4


@pytest.fixture
def turned(home, listening, monkeypatch):
    """(the address at home, who stands by elsewhere, what a role's resuming has there): nobody is at home any more."""
    monkeypatch.setattr(line_end, "AT_HOME_S", 0.1)
    coordinator, near = home
    elsewhere = listening("127.0.0.2", answers=False)
    learn(coordinator, near, StandsBy(3, *elsewhere.address, 0.1))
    coordinator.hellos.get(timeout=PATIENCE_S)
    coordinator.gone()
    assert near.receive(PATIENCE_S) is None

    def resumes(role: str, timeout_s: float) -> queue.Queue[object]:
        resumed: queue.Queue[object] = queue.Queue()
        hello = replace(HELLO, role=role)
        threading.Thread(target=lambda: resumed.put(near.resume(hello, timeout_s)), daemon=True).start()
        elsewhere.hellos.get(timeout=PATIENCE_S)
        return resumed

    return coordinator.address, elsewhere, resumes


def test_who_has_turned_to_another_host_never_comes_home(turned):
    """Though who was there dies, too: that it has come counted there."""
    home, elsewhere, resumes = turned
    resumed = resumes("worker", 5.0)
    with socket.create_server(home) as again:
        again.settimeout(0.5)
        elsewhere.gone()
        with pytest.raises(TimeoutError):
            again.accept()
        assert resumed.get(timeout=PATIENCE_S) is None


def test_a_supervisor_that_has_turned_comes_home_if_nobody_leads_there(turned):
    """It decides nothing; without it, its worker would be ended, though the coordinator goes on."""
    home, elsewhere, resumes = turned
    resumed = resumes("supervisor", PATIENCE_S)
    with socket.create_server(home) as again:
        again.settimeout(PATIENCE_S)
        elsewhere.gone()
        end = SocketControl(answered(again.accept()[0], Port.CONTROL))
        assert end.receive(PATIENCE_S).role == "supervisor"
        end.send(replace(WELCOME, line=4, token="its own"))
        assert resumed.get(timeout=PATIENCE_S) is not None
        end.close()


def test_who_is_sent_back_by_who_stands_by_comes_home(home, listening, monkeypatch):
    """The coordinator was silent for a moment, and so few have turned that nobody goes on without it."""
    monkeypatch.setattr(line_end, "AT_HOME_S", 0.0)
    coordinator, near = home
    elsewhere = listening("127.0.0.2", answers=False)
    elsewhere.first = [SentBack()]
    learn(coordinator, near, StandsBy(3, *elsewhere.address, 0.1))
    assert near.resume(HELLO, PATIENCE_S) is not None and near.address == coordinator.address
    assert elsewhere.hellos.get(timeout=PATIENCE_S).line == 4


def test_a_host_that_refuses_was_not_silent_for_long(home, listening, monkeypatch):
    """Others on that host may still come to the next coordinator, which waits for them."""
    monkeypatch.setattr(line_end, "HEALS_S", 0.1)
    coordinator, near = home
    elsewhere = listening("127.0.0.2")
    learn(coordinator, near, StandsBy(3, *elsewhere.address, 0.1))
    coordinator.gone()
    near._break(Disconnected("nothing comes", silent=True))
    assert near.resume(HELLO, PATIENCE_S) is not None and near.address == elsewhere.address
    assert not elsewhere.hellos.get(timeout=PATIENCE_S).silent


class Noted:
    """A lock that tells when somebody waits for it."""

    def __init__(self) -> None:
        self._lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_who_gives_a_silent_coordinator_up_as_it_turns_keeps_the_new_connection(home, listening, monkeypatch):
    """A heartbeat finds the silence while another thread has just been answered elsewhere."""
    monkeypatch.setattr(line_end, "AT_HOME_S", 0.1)
    coordinator, near = home
    elsewhere = listening("127.0.0.2")
    learn(coordinator, near, StandsBy(3, *elsewhere.address, 0.1))
    near._sending = Noted()
    turned, beats = SocketControl._has_turned, threading.Thread(target=near.give_up, args=("nothing is heard",))

    def turn(self: SocketControl) -> None:
        beats.start()
        assert near._sending.awaited.wait(PATIENCE_S)
        turned(self)

    monkeypatch.setattr(SocketControl, "_has_turned", turn)
    coordinator.gone()
    assert near.receive(PATIENCE_S) is None and near.resume(HELLO, PATIENCE_S) is not None
    beats.join(PATIENCE_S)
    elsewhere.ends[-1].send(Placed(2))
    assert near.receive(PATIENCE_S) == Placed(2)


def test_what_is_said_first_may_be_a_term_that_is_answered_before_the_welcome_comes(home):
    coordinator, near = home
    coordinator.first = [StandsBy(5, "", 0, 1.0)]
    coordinator.ends[-1].close()
    assert near.receive(PATIENCE_S) is None and near.resume(HELLO, PATIENCE_S) is not None
    assert coordinator.ends[-1].receive(PATIENCE_S) == Knows(5)
    near.give_up("nobody is there to turn to")
    assert near.broken is None


@pytest.mark.parametrize("role, turns", (("worker", False), ("supervisor", True)))
def test_who_decides_nothing_may_turn_to_the_last_one_that_stood_by(home, listening, monkeypatch, role, turns):
    """A worker may not: it knows that the coordinator goes on without that one."""
    monkeypatch.setattr(line_end, "AT_HOME_S", 0.1)
    coordinator, near = home
    elsewhere = listening("127.0.0.2")
    learn(coordinator, near, StandsBy(3, *elsewhere.address, 0.1))
    learn(coordinator, near, StandsBy(4, "", 0, 0.1))
    coordinator.gone()
    assert near.receive(PATIENCE_S) is None
    limit_s = PATIENCE_S if turns else 1.0  # who turns is back long before
    assert (near.resume(replace(HELLO, role=role), limit_s) is not None) == turns == (not elsewhere.hellos.empty())


def test_who_listens_may_die_before_it_has_let_anybody_in():
    """Then who takes its place is found at the same address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()  # as its end does: a reset
            connection, _ = listener.accept()
            end = SocketControl(answered(connection, Port.CONTROL))
            end.send(WELCOME)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        near = connect(way(listener.getsockname()), PATIENCE_S)
        assert near.receive(PATIENCE_S) == WELCOME
        near.close()
        serving.join()


def test_a_worker_that_starts_as_the_coordinators_host_dies_finds_the_next_one(listening, monkeypatch, tmp_path):
    """Its supervisor has told it where that is to be looked for, too."""
    monkeypatch.setattr(line_end, "AT_HOME_S", 0.1)
    home, elsewhere = listening("127.0.0.1"), listening("127.0.0.2")
    home.gone()
    addresses = ",".join("{}:{}".format(*each.address) for each in (home, elsewhere))
    environment = {"RECYCLE_COORDINATOR": addresses, "RANK": "1", AT: written(tmp_path / "secret")}
    made = session.connect_from_environment(environment)
    try:
        assert elsewhere.hellos.get(timeout=PATIENCE_S).line == -1
    finally:
        made.forked = True  # nobody goes on with its connection
        made._control.close()
        made._listening.join(PATIENCE_S)
