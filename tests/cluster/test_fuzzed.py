"""Bytes that Hypothesis makes up, said to every port at which a job listens, while it trains, replays a stage from its
log and has lost workers back: the job trains what it trains alone, to the bit, and gathers neither memory nor
descriptors.  ``--fuzz-seconds N`` goes on for that long.

They are random bytes, frames of the job's own that are cut off and changed, handshakes as they were recorded, with the
job's own secret, connections that stay half-open or are reset, and datagrams.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import hypothesis
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from recycle_plugin.authentication.datagrams import SealedDatagrams
from recycle_plugin.authentication.handshake import ANSWER, MAGIC, NONCE, PROOF, Port, answer, call
from recycle_plugin.authentication.secret import Secret, SecretFile
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_workers import SupervisorHeartbeat
from recycle_plugin.runtime.movers.wire import LANGUAGE, Sender
from tests.support.cluster import Run
from tests.support.jobs import WRAPPED, after_step, assert_same_training, difference, held
from tests.support.strangers import CONTROL, PATIENCE_S, Place, forged, letting_in, listeners, told

pytestmark = pytest.mark.plain_too(deepspeed=False)

STEPS_PER_S = 10  # fewer than the job makes beside this: it waits for the attacks, and they not for it
EACH_S = 5  # between two steps at which it waits
WARM = 10  # steps until a job's memory is what it stays
GROWTH_KIB = 24 << 10  # of a process, from before to after: less than torch's heap varies by
HALF_OPEN = 48  # connections that are left so at once
OF_TORCHS = 20  # one attack of so many is at a port of torch's, which has no door
LOOK_S = 0.5
EXAMPLES = 50  # between two looks at the clock
CYCLE, AWAY = 120, 40  # steps from a loss of a stage to the next one, and until both of its workers are to come back
CYCLE_S, OWN_S = 30, 15  # how many cycles a longer search has, and what is taken off its time
LAST_STAGE = (2, 3)  # ranks
EXACT = "recycle.exact=true"
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
        seals = call(self, secret, port).seals  # type: ignore[arg-type]
        self.sendall(message + seals.out.of(message))


def attacks(secret: Secret) -> st.SearchStrategy[Attack]:
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
    """Carries attacks out against ``run``, whose ports are the ``ours``, which have a door, and ``torchs``."""

    run: Run
    ours: list[Place] = field(default_factory=list)
    torchs: list[Place] = field(default_factory=list)
    count: int = 0
    _open: list[socket.socket] = field(default_factory=list)
    _doors: dict[Place, bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lasting = self.run.guards()
        self.look(1.0)

    def look(self, within_s: float = 0.2) -> None:
        """Find out where somebody listens by now: workers come and go, and have other ports then.  A door answers
        ``within_s``, torch's never, and Gloo, which lets nobody in, is left out.
        """
        found: list[Place] = []
        for pid in (*self._lasting, *self.run.pids().values()):
            with suppress(psutil.NoSuchProcess):
                found += listeners(pid)
        self._doors = {place: self._doors[place] for place in found if place in self._doors}
        new = {*found} - self._doors.keys()
        self._doors |= dict.fromkeys(new)
        self._ask(new, within_s)
        self.ours, self.torchs = (
            [place for place, door in self._doors.items() if door is its] for its in (True, False)
        )

    def _ask(self, places: Collection[Place], within_s: float) -> None:
        asked: dict[socket.socket, Place] = {}
        for place in letting_in(places, within_s):
            with suppress(ConnectionError):  # it has just gone
                stranger = socket.create_connection(place, PATIENCE_S)
                stranger.sendall(MAGIC + bytes(NONCE))
                asked[stranger] = place
        waiting, until = set(asked), time.monotonic() + within_s
        while waiting and (left_s := until - time.monotonic()) > 0:
            waiting -= set(select.select(waiting, (), (), left_s)[0])
        for stranger, place in asked.items():
            self._doors[place] = stranger not in waiting
            stranger.close()

    def __call__(self, attack: Attack) -> None:
        of_torchs = attack.place % OF_TORCHS == 0 and bool(self.torchs)
        places = self.torchs if of_torchs else self.ours
        place = places[attack.place // OF_TORCHS % len(places)]
        try:
            self._carry_out(attack, *place, of_torchs)
            self.count += 1
        except ConnectionRefusedError:
            self.look()
            assert place not in (*self.ours, *self.torchs), "who listens there lets nobody in"

    def _carry_out(self, attack: Attack, host: str, port: int, of_torchs: bool) -> None:
        if attack.way == "datagram":
            with socket.socket(type=socket.SOCK_DGRAM) as stranger:
                stranger.sendto(attack.said, (host, self.run.port))
        elif attack.way == "close" and not of_torchs:
            assert len(told(port, attack.said, host)) in (0, ANSWER)  # it is told no more than a nonce and a proof
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
        while len(self._open) > but:
            self._open.pop(0).close()


def test_no_bytes_from_strangers_change_anything(launch, tmp_path, seconds, pytestconfig):
    steps, rounds = STEPS_PER_S * seconds, range(EACH_S, seconds + EACH_S, EACH_S)
    holds = [held(tmp_path, min(STEPS_PER_S * until_s, steps), str(until_s)) for until_s in rounds]
    run = launch(
        "recycle.progress_timeout_s=100", f"steps={steps}", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(holds)
    )
    after_step(run, WARM)
    attacker = Attacker(run)
    attack, grown = Fuzz(attacker, pytestconfig), Growth(run)
    started = time.monotonic()
    for until_s in rounds:
        while time.monotonic() < started + until_s:
            attack()
        if until_s == rounds[-1]:
            attacker.close()
            grown.look()
        (tmp_path / str(until_s)).touch()
    result = run.finish(200 + 2 * seconds)
    print(f"{steps} steps, {attacker.count} attacks; memory grew by {grown.kib} KiB")
    alone = launch(f"steps={steps}").finish(200 + 2 * seconds)
    assert result.losses == alone.losses and len(result.losses) == steps
    assert_same_training(result, alone)
    assert "Traceback" not in result.output and "never retrieved" not in result.output, result.output[-6000:]
    kinds = {event["event"] for event in result.events}
    assert not kinds & {"late", "suspected", "leaving", "terminate", "operator", "spare", "error"}, kinds
    assert max(grown.kib) < GROWTH_KIB, grown.kib
    assert {event["text"].partition(" a caller at ")[0] for event in result.of("stranger")} == doors_of(run)


def test_nor_while_a_stage_is_replayed_and_its_workers_come_back(launch, tmp_path, seconds, pytestconfig):
    """Each cycle loses both workers of stage 1: one of them replays it from the logs, which only supervisors see, and
    serves the state to the other.
    """
    cycles = 1 + seconds // CYCLE_S
    steps, logged = f"steps={cycles * CYCLE}", ("++recycle.log={}", "++recycle.checkpoint.overhead=0.02")
    holds = [held(tmp_path, CYCLE * at + step, f"{step}.{at}") for at in range(cycles) for step in (AWAY, CYCLE)]
    wraps = {"RECYCLE_TEST_WRAP": json.dumps([*holds, {"name": "log_apart", "by": "rank"}])}
    settings = "recycle.progress_timeout_s=100", "recycle.rejoin=always", EXACT, steps, *logged
    run = launch(*settings, script=WRAPPED, **wraps)
    attacker = None
    for at in range(cycles):
        until = time.monotonic() + (seconds - OWN_S) / cycles
        after_step(run, CYCLE * at + WARM)
        if attacker is None:
            attacker = Attacker(run)
            attack, grown = Fuzz(attacker, pytestconfig), Growth(run, LAST_STAGE)
        for rank in LAST_STAGE:
            os.kill(run.pids()[rank], signal.SIGKILL)
        attack_until(attack, run, lambda: run.of("newcomer")[2 * at + 1 :], "both newcomers")
        (tmp_path / f"{AWAY}.{at}").touch()
        back = attack_until(attack, run, lambda: run.of("rejoined")[2 * at + 1 :], "return of both")
        attack_until(attack, run, lambda: time.monotonic() > until and back, "end of the cycle", 2 * seconds)
        if at == cycles - 1:
            attacker.close()
            grown.look()
        (tmp_path / f"{CYCLE}.{at}").touch()
    result = run.finish(200 + 2 * seconds)
    print(f"{cycles} replays and returns, {attacker.count} attacks; memory grew by {grown.kib} KiB")
    found = difference(result, launch(EXACT, steps).finish(200 + 2 * seconds))
    assert result.code == 0 and found.none, (found, result.output[-6000:])
    assert (len(result.of("replayed")), len(result.of("rejoined"))) == (cycles, 2 * cycles), result.output[-6000:]
    assert "Traceback" not in result.output and "never retrieved" not in result.output, result.output[-6000:]
    assert max(grown.kib) < GROWTH_KIB, grown.kib
    doors = {event["text"].partition(" a caller at ")[0] for event in result.of("stranger")}
    logs = {f"at the logs in {folder}" for folder in result.folder.glob("log-of-*")}
    states = {door for door in doors if door.endswith(", for the stage's state,")}
    assert len(logs) == 4 and states and doors == logs | states | doors_of(run)


def attack_until(attack: Fuzz, run: Run, found: Callable[[], object], what: str, within_s: float = 0) -> object:
    """Attack until ``found()``, which is returned; look now and then at who listens, which takes as long as hundreds of
    attacks.
    """
    looked = 0.0

    def attacked() -> object:
        nonlocal looked
        if time.monotonic() > looked + LOOK_S:
            attack.attacker.look()
            looked = time.monotonic()
        attack()
        return found()

    return run.wait_for(attacked, what, PATIENCE_S * 5 + within_s)


class Fuzz:
    """Carries out EXAMPLES attacks each time that it is called, others each time; one that fails is done again to be
    shown, and not made smaller.
    """

    def __init__(self, attacker: Attacker, config: pytest.Config) -> None:
        self._seed, self.attacker = config.getoption("--kill-seed") << 20, attacker

        @hypothesis.settings(
            max_examples=EXAMPLES,
            phases=[Phase.generate],
            suppress_health_check=HealthCheck,
        )
        @given(attacks(SecretFile.at(attacker.run.port).read()))
        def made_up(each: Attack) -> None:
            attacker(each)

        self._made_up = made_up

    def __call__(self) -> None:
        self._seed += 1
        hypothesis.seed(self._seed)(self._made_up)()


class Growth:
    """Of the memory of all processes of ``run`` but the workers of some ranks, in KiB, from now until a look."""

    def __init__(self, run: Run, spared: Collection[int] = ()) -> None:
        self._run, self.kib = run, [0]
        pids = (run.pids()[rank] for rank in run.pids() if rank not in spared)
        self._processes = [psutil.Process(pid) for pid in (run.coordinator_pid(), *pids)]
        self._before, self._descriptors = self._memory(), self._processes[0].num_fds()

    def _memory(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def look(self) -> None:
        """Find out how much it is, once the coordinator has done with who has gone."""
        self._run.wait_for(
            lambda: self._processes[0].num_fds() <= self._descriptors, "end of the strangers' connections", PATIENCE_S
        )
        self.kib = [now - before >> 10 for now, before in zip(self._memory(), self._before)]


def doors_of(run: Run) -> set[str]:
    return {"at the coordinator", *(f"at worker {rank}" for rank in run.pids())}
