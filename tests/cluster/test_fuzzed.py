"""Bytes that Hypothesis makes up, said to every port at which a job listens, while it trains: the job trains what it
trains alone, to the bit, and gathers neither memory nor descriptors.  ``--fuzz-seconds N`` goes on for that long.

They are random bytes, frames of the job's own that are cut off and changed, handshakes as they were recorded, with the
job's own secret, connections that stay half-open or are reset, and datagrams.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import hypothesis
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_workers import SupervisorHeartbeat
from recycle_plugin.runtime.authentication.datagrams import SealedDatagrams
from recycle_plugin.runtime.authentication.handshake import ANSWER, MAGIC, NONCE, PROOF, Port, answer, call
from recycle_plugin.runtime.authentication.secret import Secret, SecretFile
from recycle_plugin.runtime.movers.wire import LANGUAGE, Sender
from tests.cluster.test_strangers import CONTROL, PATIENCE_S, forged, listeners, told
from tests.support.cluster import Run
from tests.support.jobs import WRAPPED, after_step, assert_same_training, held

pytestmark = pytest.mark.plain_too(deepspeed=False)

STEPS_PER_S = 30  # as many as the job can make, about, beside this; it waits where it makes more
EACH_S = 5  # between two steps at which it waits
WARM = 10  # steps until a job's memory is what it stays
GROWTH_KIB = 24 << 10  # of a process, from before to after: less than torch's heap varies by
HALF_OPEN = 48  # connections that are left so at once
OF_TORCHS = 20  # one attack of so many is at a port of torch's, which has no door
EXAMPLES = 50  # between two looks at the clock
NO_HANGUP = struct.pack("ii", 1, 0)  # SO_LINGER, by which closing resets


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seconds" in metafunc.fixturenames:
        seconds = metafunc.config.getoption("--fuzz-seconds")
        metafunc.parametrize("seconds", [pytest.param(seconds, marks=pytest.mark.timeout(600 + 4 * seconds))])


@dataclass(frozen=True)
class Attack:
    """``said`` is said to a port of the job's, the ``place``-th in a list of them, and then the connection is ended in
    this ``way``.
    """

    said: bytes
    way: str
    place: int


def recorded(secret: Secret) -> Iterator[bytes]:
    """All that the caller has said in sessions that were real, of each kind of port."""
    hello = LANGUAGE.encode(Sender("tcp://10.0.0.1:1"))
    for port, said in [(Port.CONTROL, each) for each in CONTROL.values()] + [(kind, hello) for kind in Port]:
        near, far = socket.socketpair()
        with near, far:
            heard: list[bytes] = []
            recording = _Recording(near, heard)
            calling = threading.Thread(target=lambda: recording.say(secret, port, said), daemon=True)
            calling.start()
            answer(far, secret, port)
            calling.join(PATIENCE_S)
            yield b"".join(heard)


class _Recording:
    """A socket that notes what is sent over it."""

    def __init__(self, connection: socket.socket, heard: list[bytes]) -> None:
        self._connection, self._heard = connection, heard
        self.settimeout, self.recv = connection.settimeout, connection.recv

    def sendall(self, data: bytes) -> None:
        self._heard.append(bytes(data))
        self._connection.sendall(data)

    def say(self, secret: Secret, port: Port, message: bytes) -> None:
        seals = call(self, secret, port)  # type: ignore[arg-type]
        self.sendall(message + seals.out.of(message))


def attacks(secret: Secret) -> st.SearchStrategy[Attack]:
    """What is said to the ports of a job with this ``secret``."""
    beat = encode(SupervisorHeartbeat(2, True, 0.0))
    sealed = SealedDatagrams(secrets.token_bytes(PROOF)).sealed(beat)
    valid = st.sampled_from([*CONTROL.values(), forged(3), forged(1 << 20), beat, sealed, *recorded(secret)])
    opened = st.builds(lambda nonce, more: MAGIC + nonce + more, st.binary(min_size=NONCE, max_size=NONCE), st.binary())
    said = st.one_of(st.binary(max_size=4096), valid, opened, st.builds(changed, valid, changes(), st.integers(0)))
    return st.builds(Attack, said, st.sampled_from(["close", "reset", "half-open", "datagram"]), st.integers(0, 999))


def changes() -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=8)


def changed(valid: bytes, bytes_at: list[tuple[int, int]], length: int) -> bytes:
    """``valid`` with other bytes at some places, cut off at some length."""
    said = bytearray(valid)
    for place, byte in bytes_at:
        said[place % len(said)] = byte
    return bytes(said[: length % (len(said) + 1)])


@dataclass
class Attacker:
    """Carries attacks out against ``run``, whose ports are the ``ours``, which have a door, and ``torchs``.

    ``refused``: attacks by port that somebody's door has refused, and has hung up on.
    """

    run: Run
    ours: list[tuple[str, int]] = field(default_factory=list)
    torchs: list[tuple[str, int]] = field(default_factory=list)
    refused: dict[int, int] = field(default_factory=dict)
    count: int = 0
    _open: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        for pid in (self.run.launcher.pid, self.run.store_pid(), *self.run.pids().values()):
            for place in listeners(pid):
                (self.ours if self._has_door(*place) else self.torchs).append(place)

    @staticmethod
    def _has_door(host: str, port: int) -> bool:
        with socket.create_connection((host, port), PATIENCE_S) as stranger, suppress(OSError):
            stranger.settimeout(1.0)
            stranger.sendall(MAGIC + bytes(NONCE))
            return len(stranger.recv(ANSWER, socket.MSG_WAITALL)) == ANSWER
        return False

    def __call__(self, attack: Attack) -> None:
        self.count += 1
        of_torchs = attack.place % OF_TORCHS == 0
        places = self.torchs if of_torchs else self.ours
        host, port = places[attack.place // OF_TORCHS % len(places)]
        if attack.way == "datagram":
            with socket.socket(type=socket.SOCK_DGRAM) as stranger:
                stranger.sendto(attack.said, (host, self.run.port))
        elif attack.way == "close" and not of_torchs:
            assert len(told(port, attack.said, host)) in (0, ANSWER)  # it is told no more than a nonce and a proof
            self.refused[port] = self.refused.get(port, 0) + 1
        else:
            self._leave(socket.create_connection((host, port), PATIENCE_S), attack)

    def _leave(self, stranger: socket.socket, attack: Attack) -> None:
        stranger.settimeout(PATIENCE_S)
        with suppress(ConnectionError):
            stranger.sendall(attack.said)
        if attack.way == "reset":
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_HANGUP)
        if attack.way == "half-open":
            self._open.append(stranger)
            self.close(HALF_OPEN)
        else:
            stranger.close()

    def close(self, but: int = 0) -> None:
        """Close what is half-open, ``but`` the last ones."""
        while len(self._open) > but:
            self._open.pop(0).close()


def test_no_bytes_from_strangers_change_anything(launch, reference, tmp_path, seconds, pytestconfig):
    steps, rounds = STEPS_PER_S * seconds, range(EACH_S, seconds + EACH_S, EACH_S)
    holds = [held(tmp_path, min(STEPS_PER_S * until_s, steps), str(until_s)) for until_s in rounds]
    run = launch(
        "recycle.progress_timeout_s=100", f"steps={steps}", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(holds)
    )
    after_step(run, WARM)
    attacker, seed = Attacker(run), pytestconfig.getoption("--kill-seed") << 20
    attack, grown = fuzzed(attacks(SecretFile.at(run.port).read()), attacker), Growth(run)
    started = time.monotonic()
    for until_s in rounds:
        while time.monotonic() < started + until_s:
            seed += 1
            hypothesis.seed(seed)(attack)()
        if until_s == rounds[-1]:
            attacker.close()
            grown.look()
        (tmp_path / str(until_s)).touch()
    result = run.finish(200 + 2 * seconds)
    print(f"{steps} steps, {attacker.count} attacks; memory grew by {grown.kib} KiB")
    assert result.losses == reference(f"steps={steps}").losses and len(result.losses) == steps
    assert_same_training(result, reference(f"steps={steps}"))
    assert "Traceback" not in result.output and "never retrieved" not in result.output, result.output[-6000:]
    kinds = {event["event"] for event in result.events}
    assert not kinds & {"late", "suspected", "leaving", "terminate", "operator", "spare", "error"}, kinds
    assert max(grown.kib) < GROWTH_KIB, grown.kib
    assert_counted(attacker, result.of("stranger"))


def fuzzed(strategy: st.SearchStrategy[Attack], attack: Callable[[Attack], None]) -> Callable[[], None]:
    """What carries out EXAMPLES attacks; where one fails, that is done again to be shown, and not made smaller."""

    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=HealthCheck
    )
    @given(strategy)
    def made_up(each: Attack) -> None:
        attack(each)

    return made_up


class Growth:
    """Of the memory of all processes of ``run``, in KiB, from now until a look."""

    def __init__(self, run: Run) -> None:
        self._run, self.kib = run, [0]
        self._processes = [psutil.Process(pid) for pid in (run.launcher.pid, run.store_pid(), *run.pids().values())]
        self._before, self._descriptors = self._memory(), self._processes[0].num_fds()

    def _memory(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def look(self) -> None:
        """Find out how much it is, once the coordinator has done with who has gone."""
        self._run.wait_for(
            lambda: self._processes[0].num_fds() <= self._descriptors, "end of the strangers' connections", PATIENCE_S
        )
        self.kib = [now - before >> 10 for now, before in zip(self._memory(), self._before)]


def assert_counted(attacker: Attacker, told_of: list[dict]) -> None:
    """Each door has counted at least those that it has hung up on, and said so at each power of ten."""
    doors = {event["text"].partition(" what comes")[0] for event in told_of}
    assert doors == {"at the coordinator", *(f"at worker {rank}" for rank in attacker.run.pids())}
    most = sorted(max(event["count"] for event in told_of if event["text"].startswith(door)) for door in doors)
    least = sorted(10 ** (len(str(count)) - 1) for count in attacker.refused.values())
    assert len(least) == len(most) and all(said >= there for said, there in zip(most, least)), (most, least)
