"""How people are told of a worker, and of the end of a process: the same in every line."""

from __future__ import annotations

import signal

from recycle_plugin.core.vocabulary.ids import Seat

BROKEN = "its connection broke"  # until its supervisor says how its process has ended


def named(rank: int, seat: Seat | str | None = None) -> str:
    """The worker of ``rank``, before seats are given out without one."""
    return f"rank {rank}" if seat is None else f"seat {seat} (rank {rank})"


def how_ended(code: int) -> str:
    """Of a process's exit code, negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}
    return f"was killed by signal {-code}{names.get(-code, '')}"
