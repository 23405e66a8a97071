"""The state of a process, from the operating system."""

from __future__ import annotations

import os
from pathlib import Path


def life_of(pid: int) -> tuple[str, float | None]:
    """Return the state of a process, a letter as in ps, and its CPU seconds; ("", None) if it has ended. They include
    the seconds for which its main thread has waited for a CPU, if the kernel counts these: on a crowded machine that is
    most of the time.
    """
    process = Path(f"/proc/{pid}")
    try:
        fields = (process / "stat").read_bytes().rpartition(b")")[2].decode().split()  # names are any bytes
    except OSError:  # it has just ended
        return "", None
    try:
        waited_ns = int((process / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # the kernel does not count it
        waited_ns = 0
    return fields[0], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + waited_ns / 1e9
