"""Names for people: how every line of output calls a worker, and the end of a process."""

from __future__ import annotations

import signal
from collections.abc import Collection

from recycle_plugin.core.vocabulary.ids import Seat

COORDINATOR_GONE = "the coordinator's host is gone, and no other process has taken its place"
BROKEN, DYING = "its connection broke", "its process is ending"
SHOWN = 8  # ranks in a line
UNCONFIRMED = (BROKEN, DYING)  # until its supervisor reports how its process ended


def named(rank: int, seat: Seat | str | None = None) -> str:
    return f"rank {rank}" if seat is None else f"seat {seat} (rank {rank})"


def those(ranks: Collection[int]) -> str:
    """Return the subject "rank 2 has" or "ranks 2 and 3 have" of a sentence; of many ranks, the first ones."""
    shown = [str(rank) for rank in sorted(ranks)[:SHOWN]]
    more = [f"{len(ranks) - SHOWN} more"] if len(ranks) > SHOWN else []
    *first, last = shown + more
    listed = f"{', '.join(first)} and {last}" if first else last
    return f"rank{'s' * (len(ranks) > 1)} {listed} {'have' if len(ranks) > 1 else 'has'}"


def how_ended(code: int) -> str:
    """Return in words how a process ended, given its exit code; a negative code is a signal."""
    if code >= 0:
        return f"exited with code {code}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}
    return f"was killed by signal {-code}{names.get(-code, '')}"
