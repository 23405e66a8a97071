"""``deepspeed --hostfile`` over two hosts by pdsh and by SLURM, where a host dies.

Neither program is here: stand-ins do what their manuals say (tests/support/launchers.py).  DeepSpeed's side is the real
one: the commands that it builds for them, the variables that it forwards, the code that it returns.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import psutil
import pytest

from recycle_plugin.lab.runs import processes_with
from recycle_plugin.launch import free_port
from tests.support.cluster import ROOT
from tests.support.hosts import ProgramRun
from tests.support.jobs import WRAPPED, after_step, assert_same_training, faults, hold
from tests.support.launching import launching

LOST = {"1.0", "1.1"}  # beta's replica
WRAP = {"script": WRAPPED, "RECYCLE_TEST_WRAP": '{"name": "config_file"}'}


def held(tmp_path) -> dict[str, str]:
    """As WRAP, and the job waits for tmp_path/go."""
    return WRAP | {"RECYCLE_TEST_WRAP": json.dumps([{"name": "config_file"}, hold(tmp_path)])}


@pytest.fixture
def launch(server, tmp_path, pair):
    with launching(server, tmp_path, partial(ProgramRun, pair)) as launch:
        yield launch


@pytest.fixture
def config(tmp_path) -> tuple[str, str]:
    """Arguments of the script: no host has a whole stage."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"recycle": {"enabled": True, "placement": "spread"}}))
    return "--deepspeed_config", str(path)


PDSH = ["deepspeed", "--launcher", "pdsh"]
SLURM = ["deepspeed", "--launcher", "slurm"]  # which hands no --module on to srun
NO_KILL = "--launcher_args=--no-kill"


@pytest.mark.all_kills
def test_pdsh(launch, reference, config):
    result = launch(*config, **WRAP, command=PDSH).finish()
    assert_same_training(result, reference())
    assert result.output.count("alpha: ") > 10 and len(result.of("left")) == 4


def assert_the_others_finish(run, reference, tmp_path, code: int, said: str) -> None:
    """... without beta, and the launcher's command ends with ``code`` although the job is through."""
    after_step(run, 5)
    run.crash("beta")
    (tmp_path / "go").touch()
    result = run.finish()
    assert result.code == code and said in result.output
    assert_same_training(replace(result, code=0), reference(), LOST)
    assert result.of("finished")


def test_a_host_dies_under_pdsh(launch, reference, config, tmp_path):
    """They end without a goodbye from it.  DeepSpeed's command returns ssh's 255."""
    assert_the_others_finish(
        launch(*config, **held(tmp_path), command=PDSH), reference, tmp_path, 255, "beta: ssh exited with exit code 255"
    )


def test_a_node_fails_under_srun_with_no_kill(launch, reference, config, tmp_path):
    """srun's code is that of the killed tasks."""
    assert_the_others_finish(
        launch(*config, **held(tmp_path), command=[*SLURM, NO_KILL], as_file=True),
        reference,
        tmp_path,
        137,
        "Node failure on beta",
    )


@pytest.mark.all_kills
def test_a_node_fails_under_srun_without_it(launch, config):
    """SLURM ends the step: the job ends at a commit."""
    run = launch("steps=100000", *config, **WRAP, command=SLURM, as_file=True)
    after_step(run, 5)
    run.crash("beta")
    result = run.finish()
    assert (
        result.of("terminate") and result.of("finished") and {event["seat"] for event in result.of("lost")} == LOST
    ), result.output[-6000:]


@pytest.mark.all_kills
def test_the_batch_script_of_the_documents_outlives_a_node(launch, reference, config, tmp_path):
    """SLURM's variables are enough, without DeepSpeed's command."""
    (script,) = re.findall(
        r"```bash\n(#!/bin/bash\n.*?#SBATCH.*?)```",
        (ROOT / "recycle_plugin" / "docs" / "jobs.md").read_text(),
        re.DOTALL,
    )
    (batch := tmp_path / "job.sbatch").write_text(script)
    command = ["bash", str(batch)]
    run = launch(*config, **held(tmp_path), command=command, plugin=None, SLURM_NTASKS="4")
    assert_the_others_finish(run, reference, tmp_path, 137, "Node failure on beta")


TORCHRUN = ["torchrun", "--nproc-per-node", "4"]  # static, with a store of its own at the master's port
ACCELERATE = ["accelerate", "launch", "--num_processes", "4", "--use_deepspeed", "--zero_stage", "1"]


@pytest.mark.parametrize(
    "command",
    ([*TORCHRUN, "--master-port"], pytest.param([*ACCELERATE, "--main_process_port"], marks=pytest.mark.all_kills)),
)
def test_torchrun_and_accelerate_know_nothing_of_a_worker_that_is_killed(server, reference, tmp_path, command):
    port = free_port()
    with launching(server, tmp_path) as launch:
        run = launch(
            faults("kill 1.1 before 1F1.1@4"), "recycle.rejoin=never", launcher=[*command, str(port)], port=port
        )
        assert_same_training(run.finish(), reference(), {"1.1"})


@pytest.mark.all_kills
def test_sigterm_at_deepspeeds_own_command(launch, config):
    """It ends pdsh first, so that what prints meets a broken pipe, and then pkill sends SIGTERM to the hosts'
    launchers: no orderly end, but one.
    """
    run = launch("steps=100000", *config, **WRAP, command=PDSH)
    after_step(run, 4)
    run.launcher.terminate()
    assert run.finish().code == 1
    _, left = psutil.wait_procs(processes_with(run.mark), timeout=60)
    assert not left and {event["event"] for event in run.events()} & {"end", "finished"}, run.output[-6000:]


@pytest.mark.all_kills
def test_the_machine_that_pdsh_runs_on_dies(launch, config, tmp_path):
    """Nobody reads any more what is said, which ends no process whose output goes to a file."""
    run = launch("steps=60", *config, **WRAP, command=[*PDSH, f"--enable_each_rank_log={tmp_path / 'said'}"])
    after_step(run, 4)
    (program,) = psutil.Process(run.launcher.pid).children()
    for process in (run.launcher, program):
        process.kill()
    run.launcher.wait(10)
    _, left = psutil.wait_procs(processes_with(run.mark), timeout=120)
    ended = {event["event"] for event in run.events()}
    assert not left and "finished" in ended and "lost" not in ended and len(run.finish().losses) == 60
