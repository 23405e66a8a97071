"""A process's place in the job, from the variables of its launcher: DeepSpeed's, torchrun (also under Accelerate),
srun, mpirun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, PORTS = 20_000, 12_000  # below the ports that systems hand out
PRIME = 7919  # spreads adjacent ports
LAST_PORT = 65535
MOST = 1 << 24  # workers, more than any job has
MPI = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""The variables of Open MPI, and of launchers whose mpirun is Hydra: MPICH and Intel MPI."""


class NoPlace(RuntimeError):
    """No known launcher has started this process; the message says what to do."""


def described(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT. Under srun the
    master defaults to the step's first node, and its port follows from the job's number. Raises NoPlace if no known
    launcher has started this process, or if a variable is missing or has an impossible value.
    """
    if "RANK" in environment:
        return _checked(_of_torchrun(environment) if "TORCHELASTIC_RUN_ID" in environment else dict(environment))
    if "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment:
        return _checked(_of_srun(environment))
    if all(any(name in environment for name in names) for names in MPI.values()):
        return _checked(_of_mpirun(environment))
    raise NoPlace(
        "no launcher that the plugin knows has started this process (DeepSpeed's, torchrun, srun, mpirun): launch with "
        "deepspeed … --module recycle_plugin.launch your_script.py …, "
        "or on one host with python -m recycle_plugin.launch --workers 4 your_script.py …"
    )


def _checked(place: dict[str, str]) -> dict[str, str]:
    """Return ``place`` if its variables can be a launcher's, which each process needs. Raises NoPlace."""
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not place.get(name)]:
        raise NoPlace(
            f"RANK is {place['RANK']}, and these are not set: {', '.join(missing)}; unset RANK to start a job by "
            "itself, or set what a launcher sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    for name in ("WORLD_SIZE", "LOCAL_SIZE"):
        _check_number(place, name, 1, MOST)
    _check_number(place, "RANK", 0, int(place["WORLD_SIZE"]) - 1)
    _check_number(place, "MASTER_PORT", 1, LAST_PORT)
    return place


def _check_number(place: Mapping[str, str], name: str, least: int, most: int) -> None:
    """Raise NoPlace if the variable ``name`` is set to anything but a number from ``least`` to ``most``."""
    if name in place and not (re.fullmatch(r"\d{1,10}", place[name], re.ASCII) and least <= int(place[name]) <= most):
        raise NoPlace(f"{name} is {place[name]!r}: a launcher sets it to a number from {least} to {most}")


def local_rank(environment: Mapping[str, str]) -> str:
    """Return this process's number among those of its host, under any launcher; "0" if none has set it."""
    names = ("LOCAL_RANK", "SLURM_LOCALID", *MPI["LOCAL_RANK"])
    return next((environment[name] for name in names if name in environment), "0")


def _of_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment under torchrun. If torchrun's store has the master's port, the job takes another."""
    port = int(environment["MASTER_PORT"])
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = _beside(port)
    return dict(environment) | {"LOCAL_SIZE": environment["LOCAL_WORLD_SIZE"], "MASTER_PORT": str(port)}


def _beside(port: int) -> int:
    """Return a port that follows from ``port`` and differs from it."""
    # never ``port``: FIRST_PORT + port * (PRIME - 1) + 1 would be a multiple of PORTS, but it is odd and PORTS even
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
    """Return the first host of a SLURM node list such as ``rack2n[07-09,12],login1``."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    if first is None:
        raise NoPlace(f"SLURM_STEP_NODELIST is {nodes!r}, which is no list of nodes: start by srun")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


def tasks(each: str) -> list[int]:
    """Return the number of tasks on each node, from SLURM's text, such as ``2(x3),1``."""
    found = []
    for part in each.split(","):
        count = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if count is None:
            raise NoPlace(f"SLURM_STEP_TASKS_PER_NODE is {each!r}, which is no list of numbers: start by srun")
        found += [int(count[1])] * int(count[2] or 1)
    return found
