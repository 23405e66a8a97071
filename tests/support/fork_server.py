"""The tests' fork servers: recycle_plugin.runtime.processes.fork_server, of which launchers come as well
(cluster.WarmLauncher), and whose forks may be on other hosts.

``python -u -m tests.support.fork_server PATH deepspeed|plain|megatron_lm``: with DeepSpeed and Megatron imported and a
job composed; with what a plain launcher imports; or with Megatron-LM's training loop, for the CPU.
"""

from __future__ import annotations

import ctypes
import os
import sys

from recycle_plugin.launch import IMPORTED
from recycle_plugin.runtime.processes import fork_server

LAUNCHER = [
    "rich.console",
    "rich.status",
    "psutil",
    "recycle_plugin.lab.runs",
    "recycle_plugin.runtime.processes.one_host",
    "omegaconf",
]  # what one imports, and the tests' jobs
FRAMEWORKS = [
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",  # these two with the first engine
    "recycle_plugin.adapters.deepspeed.engine",
    "recycle_plugin.adapters.deepspeed.refusals",
    "recycle_plugin.adapters.deepspeed.replica.engine",
    "recycle_plugin.lab.training.gpt",
    "recycle_plugin.lab.training.indexed",
    "recycle_plugin.lab.training.text",
]


MEGATRON_LM = ["megatron.training.training", "recycle_plugin.adapters.megatron_lm.job"]


def enter_host() -> None:
    """Go on the host of the process that RECYCLE_TEST_HOST names, if it does (tests/support/hosts.py)."""
    pid = os.environ.get("RECYCLE_TEST_HOST")
    if pid is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for space in ("net", "uts"):
        with open(f"/proc/{pid}/ns/{space}") as opened:
            if libc.setns(opened.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {space}")


def compose_once() -> None:
    """Hydra loads its plugins and its parser's tables when it first composes a job, which takes as long as all else
    that a worker does before its first step.
    """
    from recycle_plugin.lab.training.compose import compose

    compose(["model=gpt_tiny", "recycle.enabled=true", 'recycle.faults=["kill 0.1 before 1F0.1@6"]'])


if __name__ == "__main__":
    path, kind = sys.argv[1:]
    modules = IMPORTED + LAUNCHER
    if kind == "deepspeed":
        from recycle_plugin.patches import megatron_cpu

        megatron_cpu.apply()
        modules += FRAMEWORKS
        compose_once()
    elif kind == "megatron_lm":
        from recycle_plugin.patches import megatron_lm_cpu
        from tests.support.megatron_lm import on_python_3_11

        on_python_3_11()
        megatron_lm_cpu.apply()
        modules += MEGATRON_LM
    fork_server.main(path, modules, enter_host)
