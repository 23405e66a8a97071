"""Places from SLURM's variables."""

from __future__ import annotations

import pytest

from recycle_plugin.runtime.processes.slurm import NoPlace, described, first_host, tasks

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[07-09,12]",
    "SLURM_JOB_ID": "123456",
}
PLACE = {
    "RANK": "5",
    "WORLD_SIZE": "7",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "node07",
    "MASTER_PORT": "23456",
}


def test_a_task_of_srun():
    assert described(TASK) == TASK | PLACE
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}
    assert described(TASK | given) == TASK | PLACE | given


def test_a_launcher_goes_before_slurm():
    """``deepspeed`` inside of an allocation."""
    started = TASK | PLACE | {"RANK": "0", "WORLD_SIZE": "2"}
    assert described(started) == started


@pytest.mark.parametrize("environment", ({}, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}))
def test_nobody_has_started_it(environment):
    """The second is sbatch's script outside of any step."""
    with pytest.raises(NoPlace, match="neither DeepSpeed's launcher nor srun has started this process"):
        described(environment)


@pytest.mark.parametrize(
    "nodes, first",
    [("a", "a"), ("a,b", "a"), ("n[3,5],m", "n3"), ("n[01-04]", "n01"), ("r[1-2]n[07,09]x,b[1-2]", "r1n07x")],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("text, each", [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x2),1,3(x2)", [2, 2, 1, 3, 3])])
def test_tasks_of_each_node(text, each):
    assert tasks(text) == each


@pytest.mark.parametrize("name, text", [("SLURM_STEP_NODELIST", ""), ("SLURM_STEP_TASKS_PER_NODE", "two")])
def test_what_is_no_list_is_named(name, text):
    with pytest.raises(NoPlace, match=f"^{name} is '{text}', which is no list of"):
        described(TASK | {name: text})
