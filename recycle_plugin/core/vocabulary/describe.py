"""Names for people: how a worker, and the end of a process, are called in every line of output."""

from __future__ import annotations

import signal

from recycle_plugin.core.vocabulary.ids import Seat

BROKEN = "its connection broke"  # until its supervisor says how its process has ended


def named(rank: int, seat: Seat | str | None = None) -> str:
    """The name of the worker of ``rank`` in a message, with its seat once it has one."""
    return f"rank {rank}" if seat is None else f"seat {seat} (rank {rank})"


def how_ended(code: int) -> str:
    """Says in words how a process ended, given its exit code, which is negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}
    return f"was killed by signal {-code}{names.get(-code, '')}"
