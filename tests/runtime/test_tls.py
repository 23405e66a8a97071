"""TLS at a job's ports: who gets in, what is on the wire, and that all that is said there goes over it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from recycle_plugin.authentication import handshake
from recycle_plugin.authentication.handshake import ALIKE, SIGNED, Port, Proved, Stranger, answer, call
from recycle_plugin.authentication.secret import SETTING, Secret
from recycle_plugin.authentication.tls import CA, Tls, TlsFailure
from recycle_plugin.authentication.tls import SETTING as FOLDER
from recycle_plugin.authentication.tls_socket import PIECE, TlsSocket
from recycle_plugin.core.messages.from_coordinator import LogsAt
from recycle_plugin.core.messages.from_workers import Note
from recycle_plugin.core.vocabulary.state_stream import Asked
from recycle_plugin.errors import NoCredentials
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.devices.host import CPU, There
from recycle_plugin.runtime.log.served import token_of
from recycle_plugin.runtime.movers.tcp import Transport
from recycle_plugin.runtime.processes import supervisor, worker_keeper
from recycle_plugin.runtime.processes.log_server import LogServer
from recycle_plugin.runtime.worker.log_mirror import Mirror
from tests.support.certificates import files, tls_secret
from tests.support.logs import HERE, LOOK_S, RUN
from tests.support.logs import written as logged
from tests.support.moved import Inbox, act
from tests.support.secret import SECRET, written
from tests.support.state_lines import ITEMS, Ends, plain
from tests.support.waiting import until

PATIENCE_S = 30.0
OURS, BETA = tls_secret("alpha"), tls_secret("beta")
THEIRS = tls_secret("alpha", "other")  # of the same secret, and of another ca


def met(calls: Callable[[socket.socket], object], answers: Callable[[socket.socket], object]) -> list[object]:
    """What both ends of a connection return, or raise."""

    def of(work: Callable[[socket.socket], object], connection: socket.socket) -> object:
        try:
            return work(connection)
        except OSError as error:
            connection.close()  # as whoever is refused does
            return error

    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as other:
        answering = other.submit(of, answers, far)
        found = [of(calls, near), answering.result(PATIENCE_S)]
    near.close()
    far.close()
    return found


def caller(secret: Secret, port: Port = Port.CONTROL) -> Callable[[socket.socket], Proved]:
    return lambda connection: call(connection, secret, port, PATIENCE_S)


def answerer(secret: Secret, port: Port = Port.CONTROL) -> Callable[[socket.socket], Proved]:
    return lambda connection: answer(connection, secret, port, PATIENCE_S)


@contextmanager
def pair(buffer: int | None = None) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Both ends of a connection in TLS, whose sockets take so much at once."""
    near, far = socket.socketpair()
    for each in (near, far):
        if buffer is not None:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    with near, far, ThreadPoolExecutor(1) as other:
        answering = other.submit(answerer(BETA), far)
        mine, theirs = caller(OURS)(near).connection, answering.result(PATIENCE_S).connection
        assert isinstance(mine, TlsSocket) and isinstance(theirs, TlsSocket)
        for each in (mine, theirs):
            each.settimeout(PATIENCE_S)
        yield mine, theirs


# --- who gets in ---------------------------------------------------------------------------------------


def test_both_ends_show_certificates_of_different_hosts_and_have_the_same_keys():
    mine, theirs = met(caller(OURS), answerer(BETA))
    assert isinstance(mine, Proved) and isinstance(theirs, Proved)
    assert theirs.seals.into.fits(b"x", mine.seals.out.of(b"x")) and mine.seals.datagrams == theirs.seals.datagrams


def test_over_a_network_what_is_said_in_a_handshake_waits_for_no_acknowledgement():
    """The caller says two things in a row there: it took 40 ms for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        calling = other.submit(lambda: caller(OURS)(socket.create_connection(listener.getsockname(), PATIENCE_S)))
        with listener.accept()[0] as far:
            answerer(BETA)(far)
            with calling.result(PATIENCE_S).connection as near:
                for each in (near._socket, far):
                    assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "calls, answers, caller_hears, answerer_hears",
    [
        (
            SECRET,
            OURS,
            "it asks for TLS, and recycle.tls is not set here",
            "it does not speak TLS 1.3, which is set here",
        ),
        (
            OURS,
            SECRET,
            "it does not speak TLS 1.3, which is set here",
            "it speaks TLS, and recycle.tls is not set here",
        ),
        (
            THEIRS,
            OURS,
            "its certificate is refused: self-signed",
            "it refuses this end's certificate, or its TLS: tlsv1 alert",
        ),
        (
            OURS,
            Secret("x" * 40, BETA.tls),
            "it does not know this job's secret",
            "disconnected before it had proved who it is",
        ),
    ],
    ids=("plain to TLS", "TLS to plain", "another ca", "another secret"),
)
def test_who_is_not_alike_is_a_stranger_to_the_other(calls, answers, caller_hears, answerer_hears):
    heard = met(caller(calls), answerer(answers))
    for found, words in zip(heard, (caller_hears, answerer_hears), strict=True):
        assert isinstance(found, Stranger) and words in str(found), heard
    advice = {SECRET: ALIKE, THEIRS: SIGNED}.get(calls, ALIKE if answers is SECRET else "")
    assert heard[0].advice == advice


def test_a_certificate_that_the_answerer_does_not_take_is_the_callers_fault_and_it_hears_so():
    """It takes the answerer's itself: only the other one judges."""
    trusting = Tls(files("alpha", "other"))
    trusting._calls.load_verify_locations(files() / CA)
    heard = met(caller(Secret(SECRET.shared, trusting)), answerer(OURS))
    assert [type(each) for each in heard] == [Stranger, Stranger]
    assert "it refuses this end's certificate, or its TLS: tlsv1 alert unknown ca" in str(heard[0])
    assert "its certificate is refused: self-signed certificate in certificate chain" in str(heard[1])


def shakes(context: ssl.SSLContext) -> Callable[[socket.socket], bytes]:
    """Somebody who goes through a TLS handshake with what the standard library has, and waits for an answer."""

    def work(connection: socket.socket) -> bytes:
        connection.settimeout(PATIENCE_S)
        with context.wrap_socket(connection) as wrapped:
            wrapped.sendall(handshake.MAGIC)
            return wrapped.recv(1)

    return work


def says(said: bytes) -> Callable[[socket.socket], bytes]:
    def work(connection: socket.socket) -> bytes:
        connection.settimeout(PATIENCE_S)
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(64)

    return work


def anybodys(most: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode, made.maximum_version = False, ssl.CERT_NONE, most
    return made


@pytest.mark.parametrize(
    "stranger, why",
    [
        (shakes(anybodys()), "its TLS fails: peer did not return a certificate"),
        (shakes(anybodys(ssl.TLSVersion.TLSv1_2)), "it does not speak TLS 1.3, which is set here"),
        (says(b"GET / HTTP/1.1\r\n\r\n"), "it does not speak TLS 1.3, which is set here"),
        (says(b""), "it disconnected before it had proved who it is"),
        (says(b"\x16\x03\x01\x00\x10" + bytes(16)), "its TLS fails: unexpected message"),
        (
            says(b"\x16\x03\x01\x40\x00" + bytes(99)),
            "it had proved who it is, but b'\\x16\\x03\\x01@",
        ),
    ],
    ids=("no certificate", "TLS 1.2", "HTTP", "nothing", "no hello", "half a record"),
)
def test_who_has_no_certificate_is_told_apart_by_what_it_does(stranger, why):
    _, found = met(stranger, answerer(OURS))
    assert isinstance(found, Stranger) and why in str(found)


def test_who_says_nothing_has_no_longer_than_without_tls():
    near, far = socket.socketpair()
    with near, far:
        with pytest.raises(Stranger, match="has not proved in time who it is"):
            answer(near, OURS, Port.CONTROL, 0.05)
        with pytest.raises(OSError) as silent:
            call(far, OURS, Port.CONTROL, 0.05)
        assert not isinstance(silent.value, Stranger), "a process of this job may be too busy for it"


def relayed(near: socket.socket, far: socket.socket, secret: Secret) -> None:
    """Pass on what two honest ends prove, in TLS with a certificate of the job's own ca: all of it can be read here."""
    assert secret.tls is not None
    ends = [secret.tls.end(calls=False), secret.tls.end(calls=True)]
    words = handshake._Blocking(PATIENCE_S)
    between = Secret("of nobody", secret.tls)
    work = [handshake._through_tls(words, one, between, calls) for one, calls in ((near, False), (far, True))]
    ends = []
    for each in work:
        try:
            each.send(None)
        except StopIteration as over:
            ends.append(over.value[0])
    for source, target, size in ((0, 1, 36), (1, 0, handshake.ANSWER), (0, 1, handshake.PROOF)):
        target_end, had = ends[target], b""
        while len(had) < size and (came := ends[source].recv(size - len(had))):
            had += came
        target_end.sendall(had)


def test_who_has_a_certificate_and_not_the_secret_can_not_pass_on_what_is_proved():
    """... and read it: a proof counts on the TLS connection that it was made for."""
    (mine, near), (far, theirs) = socket.socketpair(), socket.socketpair()
    with mine, near, far, theirs, ThreadPoolExecutor(2) as others:
        between = others.submit(relayed, near, far, tls_secret("gamma"))
        answering = others.submit(answer, theirs, BETA, Port.CONTROL, PATIENCE_S)
        with pytest.raises(Stranger, match="does not know this job's secret"):
            call(mine, OURS, Port.CONTROL, PATIENCE_S)
        for each in (mine, near, far):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OSError):
            answering.result(PATIENCE_S)
        with suppress(OSError):
            between.result(PATIENCE_S)


# --- over it -------------------------------------------------------------------------------------------


def noise(size: int) -> bytes:
    return (
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        .numpy()
        .tobytes()
    )


def test_what_is_sent_comes_and_none_of_it_is_on_the_wire():
    """Also what was in the handshake: neither a nonce nor the beginning of a proof."""
    near, far = socket.socketpair()
    (mine, wire), (other, theirs) = (near, far), socket.socketpair()
    seen = bytearray()

    def passes(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while came := source.recv(1 << 16):
                seen.extend(came)
                target.sendall(came)

    with mine, wire, other, theirs, ThreadPoolExecutor(3) as others:
        passing = [others.submit(passes, *ends) for ends in ((wire, other), (other, wire))]
        answering = others.submit(answerer(BETA), theirs)
        made = caller(OURS)(mine).connection
        secret_words = b"weights that nobody else is to read" * 100
        made.sendall(secret_words)
        got = bytearray(len(secret_words))
        assert answering.result(PATIENCE_S).connection.recv_into(got, 0, socket.MSG_WAITALL) == len(got)
        assert got == secret_words
        for each in (mine, theirs):
            each.shutdown(socket.SHUT_RDWR)
        for each in passing:
            each.result(PATIENCE_S)
    assert b"weights" not in seen and handshake.MAGIC not in seen and len(seen) > len(secret_words)


@pytest.mark.parametrize("size", (1, 1 << 14, PIECE, 3 * PIECE + 5))
def test_however_much_it_is_it_comes_whole(size):
    data = noise(size)
    with pair() as (mine, theirs), ThreadPoolExecutor(1) as other:
        sending = other.submit(mine.sendall, data)
        got = bytearray(size)
        assert theirs.recv_into(got, 0, socket.MSG_WAITALL) == size and got == data
        sending.result(PATIENCE_S)
        mine.close()
        assert theirs.recv(1) == b""


def test_who_does_not_wait_comes_again_with_the_same_bytes_and_nothing_is_sent_twice():
    """In parts, as movers do, to an end that reads now and then: sockets take a part of a record only."""
    data = noise(5 * PIECE)
    parts, got = [memoryview(data)[at : at + 100_000] for at in range(0, len(data), 100_000)], bytearray()
    refused = 0
    with pair(buffer=4096) as (mine, theirs):
        mine.settimeout(None)  # with one, Python waits whatever the flags say
        theirs.setblocking(False)
        while len(got) < len(data):
            try:
                while parts:
                    sent = mine.sendmsg(parts, [], socket.MSG_DONTWAIT)
                    assert 0 < sent <= len(parts[0])
                    parts[0] = parts[0][sent:]
                    if not parts[0]:
                        del parts[0]
            except BlockingIOError:
                refused += 1
            with suppress(BlockingIOError):
                got += theirs.recv(30_000)
    assert got == data and refused > 5


def test_one_thread_reads_while_another_one_writes():
    data = noise(40 * PIECE)

    def reads(end: TlsSocket) -> bytes:
        got = bytearray(len(data))
        assert end.recv_into(got, 0, socket.MSG_WAITALL) == len(got)
        return bytes(got)

    with pair() as ends, ThreadPoolExecutor(4) as others:
        working = [others.submit(end.sendall, data) for end in ends] + [others.submit(reads, end) for end in ends]
        assert [each.result(PATIENCE_S) for each in working] == [None, None, data, data]


def test_a_part_of_a_file_is_sent(tmp_path):
    (tmp_path / "file").write_bytes(noise(2 * PIECE))
    with pair() as (mine, theirs), ThreadPoolExecutor(1) as other, (tmp_path / "file").open("rb") as file:
        sending = other.submit(mine.sendfile, file, 7, PIECE + 3)
        got = bytearray(PIECE + 3)
        assert theirs.recv_into(got, 0, socket.MSG_WAITALL) == len(got)
        assert got == noise(2 * PIECE)[7 : 7 + len(got)] and sending.result(PATIENCE_S) == len(got)
        assert mine.sendfile(file, 2 * PIECE - 4, 9) == 4


@pytest.mark.parametrize("place", (0, 5, -1, None), ids=("its head", "its first byte", "its tag", "it comes again"))
def test_a_record_that_is_changed_on_its_way_or_comes_again_ends_it(place):
    with pair() as (mine, theirs):
        record = bytearray(mine._end.encrypted(memoryview(b"once")))
        if place is None:
            mine._socket.sendall(record)
            assert theirs.recv(100) == b"once"
        else:
            record[place] ^= 1
        mine._socket.sendall(record)
        with pytest.raises(TlsFailure, match="its TLS fails: "):
            theirs.recv(100)


# --- at each port --------------------------------------------------------------------------------------


@pytest.fixture
def sessions(coordinator) -> Callable[[int, Secret], object]:
    def made(rank: int, secret: Secret):
        session = coordinator.session(rank, wait_timeout_s=PATIENCE_S)
        session.secret = secret
        return session

    return made


def test_boundary_tensors_travel_in_it(sessions, coordinator):
    """Large ones at once, which wait for a thread; one from a worker without TLS is a stranger's."""
    ends = [Transport(sessions(rank, secret), CPU) for rank, secret in enumerate((OURS, BETA, SECRET))]
    try:
        tensors = [torch.randn(1 << 20), torch.ones(3, 2), torch.empty(0, 4), torch.randn(1 << 21)]
        for number, tensor in enumerate(tensors):
            ends[0].send(ends[1].address, act(number), There((tensor, tensor[:1])), 0)
        inbox = Inbox(ends[1])
        for number, tensor in enumerate(tensors):
            assert all(map(torch.equal, inbox.wait(act(number)), (tensor, tensor[:1])))
        assert isinstance(ends[0]._outboxes[ends[1].address]._connection, TlsSocket)
        ends[2].send(ends[1].address, act(9), There((torch.ones(1),)), 0)
        stranger = next(note for note in coordinator.hear(Note) if note.kind == "stranger")
        assert "at worker 1 a caller at" in stranger.text and "does not speak TLS 1.3" in stranger.text
        ends[0].send(ends[1].address, act(10), There((torch.ones(1),)), 0)
        inbox.wait(act(10))
        assert act(9) not in inbox.take()
    finally:
        for end in ends:
            end.close()


def test_state_for_newcomers_travels_in_it(sessions):
    """Items one way while names go the other, from one thread each."""
    ends = Ends(sessions(0, BETA), secret=OURS)
    try:
        outlet, inlet = ends.line()
        names = tuple(f"{number}.{'long' * 50}" for number in range(20_000))
        inlet.ask(Asked(names))
        for item in ITEMS:
            outlet.send(item)
        assert [*map(plain, ends.received(inlet, len(ITEMS)))] == [*map(plain, ITEMS)]
        asked: list[Asked] = []
        until(
            lambda: inlet.items() or asked.extend(outlet.asked()) or sum(len(a.units) for a in asked) == 20_000, "names"
        )
        assert tuple(name for each in asked for name in each.units) == names and not ends.noted
        assert isinstance(outlet._connection, TlsSocket)
    finally:
        ends.close()


def test_logs_travel_in_it(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    logged(folder, 1, 3).close()
    counted: list[str] = []
    server = LogServer(
        folder, RUN, token_of(folder, RUN), HERE, BETA, print, lambda text, address: counted.append(text)
    )
    at = [LogsAt(server.token, (server.address,), (1,))]
    mirror, plain_one = (
        Mirror(tmp_path / name / "3.mirror", RUN, at, secret, LOOK_S) for name, secret in (("a", OURS), ("b", SECRET))
    )
    try:
        copies = [(path, mirror.folder / path.name) for path in folder.glob("*.log")]
        until(lambda: all(b.exists() and a.read_bytes() == b.read_bytes() for a, b in copies), "the copies")
        until(lambda: "it asks for TLS" in "".join(plain_one.faults()), "a refusal")
        assert copies and not mirror.faults() and not [*plain_one.folder.iterdir()]
        assert "does not speak TLS 1.3" in counted[0]
    finally:
        mirror.close()
        plain_one.close()
        server.close()


@pytest.mark.parametrize(
    "theirs, own, words",
    [(SECRET, OURS, "it does not speak TLS 1.3"), (OURS, SECRET, "it asks for TLS")],
    ids=("there it is plain", "here it is plain"),
)
def test_a_host_whose_tls_is_not_the_coordinators_ends_with_one_line(tmp_path, theirs, own, words):
    said = []

    async def play() -> NoCredentials:
        coordinator = Coordinator(2, lambda event, now: said.append(event), theirs)
        await coordinator.start("127.0.0.1", 0)
        host, port = coordinator.address
        environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        environment[SETTING] = written(tmp_path / "secret")
        environment |= {FOLDER: str(own.tls.folder)} if own.tls is not None else {}
        try:
            with pytest.raises(NoCredentials) as ended:
                one = supervisor.Supervisor(["train.py"], environment, "deepspeed", worker_keeper.Here())
                await asyncio.wait_for(one.run(), PATIENCE_S)
            return ended.value
        finally:
            await coordinator.close()

    line = str(asyncio.run(play()))
    assert words in line and line.endswith(f": {ALIKE}") and "\n" not in line
    assert [event.kind for event in said] == ["stranger"]
