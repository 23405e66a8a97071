"""What a script forks is not the worker: not its handlers, not its connections, not its end."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.support.cluster import Run

SCRIPT = "tests/jobs/forks.py"


@pytest.fixture
def run(plain_server, tmp_path):
    """``run(how)``: the result of tests/jobs/forks.py; at the end nothing of it may be left."""
    runs = []

    def run(how: str):
        runs.append(Run(plain_server, tmp_path, 4, SCRIPT, [how, str(tmp_path)], launcher="plain"))
        return runs[-1].finish()

    yield run
    assert not [thing for each in runs for thing in each.clean()]


FOUND = {
    "terminated": -signal.SIGTERM,
    "pool": [0, 1, 4, 9],
    "loader": 28.0,
    "exits": 0,
    "exits with 3": 3,
    "fails": 1,
    "trains on": 1,
    "is interrupted": 1,
    "meets": 1,
}


@pytest.mark.some_of(3)
@pytest.mark.parametrize("how", FOUND)
def test_helpers_do_what_they_do_anywhere_and_the_job_goes_on(run, how):
    result = run(how)
    assert result.code == 0 and not result.of("lost") and not result.of("leaving"), result.output[-6000:]
    assert {
        record["found"] if not isinstance(record["found"], list) else tuple(record["found"])
        for record in result.records.values()
    } == {FOUND[how] if not isinstance(FOUND[how], list) else tuple(FOUND[how])}
    assert len(result.records) == 4 and len(result.losses) == 12
    if how in ("trains on", "meets"):
        assert result.output.count("was forked from the worker of") >= 4, result.output[-6000:]


def test_the_end_of_one_workers_helper_is_no_leave(run):
    """Terminated as soon as it is there, when it has done nothing yet."""
    result = run("one terminated")
    assert result.code == 0 and not result.of("lost"), result.output[-6000:]
    assert result.records[1]["found"] == -signal.SIGTERM and len(result.losses) == 12
    assert not any("as planned" in event["text"] for event in result.of("left"))


def test_a_fork_has_no_connection_of_the_jobs(run):
    for record in run("sockets").records.values():
        of_the_fork, of_the_worker = record["found"]
        assert of_the_fork == [] and len(of_the_worker) > 4


def test_the_death_of_a_worker_whose_helper_lives_on_is_seen(run, tmp_path):
    result = run("outliving")
    helpers = [
        psutil.Process(int(path.read_text()))
        for path in tmp_path.glob("helper*")
        if psutil.pid_exists(int(path.read_text()))
    ]
    (tmp_path / "stop").touch()
    gone, alive = psutil.wait_procs(helpers, timeout=60)
    assert gone and not alive
    assert result.code == 0 and [event["seat"] for event in result.of("lost")] == ["1.1"], result.output[-6000:]
    assert len(result.losses) == 12
