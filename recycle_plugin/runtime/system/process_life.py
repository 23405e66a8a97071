"""The state of a process, from the operating system."""

from __future__ import annotations

import os
from pathlib import Path

PF_EXITING, PF_SIGNALED = 0x4, 0x400  # of the kernel's flags in proc_pid_stat(5): it exits, or a signal is ending it


def is_dying(pid: int) -> bool:
    """Return whether the process is ending and still there: before the kernel closes its connections, it frees its
    memory, which takes a second for some gigabytes, or writes its core. False if unknown.
    """
    fields = _stat(pid)
    return bool(fields) and int(fields[6]) & (PF_EXITING | PF_SIGNALED) != 0


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's stat behind its name, the state first; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()  # names are any bytes
    except OSError:  # it has just ended
        return []


def life_of(pid: int) -> tuple[str, float | None]:
    """Return the state of a process, a letter as in ps, and its CPU seconds; ("", None) if it has ended. They include
    the seconds for which its main thread has waited for a CPU, if the kernel counts these: on a crowded machine that is
    most of the time.
    """
    fields = _stat(pid)
    if not fields:
        return "", None
    try:
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # the kernel does not count it
        waited_ns = 0
    return fields[0], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + waited_ns / 1e9
