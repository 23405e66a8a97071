"""What people read of a job that ends otherwise than they meant: what was wrong, whose it was, who sent which
signal.
"""

from __future__ import annotations

import os
import signal

import pytest

from recycle_plugin.cli import main
from recycle_plugin.lab.runs import await_reports, processes_with
from recycle_plugin.runtime.system.host import host_name
from tests.support.jobs import LOG, PLAIN, after_step
from tests.support.waiting import until

SCRIPT = PLAIN.script


@pytest.fixture
def vehicle():
    return PLAIN


def line_of(text: str) -> int:
    (number,) = (number for number, line in enumerate(open(SCRIPT), 1) if text in line)
    return number


def test_an_error_in_all_scripts_is_shown_once_and_is_the_jobs_cause(launch):
    """A layer that does not fit those before it."""
    result = launch("layer=shape").finish()
    error = (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x16 and 17x64) at "
        f"{SCRIPT}:{line_of('.append(pipeline.step())')}"
    )
    assert result.code == 1 and result.output.count("Traceback") == 1 and "its connection broke" not in result.output, (
        result.output[-6000:]
    )
    (told,) = result.of("error")
    assert told["text"] == f"the script of {named(result, told['rank'])} ended with {error}"
    assert told["traceback"].strip() in result.output
    assert result.of("end")[0]["text"] == (
        f"the job ends: the scripts of seat 0.1 (rank 2) and seat 1.1 (rank 3) ended with {error}, and so stage 1 has "
        "no live worker left. No checkpoint was saved"
    )


def named(result, rank: int) -> str:
    return f"seat {result.seat_of(rank)} (rank {rank})"


@pytest.mark.parametrize(
    "wrong, error",
    (("raise", f"ValueError: two … at {SCRIPT}:{line_of('raise ValueError')}"), ("exit", "exit code 5")),
    ids=("an exception", "an exit code"),
)
def test_an_error_in_one_script_is_the_loss_of_its_worker(launch, wrong, error):
    result = launch(f"wrong={wrong} 1.0 after 4").finish()
    (told,), (lost,) = result.of("error"), result.of("lost")
    assert told["text"] == f"the script of seat 1.0 (rank 1) ended with {error}"
    assert ("two\nlines" in result.output) == (wrong == "raise")
    assert lost["text"] == f"seat 1.0 (rank 1): its script ended with {error}. Stage 0 has one live worker left"
    assert len(result.losses) == 20


@pytest.mark.parametrize(
    "wrong, error", (("raise", "ValueError: two …"), ("exit", "exit code 5")), ids=("an exception", "an exit code")
)
def test_an_error_behind_the_last_step_is_the_jobs_end(launch, wrong, error):
    """Whichever script is through first."""
    result = launch(f"wrong={wrong} 1.0 after 20").finish()
    (finished,) = result.of("finished")
    assert finished["text"].startswith(
        f"the job has ended after step 20: the script of seat 1.0 (rank 1) ended with {error}"
    ) and result.code in (1, 5), result.output[-6000:]
    assert len(result.of("left")) == 3


@pytest.mark.parametrize("more", ((), LOG), ids=("", "with a log"))
def test_scripts_that_all_vanish_with_code_0_behind_the_last_step_have_done_the_job(launch, more):
    """As with stock; by os._exit."""
    result = launch("wrong=vanish after 20", *more).finish()
    assert result.code == 0 and not result.of("lost") and not result.of("end"), result.output[-6000:]
    (finished,) = result.of("finished")
    assert finished["text"] == "all workers have left after step 20" and len(result.of("left")) == 4


def test_a_script_that_vanishes_in_mid_job_is_a_loss(launch):
    result = launch("wrong=vanish 1.0 after 5").finish()
    (lost,) = result.of("lost")
    assert result.code == 0 and len(result.losses) == 20, result.output[-6000:]
    assert lost["text"].startswith("seat 1.0 (rank 1): its script has called os._exit(0), and others train on. Stage 0")


def test_an_error_before_training_is_the_jobs_cause(launch):
    result = launch("wrong=optimizer", "optimizer=adamw").finish()
    assert result.output.count("Traceback") == 1 and result.code == 1
    (line,) = (line for line in result.output.splitlines() if "the job ends" in line)
    assert "the job ends: the script of rank " in line and line.endswith(
        f"{SCRIPT}:{line_of('OPTIMIZERS[job.optimizer]')} before training started"
    ), line


def test_exit_does_not_wait_for_the_report_which_is_whole_or_not_there(launch, tmp_path):
    """The process that writes it is stopped at its first line, until the job has ended."""
    (tmp_path / "sitecustomize.py").write_text(STOPPED)
    run = launch("recycle.report=true", PYTHONPATH=str(tmp_path))
    assert run.finish().code == 0
    (writer,) = processes_with(run.mark, of="recycle_plugin.observability.report")
    assert not [path.name for path in run.folder.glob("*report*")]
    os.kill(writer.pid, signal.SIGTERM)  # the launcher's, for those that train
    (tmp_path / "go").touch()
    await_reports(run.mark)
    assert [path.name for path in run.folder.glob("*report*")] == ["report.html"]
    assert (run.folder / "report.html").read_text().endswith("</html>\n")


@pytest.mark.real_launcher
def test_a_job_whose_launcher_was_killed_goes_on_and_can_be_stopped(launch, capsys):
    """Under DeepSpeed's launcher, which starts supervisors that nobody's death ends; ``recycle status`` says how."""
    run = launch("steps=100000")
    after_step(run, 2)
    os.kill(run.launcher.pid, signal.SIGKILL)
    run.launcher.wait(30)
    assert main(["status", str(run.folder)]) == 0
    stop = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("to stop it")).split()
    before = run.of("committed")[-1]["step"]
    until(lambda: run.of("committed")[-1]["step"] > before + 5, "commit of the fifth step from then on", 100)
    os.kill(int(stop[stop.index("kill") + 1]), signal.SIGTERM)
    until(lambda: not processes_with(run.mark), "end of all processes", 100)
    (finished,), left = (run.of(kind) for kind in ("finished", "left"))
    sender = f"the supervisor of seat 0.0 (rank 0) on host {host_name()} got SIGTERM from process {os.getpid()} ("
    assert finished["text"].startswith(f"the job has ended after step {finished['step']}: {sender}") and len(left) == 4
    assert main(["status", str(run.folder)]) == 1 and sender in capsys.readouterr().out


STOPPED = """
import os, sys, time
if "recycle_plugin.observability.report" in sys.orig_argv:
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
        time.sleep(0.01)
"""
