"""Somebody on the network who does not know a job's secret, and everything that the job's own words could be used for.

The frames are those of a process of the job, said to the ports at which it listens, while it trains.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from recycle_plugin.authentication.secret import SecretFile
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_workers import SupervisorHeartbeat
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.runtime.movers.wire import LANGUAGE, Header, Sender
from tests.support.cluster import Run
from tests.support.jobs import STEPS, WRAPPED, after_step, assert_same_training, hold
from tests.support.strangers import CONTROL, WORKER, Place, forged, letting_in, listeners, told

JUNK = 300 << 20  # bytes
CONNECTIONS = 100


def gloos(run: Run) -> set[Place]:
    """The places where a job's workers listen and let no stranger in."""
    places = {place for pid in run.pids().values() for place in listeners(pid)}
    return places.difference(letting_in(places))


def junk() -> bytes:
    """A large tensor for a step that is far away."""
    datum = Datum("act", 0, MicroBatch(0, 0), 1 << 20)
    head = LANGUAGE.encode(Header(datum, 0, (("uint8", (JUNK,)),)))
    return LANGUAGE.encode(Sender("tcp://10.0.0.1:1")) + head + bytes(JUNK)


def held_bytes(run: Run) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in run.pids().values())


@pytest.fixture
def attacked(launch, reference, tmp_path) -> Callable[[Callable[[Run], None]], Run]:
    """Lets a job that trains meet an attack; it has to train what it trains alone, to the bit."""

    def meet(attack: Callable[[Run], None]) -> Run:
        run = launch("recycle.progress_timeout_s=100", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(hold(tmp_path)))
        after_step(run, 2)
        attack(run)
        (tmp_path / "go").touch()
        result = run.finish()
        assert_same_training(result, reference())
        assert result.losses == reference().losses
        assert "Traceback" not in result.output and "never retrieved" not in result.output, result.output[-6000:]
        kinds = {event["event"] for event in result.events}
        assert not kinds & {"late", "suspected", "leaving", "terminate", "operator", "spare", "error"}, kinds
        return run

    return meet


@pytest.mark.plain_too(deepspeed=False)
def test_nobody_at_the_coordinators_port_is_believed(attacked):
    def attack(run: Run) -> None:
        for said in CONTROL.values():
            assert told(run.port, said) == b""
        with socket.socket(type=socket.SOCK_DGRAM) as stranger:
            for rank in range(4):
                beat = encode(SupervisorHeartbeat(rank, True, 0.0))
                for said in (beat, bytes(16) + beat + bytes(16)):
                    stranger.sendto(said, ("127.0.0.1", run.port))

    run = attacked(attack)
    (told_of,) = run.of("stranger")
    assert told_of["text"].startswith("at the coordinator a caller at 127.0.0.1:")
    assert told_of["address"] == "127.0.0.1"


@pytest.mark.plain_too(deepspeed=False)
def test_no_strangers_tensor_is_trained_on_or_kept(attacked):
    """Neither one of the next step nor one of a step that is far away; all that listens in a worker is tried."""

    def attack(run: Run) -> None:
        before = held_bytes(run)
        ports = letting_in(place for pid in run.pids().values() for place in listeners(pid))
        assert len(ports) == 4
        for host, port in ports:
            for step in (STEPS - 2, STEPS - 1, STEPS):
                told(port, forged(step), host)
        for host, port in ports:
            told(port, junk(), host)
        assert held_bytes(run) - before < JUNK / 10

    run = attacked(attack)
    told_of = [event["text"] for event in run.of("stranger")]
    assert {text.partition(" a caller at ")[0] for text in told_of} == {f"at worker {rank}" for rank in range(4)}


@pytest.mark.plain_too(deepspeed=False)
def test_gloo_lets_nobody_in_once_its_members_are_connected(attacked):
    """It would keep the descriptor of whoever has come, and end its worker where none is left."""

    def attack(run: Run) -> None:
        workers = [psutil.Process(pid) for pid in run.pids().values()]
        before, closed = [worker.num_fds() for worker in workers], gloos(run)
        assert len(closed) >= len(workers)
        for _ in range(CONNECTIONS):
            letting_in(closed, 0.0)
        more = [worker.num_fds() - had for worker, had in zip(workers, before)]
        assert max(more) < CONNECTIONS // 10, more  # what it trains with opens and closes some

    attacked(attack)


@pytest.mark.plain_too(deepspeed=False)
def test_the_secret_is_in_files_of_its_users_and_nowhere_else(attacked, tmp_path):
    found: dict[str, str] = {}

    def attack(run: Run) -> None:
        file = SecretFile.at(run.port)
        found["secret"], found["path"] = file.path.read_text(), str(file.path)
        assert file.path.stat().st_mode & 0o777 == 0o600 and file.path.parent.stat().st_mode & 0o777 == 0o700
        own = run.folder / "operator.json"
        assert found["secret"] in own.read_text() and own.stat().st_mode & 0o777 == 0o600
        told(run.port, encode(WORKER))
        processes = [*map(psutil.Process, (*run.guards(), *run.forked()))]
        assert len(processes) >= 6
        for process in processes:
            for what in ("cmdline", "environ"):
                assert found["secret"].encode() not in Path(f"/proc/{process.pid}/{what}").read_bytes()
        for pid in (*run.pids().values(), run.coordinator_pid()):
            assert {host for host, _ in listeners(pid)} == {"127.0.0.1"}

    run = attacked(attack)
    assert not Path(found["path"]).exists() and not (run.folder / "operator.json").exists()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert any(path.name == "events.jsonl" for path in files)
    for path in files:
        assert found["secret"].encode() not in path.read_bytes(), path
