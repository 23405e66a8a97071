"""Logs that are on each host's own disk: a stage is replayed from what supervisors serve, and a host that is lost takes
its logs with it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster import Result
from tests.support.hosts import HostsRun
from tests.support.jobs import PLAIN, WRAPPED, Shape, difference, faults
from tests.support.launching import Launch, launching

LOG = ("++recycle.log={}", "++recycle.checkpoint.overhead=0.02", "recycle.rejoin=always")
EXACT = (*LOG, "recycle.exact=1")
LINE = Shape(1, 4, 4)
plain = pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)


def apart(by: str, *more: dict) -> dict:
    return {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps([{"name": "log_apart", "by": by}, *more])}


def folders_of(result: Result) -> list[Path]:
    return sorted(result.folder.glob("log-of-*"))


def assert_replayed(result: Result, calm: Result, times: int) -> None:
    """To the bit; and no copy of a log is left."""
    assert result.code == 0, result.output[-8000:]
    assert len(result.of("replayed")) == times, result.output[-8000:]
    assert difference(result, calm).none
    assert not [path for folder in folders_of(result) for path in folder.glob("*.mirror")]


@plain
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(("kill 0.1 before 1F0.2@8",), id="one"),
        pytest.param(("kill 0.1 before 1F0.2@8", "kill 0.2 before 2F0.2@8"), id="two beside each other"),
        pytest.param(("kill 0.1 before 1F0.0@6", "kill 0.2 before 2F0.0@9"), id="one after the other"),
    ],
)
def test_a_stage_is_replayed_from_folders_that_only_supervisors_see(launch: Launch, reference, kills):
    """Those who help have the logs from there too."""
    result = launch(*EXACT, faults(*kills), shape=LINE, **apart("rank")).finish()
    assert_replayed(result, reference(*EXACT, shape=LINE), len(kills))
    assert len(folders_of(result)) == 4
    if len(kills) == 1:
        (said,) = result.of("helpers")
        assert said["helpers"] == 3 and not said["left"], said


@pytest.fixture
def on_two(plain_server, tmp_path, pair):
    with launching(plain_server, tmp_path, partial(HostsRun, pair), PLAIN) as launch:
        yield launch


@plain
def test_hosts_with_disks_of_their_own(on_two, reference):
    """Alpha has the stages 0 and 1, beta 2 and 3."""
    run = on_two(*EXACT, faults("kill 0.2 before 2F0.2@8"), shape=LINE, **apart("host"))
    result = run.finish()
    assert run.others["beta"].wait(60) == 0
    assert_replayed(result, reference(*EXACT, shape=LINE), 1)
    assert [path.name for path in folders_of(result)] == ["log-of-alpha", "log-of-beta"]
    assert not result.of("log_gone")


def gate(folder: Path, step: int) -> dict:
    """Nobody comes to ``step`` before there is the file ``folder``/go<step>."""
    return {"name": "gate", "folder": str(folder), "before": f"0F0.0@{step}", "until": "", "by": [f"go{step}"]}


@pytest.fixture
def replica_each(server, tmp_path, pair):
    """Jobs of DeepSpeed's, of which each host has a replica."""
    with launching(server, tmp_path, partial(HostsRun, pair)) as launch:
        yield launch


@pytest.mark.parametrize("by", ("host", "nobody"))
def test_a_host_that_is_lost_whole_takes_its_logs_along(replica_each, reference, pair, tmp_path, by):
    """Its own, and then an event says so, until the checkpoint that comes at once; behind that a stage is replayed
    again.  What all hosts share stays, and nothing is said.

    Its workers are known to be dead before: else those left would be too few for a further loss.
    """
    changes = {"name": "a_replica_a_host"}, gate(tmp_path, 9), gate(tmp_path, 18)
    kills = faults("kill 1.0 before 0F1.0@7", "kill 1.1 before 1F1.0@7", "kill 0.1 before 1F0.0@19")
    run = replica_each(*EXACT, "recycle.heartbeat_timeout_s=3", kills, **apart(by, *changes))
    run.hear("restart", 2)
    pair.crash("beta")
    if by == "host":
        run.hear("log_gone")
    before = len(run.of("checkpoint"))
    (tmp_path / "go9").touch()
    run.hear("checkpoint", before + 1)
    (tmp_path / "go18").touch()
    result = run.finish()
    run.others["beta"].wait(60)
    assert_replayed(result, reference(*EXACT), 1)
    said = [(each["ranks"], each["hosts"], each["stages"]) for each in result.of("log_gone")]
    assert said == [([2, 3], ["beta"], [0, 1])] * (by == "host")
    assert int(result.of("checkpoint")[before]["path"].rpartition("step")[2]) <= 12
