"""Places from the variables of SLURM, torchrun and mpirun."""

from __future__ import annotations

import pytest

from recycle_plugin.runtime.processes.launchers import (
    FIRST_PORT,
    PORTS,
    NoPlace,
    described,
    first_host,
    local_rank,
    tasks,
)

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
    with pytest.raises(NoPlace, match="no launcher that the plugin knows has started this process"):
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


@pytest.mark.parametrize(
    "name, text, said",
    [
        (
            "MASTER_ADDR",
            None,
            "^RANK is 5, and these are not set: MASTER_ADDR; unset RANK to start a job by itself",
        ),
        ("WORLD_SIZE", "", "^RANK is 5, and these are not set: WORLD_SIZE"),
        ("WORLD_SIZE", "seven", "^WORLD_SIZE is 'seven': a launcher sets it to a number from 1 to 16777216$"),
        ("WORLD_SIZE", "5", "^RANK is '5': a launcher sets it to a number from 0 to 4$"),
        ("RANK", "-1", "^RANK is '-1': a launcher sets it to a number from 0 to 6$"),
        ("LOCAL_SIZE", "1e1", "^LOCAL_SIZE is '1e1'"),
        ("MASTER_PORT", "70000", "^MASTER_PORT is '70000': a launcher sets it to a number from 1 to 65535$"),
    ],
)
def test_what_no_launcher_sets_is_refused_in_one_line(name, text, said):
    """A script of the user's may be the launcher."""
    given = {other: value for other, value in PLACE.items() if other != name} | ({} if text is None else {name: text})
    with pytest.raises(NoPlace, match=said):
        described(given)


TORCHRUNS = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node07",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_torchruns_own_store_keeps_its_port():
    """The job's port follows from it, so that all ranks know it; others' jobs beside it have other ones."""
    of_agents = TORCHRUNS | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ports = {port: int(described(of_agents | {"MASTER_PORT": str(port)})["MASTER_PORT"]) for port in range(1, 1 << 16)}
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports.values())
    assert not [store for store, port in ports.items() if port == store]
    assert len({ports[store] for store in range(29500, 29600)}) == 100


def test_a_port_that_torchrun_leaves_is_the_jobs():
    alone = described(TORCHRUNS | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert alone["MASTER_PORT"] == "29500" and alone["LOCAL_SIZE"] == "4"


MPIRUNS = (
    {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "7",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    {"PMI_RANK": "5", "PMI_SIZE": "7", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
)


@pytest.mark.parametrize("started", MPIRUNS)
def test_a_process_of_mpirun(started):
    master = {"MASTER_ADDR": "node07", "MASTER_PORT": "23456"}
    assert described(started | master) == started | PLACE
    assert local_rank(started) == "1"
    with pytest.raises(NoPlace, match="mpirun does not say where rank 0 is: give all processes MASTER_ADDR"):
        described(started | {"MASTER_PORT": "23456"})
