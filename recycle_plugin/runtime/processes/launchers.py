"""Where a process stands in the job, by the variables of its launcher: DeepSpeed's, torchrun, Accelerate's (which is
torchrun), srun, mpirun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, PORTS = 20_000, 12_000  # below those that systems hand out
PRIME = 7919  # spreads ports that lie side by side
MPI = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""Names of Open MPI's, and of those whose mpirun is Hydra: MPICH's and Intel's."""


class NoPlace(RuntimeError):
    """No launcher that is known has started this process; the message says what to do."""


def described(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT.

    Under srun, unless they are given, the master is the step's first node, and its port follows from the job's number.
    Raises NoPlace where no launcher that is known has started this process, and where mpirun does not say who the
    master is.
    """
    if "RANK" in environment:
        return _of_torchrun(environment) if "TORCHELASTIC_RUN_ID" in environment else dict(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment:
        return _of_srun(environment)
    if all(any(name in environment for name in names) for names in MPI.values()):
        return _of_mpirun(environment)
    raise NoPlace(
        "no launcher that the plugin knows has started this process (DeepSpeed's, torchrun, srun, mpirun): launch with "
        "deepspeed … --module recycle_plugin.launch your_script.py …, "
        "or on one host with python -m recycle_plugin.launch --workers 4 your_script.py …"
    )


def local_rank(environment: Mapping[str, str]) -> str:
    """Which of its host's processes this one is, by whatever launcher; "0" where none has said so."""
    names = ("LOCAL_RANK", "SLURM_LOCALID", *MPI["LOCAL_RANK"])
    return next((environment[name] for name in names if name in environment), "0")


def _of_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun keeps the master's port for a store of its own, unless told not to: the job takes one that follows from
    it.
    """
    port = int(environment["MASTER_PORT"])
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = _beside(port)
    return dict(environment) | {"LOCAL_SIZE": environment["LOCAL_WORLD_SIZE"], "MASTER_PORT": str(port)}


def _beside(port: int) -> int:
    """A port that follows from ``port``, and is another one."""
    # the same one would need a multiple of PORTS, which is even, in FIRST_PORT + port * (PRIME - 1) + 1, which is odd
    return FIRST_PORT + (port * PRIME + 1) % PORTS


def _of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    return (
        {
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(FIRST_PORT + int(environment["SLURM_JOB_ID"]) % PORTS),
        }
        | dict(environment)
        | {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_SIZE": str(tasks(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]),
        }
    )


def _of_mpirun(environment: Mapping[str, str]) -> dict[str, str]:
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        raise NoPlace(
            "mpirun does not say where rank 0 is: give all processes MASTER_ADDR, the first host's address, and "
            "MASTER_PORT, a free port there (Open MPI: -x MASTER_ADDR=node1 -x MASTER_PORT=29500; MPICH: -genv "
            "MASTER_ADDR node1 -genv MASTER_PORT 29500)"
        )
    found = {ours: next(environment[name] for name in names if name in environment) for ours, names in MPI.items()}
    return dict(environment) | found


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as ``rack2n[07-09,12],login1``."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    if first is None:
        raise NoPlace(f"SLURM_STEP_NODELIST is {nodes!r}, which is no list of nodes: start by srun")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


def tasks(each: str) -> list[int]:
    """The number of tasks on each node, from SLURM's text, such as ``2(x3),1``."""
    found = []
    for part in each.split(","):
        count = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if count is None:
            raise NoPlace(f"SLURM_STEP_TASKS_PER_NODE is {each!r}, which is no list of numbers: start by srun")
        found += [int(count[1])] * int(count[2] or 1)
    return found
