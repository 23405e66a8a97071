"""``python -m recycle_plugin.launch --workers N script.py``: a job on one host, without DeepSpeed's launcher."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from recycle_plugin.cli import main
from recycle_plugin.lab.runs import processes_with
from tests.support.cluster import Run
from tests.support.jobs import TRAIN, after_step, assert_one_line, assert_same_training, early_folder, faults
from tests.support.launching import DEADLINE_S

SCRIPT = "tests/jobs/launched.py"
SERVER = "recycle_plugin.runtime.processes.fork_server"
# Of each process of a run, before anything else: nobody can import these, and who tries is found out although it may
# bear it.
SITE = """
import os, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        launcher = "recycle_plugin.launch" in sys.orig_argv
        if name.partition(".")[0] in {"deepspeed", "megatron"} or launcher and name == "torch":
            os.write(2, f"{sys.orig_argv} imports {name}\\n".encode())
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture
def start(plain_server, tmp_path):
    """``start(*then, …)`` runs SCRIPT on two workers; at the end nothing of it may be left."""
    runs = []

    def start(*then: str, options: Sequence[str] = (), **more: object) -> Run:
        program = [*options, SCRIPT, str(tmp_path), *then]
        runs.append(Run(plain_server, tmp_path, 2, program[0], program[1:], launcher="plain", **more))
        return runs[-1]

    yield start
    left = [thing for run in runs for thing in run.clean()]
    assert not left and not plain_server.forked(), left


def found(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def both(run: Run) -> list[dict]:
    return run.wait_for(lambda: len(records := found(run.folder)) == 2 and records, "record of both workers")


def forked_from(run: Run) -> list[psutil.Process]:
    return [process for process in psutil.Process(run.launcher.pid).children() if SERVER in process.cmdline()]


def assert_gone(pids: list[int]) -> None:
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=DEADLINE_S / 10
    )
    assert not alive


@pytest.mark.parametrize("options, local", [([], ("0", "1")), (["--one-device"], ("0", "0"))])
def test_workers_find_what_a_launcher_tells_them(start, tmp_path, options, local):
    result = start(options=options).finish()
    assert result.code == 0, result.output
    for rank, record in enumerate(found(tmp_path)):
        assert record["environment"] == {
            "RANK": str(rank),
            "LOCAL_RANK": local[rank],
            "WORLD_SIZE": "2",
            "LOCAL_SIZE": "2",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert f"worker {rank} is there" in result.output
    assert len(found(tmp_path)) == 2


@pytest.mark.parametrize("options", ([], ["--no-fork"]))
def test_nobody_needs_deepspeed_nor_the_launcher_torch(start, tmp_path, options):
    """Its own server; a script that draws random numbers draws its own in each worker, as in a process of its own."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    result = start(options=options, cold=True, PYTHONPATH=str(tmp_path), RECYCLE_TRACEBACK="1").finish()
    assert result.code == 0 and " imports " not in result.output, result.output
    records = found(tmp_path)
    assert [record["modules"] for record in records] == ([[], []] if options else [["torch"], ["torch"]])
    assert len({record["threads"] for record in records}) == 1 and {record["omp"] for record in records} == {1}
    assert all(len({record[generator] for record in records}) == 2 for generator in ("numpy", "torch", "random"))


def test_the_code_of_a_worker_that_ends_badly_is_the_jobs(start):
    result = start("exit", "1", "7").finish()
    assert result.code == 7, result.output
    assert_one_line(result, "before training started")


@pytest.mark.parametrize("more", ((), ("off",)))
def test_a_script_that_trains_without_the_plugin_is_told_of_once(start, more):
    """Also by an optimizer that it tries before; not where a config has switched the plugin off."""
    result = start("alone", *more).finish()
    assert result.code == 0, result.output
    assert result.output.count("the script's optimizer steps without the plugin so far: ") == (not more)


def test_a_worker_that_is_killed_before_training_ends_the_job_and_a_run_folder_tells(start, capsys):
    run = start("wait")
    records = both(run)
    os.kill(records[1]["pid"], signal.SIGKILL)
    result = run.finish()
    assert result.code == 1
    said = (
        "the job ends: rank 1: its process was killed by signal 9 (SIGKILL) before training started: "
        "start the job again"
    )
    assert_one_line(result, said)
    assert_gone([record["pid"] for record in records])
    with early_folder(result) as folder:
        assert main(["status", str(folder)]) == 1
    assert capsys.readouterr().out.startswith(f"state      {said}")


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_before_training_ends_the_job(start, number):
    run = start("wait")
    records = both(run)
    os.kill(run.launcher.pid, number)
    assert_one_line(run.finish(), f"the job ends: the launcher got {number.name}")
    assert_gone([record["pid"] for record in records])


def test_a_second_signal_ends_who_does_not_listen(start):
    run = start("wait")
    records = both(run)
    for record in records:
        os.kill(record["pid"], signal.SIGSTOP)
    os.kill(run.launcher.pid, signal.SIGTERM)
    run.wait_for(lambda: "the job ends" in run.output, "word of the end")
    os.kill(run.launcher.pid, signal.SIGTERM)
    assert_one_line(run.finish(), "the job ends: the launcher got SIGTERM")
    assert_gone([record["pid"] for record in records])


def test_a_signal_before_there_are_workers(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        f"import signal, sys\nif {SERVER!r} in sys.orig_argv:\n    signal.pause()\n"
    )
    run = start("wait", cold=True, PYTHONPATH=str(tmp_path))
    run.wait_for(lambda: forked_from(run), "process to fork from")
    os.kill(run.launcher.pid, signal.SIGTERM)
    result = run.finish()
    assert result.code == 1 and not result.output and not found(run.folder)


def test_where_a_fork_is_unsafe_workers_are_children(start, tmp_path):
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys, threading\nif {SERVER!r} in sys.orig_argv:\n    {thread}\n"
    )
    run = start(cold=True, PYTHONPATH=str(tmp_path))
    result = run.finish()
    warning = (
        "recycle: warning: workers are not forked, and each imports everything itself: "
        "in the process to fork them from there are 2 threads (python"
    )
    assert result.code == 0 and result.output.startswith(warning), result.output
    assert [record["parent"] for record in found(tmp_path)] == 2 * [run.launcher.pid]


@pytest.mark.parametrize("options", ([], ["--no-fork"]))
def test_nothing_outlives_a_killed_launcher(start, options):
    run = start("wait", options=options, cold=True)
    records = both(run)
    all_of_it = [process.pid for process in processes_with(run.mark)]
    assert {record["pid"] for record in records} < set(all_of_it)
    run.launcher.kill()
    run.launcher.wait(10)
    assert_gone(all_of_it)


def test_status_knows_of_a_launcher_that_was_killed_without_a_word(launch, capsys):
    run = launch("steps=100000", launcher="plain")
    after_step(run, 2)
    pids = [run.launcher.pid, *run.pids().values()]
    assert main(["status", str(run.folder)]) == 0
    first, state, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("The job has so far trained ") and state.startswith("state      running; last event ")
    os.kill(run.launcher.pid, signal.SIGKILL)
    assert_gone(pids)
    assert main(["status", str(run.folder)]) == 1
    assert re.match(
        "The job trained .* and was killed; no worker was lost.\n"
        f"state      killed: the coordinator's process on host .*, {pids[0]}, is gone, and has not said why",
        capsys.readouterr().out,
    )


def test_the_death_of_the_process_that_workers_are_forked_from_ends_the_job(start):
    """It is their parent: they are killed with it, whatever they wait for."""
    run = start("wait", cold=True)
    records = both(run)
    (server,) = forked_from(run)
    assert {record["parent"] for record in records} == {server.pid}
    server.kill()
    result = run.finish()
    assert_one_line(
        result,
        "recycle: error: the process that all workers were forked from was killed by signal 9 (SIGKILL), and they with "
        "it",
    )
    assert_gone([record["pid"] for record in records])


def test_a_script_of_deepspeeds_trains_on_after_a_loss(launch, reference):
    result = launch(faults("kill 1.0 before 0F1.0@7"), launcher="plain").finish()
    assert_same_training(result, reference(), {"1.0"})


@pytest.mark.parametrize("number", (signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.all_kills)))
def test_a_signal_ends_the_job_at_a_commit(launch, number):
    run = launch("steps=100000", script=TRAIN, launcher="plain")
    after_step(run, 4)
    os.kill(run.launcher.pid, number)
    result = run.finish()
    (finished,) = result.of("finished")
    assert f": the launcher got {number.name} from process {os.getpid()} (" in finished["text"]
    assert "all workers have left" not in result.output
    assert result.code == 1 and not result.of("lost"), result.output[-6000:]
    (step,) = {event["text"].split("after step ")[1].split()[0] for event in result.of("left")}
    assert len(result.of("left")) == 4 and int(step) == result.of("committed")[-1]["step"]
