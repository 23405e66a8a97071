"""Signals that are the script's, SIGUSR1 before SLURM's time limit for instance: each reaches it once, whichever of a
job's processes it was sent to.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

import psutil
import pytest

from tests.support.cluster import Run
from tests.support.jobs import assert_one_line

SCRIPT = "tests/jobs/signalled.py"
GROUP = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM, signal.SIGQUIT, signal.SIGRTMIN]
ALONE, SUPERVISOR, LAST = signal.SIGPROF, signal.SIGVTALRM, signal.SIGRTMAX


@pytest.fixture
def start(plain_server, tmp_path):
    """``start(launcher, *handled)``: a job of two workers whose script handles those signals, as a user starts it; each
    process that is started has a session of its own.  It trains until there is the file ``go``.  ``compiles``: the
    rank that has begun to compile its model, in place of all that train.
    """
    runs = []

    def start(launcher: str, *handled: int, compiles: str = "") -> Run:
        program, more = [str(tmp_path), *(str(int(number)) for number in handled)], {"RECYCLE_TEST_COMPILES": compiles}
        runs.append(Run(plain_server, tmp_path, 2, SCRIPT, program, launcher=launcher, cold=not compiles, **more))
        begun = ["compiles"] if compiles else [f"trains{rank}" for rank in range(2)]
        runs[0].wait_for(lambda: all((tmp_path / name).exists() for name in begun), " and ".join(begun))
        return runs[0]

    yield start
    left = [thing for run in runs for thing in run.clean()]
    assert not left, left


def come(run: Run, rank: int) -> Counter[int]:
    return Counter(map(int, (run.folder / f"signals{rank}.txt").read_text().split()))


def wait_for(run: Run, rank: int, number: int) -> None:
    run.wait_for(lambda: come(run, rank)[number], f"signal {number} at rank {rank}")


def finish(run: Run):
    (run.folder / "go").touch()
    return run.finish()


def test_a_signal_to_a_task_of_slurms_reaches_its_script_once(start):
    """To its process group, to the task alone, and to its supervisor alone.  What were passed on twice would come
    before the last one, which is passed on after it.
    """
    run = start("tasks", *GROUP, ALONE, SUPERVISOR, LAST)
    task = run.launcher.tasks[1].pid
    (supervisor,) = [child for child in psutil.Process(task).children() if child.name() == "recycle-super"]
    for number in GROUP:
        os.killpg(task, number)
    os.kill(task, ALONE)
    supervisor.send_signal(SUPERVISOR)
    for number in (ALONE, SUPERVISOR):
        wait_for(run, 1, number)
    os.kill(task, LAST)
    wait_for(run, 1, LAST)
    result = finish(run)
    assert result.code == 0 and not result.of("lost"), result.output[-6000:]
    assert come(run, 1) == Counter([*GROUP, ALONE, SUPERVISOR, LAST]) and not come(run, 0)


@pytest.mark.parametrize("launcher", ("plain", "--no-fork"))
def test_a_signal_to_the_launcher_for_one_host_reaches_all_scripts_once(start, launcher):
    run = start(launcher, *GROUP, ALONE, LAST)
    for number in GROUP:
        os.killpg(run.launcher.pid, number)
    for number in (ALONE, LAST):
        os.kill(run.launcher.pid, number)
        for rank in range(2):
            wait_for(run, rank, number)
    result = finish(run)
    assert result.code == 0 and not result.of("lost"), result.output[-6000:]
    assert come(run, 0) == come(run, 1) == Counter([*GROUP, ALONE, LAST])


def test_a_script_that_handles_no_such_signal_is_killed_by_it_and_nobody_else_is(start):
    """As stock's; that is a loss as any other."""
    run = start("tasks")
    task = run.launcher.tasks[1]
    os.kill(task.pid, signal.SIGUSR1)
    run.hear("restart")
    result = finish(run)
    assert result.code == 0, result.output[-6000:]
    (again,) = result.of("restart")  # its supervisor's word may come before its connection breaks, or confirm that
    assert again["rank"] == 1 and "its process was killed by signal 10 (SIGUSR1)" in again["text"], result.output[
        -6000:
    ]


def test_where_the_group_of_the_launcher_gets_one_without_a_handler_the_job_ends_and_says_why(start):
    run = start("plain")
    os.killpg(run.launcher.pid, signal.SIGUSR2)
    assert_one_line(run.finish(), "end: the job ends: stage 0 has no live worker left")
    assert "its process was killed by signal 12 (SIGUSR2)" in run.output


def test_a_notice_in_a_compilation_is_a_planned_leave(start):
    """Signals before it are the script's, at once; the worker leaves at the step's commit, and the other goes on."""
    run = start("plain", signal.SIGUSR1, signal.SIGUSR2, compiles="1")
    worker = run.pids()[1]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(worker, number)
        wait_for(run, 1, number)
    os.kill(worker, signal.SIGTERM)
    (leaving,) = run.hear("leaving")
    assert leaving["rank"] == 1 and not run.of("committed")
    (run.folder / "compiled").touch()
    run.hear("left")
    run.wait_for(lambda: len(run.of("committed")) > 5, "steps without it")
    result = finish(run)
    assert result.code == 0 and not result.of("lost") and not result.of("error"), result.output[-6000:]
    assert come(run, 1) == Counter([signal.SIGUSR1, signal.SIGUSR2])
    steps = [event["step"] for event in result.of("committed")]
    assert steps == [*range(1, len(steps) + 1)], "none is lost, and none is made twice"
