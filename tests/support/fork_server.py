"""The tests' fork servers: recycle_plugin.runtime.fork_server, of which launchers come as well (cluster.WarmLauncher), and whose forks may be on other hosts.

``python -u -m tests.support.fork_server PATH deepspeed|plain``: with DeepSpeed and Megatron imported, or with what a plain launcher imports.
"""

from __future__ import annotations

import ctypes
import os
import sys

from recycle_plugin.launch import IMPORTED
from recycle_plugin.runtime import fork_server

LAUNCHER = ["rich.console", "rich.status", "psutil", "recycle_plugin.runs", "recycle_plugin.runtime.one_host", "omegaconf"]  # what one imports, and the tests' jobs
FRAMEWORKS = ["deepspeed", "hydra", "recycle_plugin.adapters.deepspeed.engine", "recycle_plugin.adapters.megatron.gpt"]


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


if __name__ == "__main__":
    path, kind = sys.argv[1:]
    modules = IMPORTED + LAUNCHER
    if kind == "deepspeed":
        from recycle_plugin.patches import megatron_cpu

        megatron_cpu.apply()
        modules += FRAMEWORKS
    fork_server.main(path, modules, enter_host)
