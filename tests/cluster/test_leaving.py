"""How workers and jobs end: by themselves, by SIGTERM, and when nobody can go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from recycle_plugin.authentication.secret import AT, SecretFile
from recycle_plugin.lab.runs import MARK, environment
from recycle_plugin.observability.trace import read_traces
from tests.support.cluster import ROOT
from tests.support.jobs import (
    LOSS_TOLERANCE,
    STEPS,
    WRAPPED,
    Shape,
    after_step,
    assert_one_line,
    assert_same_training,
    faults,
    held,
    in_halves,
)

PAIR = Shape(stages=1)


@pytest.mark.plain_too(deepspeed=False)
def test_ends_at_different_times_are_no_deaths(launch, reference):
    wrap = json.dumps({"name": "uneven_end", "apart_s": 0.1, "steps": STEPS})
    result = launch(script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_same_training(result, reference())
    assert len(result.of("left")) == 4 and len(result.of("resume")) == len(result.of("finished")) == 1


@pytest.mark.plain_too
@pytest.mark.parametrize("seat", ("0.0", "1.1"))
def test_sigterm_at_a_worker_is_a_planned_leave(launch, reference, tmp_path, seat):
    """No step is undone, and nothing is run twice."""
    wrap = json.dumps(held(tmp_path / "gate", STEPS - 1, "leaves"))
    run = launch("recycle.trace=true", script=WRAPPED, RECYCLE_TEST_WRAP=wrap)
    after_step(run, 4)
    os.kill(run.pid_of(seat), signal.SIGTERM)
    run.hear("leaving")
    (tmp_path / "gate" / "leaves").touch()
    result = run.finish()
    assert_same_training(result, reference(), left={seat})
    assert [event["ahead"] for event in result.of("resume")] == [0, 0] and not result.of("recovery_plan")
    computed = in_halves(read_traces(result.folder / "trace"))
    assert len(computed) == len(set(computed)) == STEPS * 4 * 2 * 3  # steps, micro-batches, stages, F I W


def assert_ended_together(result) -> None:
    """Everybody left after the same commit, and nobody was lost."""
    assert not result.of("lost") and len(result.of("finished")) == 1, result.output[-6000:]
    (step,) = {event["text"].split("after step ")[1].split()[0] for event in result.of("left")}
    assert len(result.of("left")) == len(result.pids) and int(step) == result.of("committed")[-1]["step"]


def assert_same_losses(result, reference) -> None:
    said = {event["step"]: event["loss"] for event in result.of("loss")}
    for step, loss in enumerate(reference.losses, 1):
        assert step not in said or said[step] == pytest.approx(loss, abs=LOSS_TOLERANCE)


@pytest.mark.plain_too(deepspeed=False)
def test_a_second_process_of_a_rank_hears_at_once_that_it_cannot_take_part(launch, reference, vehicle, tmp_path):
    """Started by hand beside the job, as the supervisor starts it: the job, which waits until that has imported what it
    needs, does not notice.
    """
    wrap = json.dumps(held(tmp_path / "gate", 5, "heard"))
    run = launch("steps=100000", "recycle.progress_timeout_s=100", script=WRAPPED, RECYCLE_TEST_WRAP=wrap)
    after_step(run, 2)
    known = {MARK: run.mark, AT: str(SecretFile.at(run.port).path)}
    variables = environment(**known, RECYCLE_COORDINATOR=f"127.0.0.1:{run.port}", RANK="2")
    command = [sys.executable, "-m", "recycle_plugin.worker_process", str(ROOT / vehicle.script)]
    second = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
    assert second.returncode == 1 and "Traceback" not in second.stderr
    assert re.search(
        r"^recycle: error: the job has started, and is at step \d+; to take a lost worker's seat, start with --join$",
        second.stderr,
        re.MULTILINE,
    ), second.stderr
    (tmp_path / "gate" / "heard").touch()
    after_step(run, 7)
    os.kill(run.launcher.pid, signal.SIGTERM)
    result = run.finish()
    assert_ended_together(result)
    assert_same_losses(result, reference())
    (late,) = result.of("late")
    assert (late["rank"], late["incarnation"]) == (2, 1) and len(result.of("worker")) == 4


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.real_launcher
@pytest.mark.parametrize("rank", (0, 3))
def test_sigterm_at_a_supervisor_ends_the_job(launch, reference, rank):
    """At rank 3 in a job that makes checkpoints by itself, by number: it makes a last one."""
    own = ("recycle.checkpoint={every: 3}",) if rank else ()
    run = launch("steps=100000", *own)
    after_step(run, 4)
    run.wait_for(lambda: len(run.of("checkpoint")) >= 2 * len(own), "two checkpoints")
    (supervisor,) = [p for p in psutil.Process(run.launcher.pid).children() if f"--local_rank={rank}" in p.cmdline()]
    supervisor.terminate()
    result = run.finish()
    assert result.code == 0
    made, last = [Path(each["path"]).name for each in result.of("checkpoint")], result.of("committed")[-1]["step"]
    assert bool(made) == bool(own)
    if made:
        assert made[0] == "automatic_step3" and all(int(name[14:]) % 3 == 0 for name in made[:-1])
        assert made[-1] == f"global_step{last}"
    assert_ended_together(result)
    assert_same_losses(result, reference())


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.real_launcher
def test_sigterm_at_the_launcher_ends_the_job(launch, reference):
    """Workers are not forked, as a user's: they are the launcher's own descendants, and get the launcher's SIGTERM
    too.
    """
    run = launch("steps=100000", shape=PAIR, RECYCLE_FORK_SERVER="")
    after_step(run, 4)
    launcher = psutil.Process(run.launcher.pid)
    assert set(run.pids().values()) < {process.pid for process in launcher.children(recursive=True)}
    launcher.terminate()
    result = run.finish()
    assert len(result.pids) == PAIR.ranks
    assert_ended_together(result)
    assert_same_losses(result, reference(shape=PAIR))


@pytest.mark.plain_too(deepspeed=False)
def test_a_stage_without_a_worker_ends_the_job(launch):
    result = launch(faults("kill 0.0 before 0F0.0@4", "kill 1.0 before 0F1.0@7")).finish()
    assert_one_line(result, "the job ends: stage 0 has no live worker left. No checkpoint was saved")


def test_the_end_names_the_last_checkpoint(launch, tmp_path):
    job = json.dumps({"folder": str(tmp_path / "saved"), "save_at": [5]})
    run = launch(
        faults("kill 0.1 before 1I0.0@4", "kill 1.1 after 1F1.0@8"),
        script="tests/jobs/checkpoint.py",
        RECYCLE_TEST_CHECKPOINT=job,
    )
    assert_one_line(
        run.finish(),
        f"the job ends: stage 1 has no live worker left. Last checkpoint: {tmp_path / 'saved' / 'global_step5'}",
    )
