"""What a launcher has started for a rank holds the place only: who dies beside it, or with it, and what that costs."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from recycle_plugin.cli import main
from tests.support.cluster import Run
from tests.support.jobs import PLAIN, STEPS, after_step, assert_one_line, assert_same_training, hold
from tests.support.launching import launching

pytestmark = pytest.mark.plain_too(deepspeed=False)


@pytest.fixture
def start(plain_server, tmp_path):
    """Jobs whose ranks are started as srun does it, with --no-kill."""
    with launching(plain_server, tmp_path, partial(Run, launcher="tasks"), PLAIN) as launch:
        yield launch


def held(folder: Path) -> dict[str, str]:
    """For a job that does not end before there is the file ``folder``/go."""
    return {"RECYCLE_TEST_WRAP": json.dumps(hold(folder))}


def of_guard(guard: int, name: str) -> list[psutil.Process]:
    return [child for child in psutil.Process(guard).children() if child.name() == name]


def kill_supervisor(run: Run, guard: int) -> None:
    (supervisor,) = of_guard(guard, "recycle-super")
    supervisor.kill()
    run.wait_for(
        lambda: [
            each for each in of_guard(guard, "recycle-super") if each.pid != supervisor.pid and each.net_connections()
        ],
        "another supervisor",
        20,
    )


def status(run: Run, capsys: pytest.CaptureFixture) -> dict:
    capsys.readouterr()
    assert main(["status", str(run.folder), "--json"]) != 2
    return json.loads(capsys.readouterr().out)


def test_workers_do_not_notice_that_their_supervisors_are_killed(start, reference, tmp_path):
    """Rank 0's too.  The next one knows how its worker ended."""
    run = start(**held(tmp_path))
    after_step(run, 4)
    for rank in (3, 0, 3):
        kill_supervisor(run, run.launcher.tasks[rank].pid)
    assert not run.of("lost")
    os.kill(run.pids()[3], signal.SIGKILL)
    run.hear("confirmed")
    (tmp_path / "go").touch()
    result = run.finish()
    assert_same_training(result, reference(), {result.seat_of(3)})
    told = re.findall(
        r"recycle: warning: the supervisor of rank (\d) was killed by signal 9: another one goes on with its worker",
        result.output,
    )
    assert sorted(told) == ["0", "3", "3"], result.output[-6000:]
    assert [(event["rank"], event["code"]) for event in result.of("confirmed")] == [(3, -9)]


def test_a_guard_that_is_killed_costs_one_worker(start, reference, tmp_path, capsys):
    """Of rank 0: the coordinator is in another process."""
    run = start(**held(tmp_path))
    after_step(run, 4)
    guard = run.launcher.tasks[0].pid
    os.kill(guard, signal.SIGKILL)
    run.hear("lost")
    (tmp_path / "go").touch()
    result = run.finish()
    assert result.code == 128 + signal.SIGKILL
    assert_same_training(replace(result, code=0), reference(), {"0.0"})
    known = status(run, capsys)
    (gone,) = known["gone"]
    assert known["state"] == "finished" and gone["seat"] == "0.0"
    assert f"went with its guard, process {guard}, which was killed" in gone["why"]


@pytest.mark.real_launcher
def test_where_the_launcher_ends_the_job_for_a_killed_guard_there_is_a_checkpoint(launch, tmp_path, capsys):
    """DeepSpeed's sends SIGTERM to all others: with its supervisors' word on the guard the job ends as one to go on
    from.
    """
    run = launch("steps=100000", f"recycle.checkpoint_dir={tmp_path / 'saved'}")
    after_step(run, 4)
    (guard,) = [
        process for process in psutil.Process(run.launcher.pid).children() if "--local_rank=1" in process.cmdline()
    ]
    guard.kill()
    result = run.finish()
    assert result.code != 0 and {event["rank"] for event in result.of("lost")} == {1}, result.output[-6000:]
    (checkpoint,), known = result.of("checkpoint"), status(run, capsys)
    step = result.of("committed")[-1]["step"]
    assert checkpoint["path"] == known["checkpoint"] == str(tmp_path / "saved" / f"global_step{step}")
    assert re.match(
        rf"the job has ended after step {step}: the supervisor of .* got SIGTERM.*, after the guard of rank 1, process "
        rf"{guard.pid}, was killed",
        known["end"],
    )


def in_step(run: Run, number: int = 1) -> tuple[psutil.Process, psutil.Process]:
    """The coordinator's process, and the ``number``-th that stands by, once it does."""
    run.hear("standby", number)
    guard = run.launcher.tasks[0].pid
    (host,), (other,) = of_guard(guard, "recycle-host"), of_guard(guard, "recycle-standby")
    return host, other


def test_the_coordinators_process_may_be_killed_and_the_next_one_too(start, reference, tmp_path, capsys):
    """Nobody in the job is lost, nor does a step begin anew; and what comes after, a worker's death, is dealt with."""
    run = start(**held(tmp_path))
    after_step(run, 4)
    for number in (1, 2):
        host, other = in_step(run, number)
        host.kill()
        assert run.hear("coordinator", number)[-1]["coordinator"]["pid"] == other.pid
    after_step(run, STEPS - 3)  # all wait for the next one
    os.kill(run.pids()[3], signal.SIGKILL)
    run.hear("lost")
    (tmp_path / "go").touch()
    result = run.finish()
    assert_same_training(result, reference(), {result.seat_of(3)})
    assert status(run, capsys)["state"] == "finished"


def test_where_nobody_stands_by_the_coordinators_death_is_told_by_its_guard(start, capsys):
    run = start("steps=100000")
    after_step(run, 4)
    for host in reversed(in_step(run)):
        host.kill()
    result = run.finish()
    said = "the job ends: the coordinator's process was killed by signal 9; the job can't go on without it"
    assert_one_line(result, f"recycle: {said}")
    assert status(run, capsys)["end"] == said
