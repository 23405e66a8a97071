"""How a process is, as the operating system has it."""

from __future__ import annotations

import os
from pathlib import Path


def life_of(pid: int) -> tuple[str, float | None]:
    """The state of a process, a letter as ps has it, and its seconds of CPU time.

    Those include the seconds for which its main thread has waited for a CPU, which on a crowded machine is most of it;
    None where that can't be read.  The state is empty where the process has ended.
    """
    process = Path(f"/proc/{pid}")
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return "", None
    try:
        waited_ns = int((process / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # a kernel that does not keep it
        waited_ns = 0
    return fields[0], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + waited_ns / 1e9
