"""Where a process stands in the job: the launcher's variables, or the same made from those of SLURM's srun."""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, PORTS = 20_000, 12_000  # below those that systems hand out


class NoPlace(RuntimeError):
    """Neither a launcher nor srun has started this process; the message says what to do."""


def described(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT.

    Under srun, unless they are given, the master is the step's first node, and its port follows from the job's number.
    Raises NoPlace where neither a launcher nor srun has started this process.
    """
    if "RANK" in environment:
        return dict(environment)
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        raise NoPlace(
            "neither DeepSpeed's launcher nor srun has started this process: launch with deepspeed … --module "
            "recycle_plugin.launch your_script.py …, "
            "or on one host with python -m recycle_plugin.launch --workers 4 your_script.py …"
        )
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
