"""Newcomers on their way back to a run, as the event log records them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

STARTED, RUNS, CATCHES_UP = "its process is started", "its script runs from the top", "it catches up"
FOLLOWS = "it follows the others, and waits to be let in"
REPLAYS, REPLAYED = "it replays its stage, which nobody else has, and all others wait", "it has replayed its stage"
OVER = ("rejoined", "not_restarted", "held_back", "lost")  # kinds of events after which no newcomer is on its way


@dataclass(frozen=True)
class Coming:
    """Progress of the latest newcomer of ``rank``: its ``phase`` in words, since ``since`` (seconds since the epoch).

    ``share`` of its stage's state and ``bytes`` have arrived, lately at ``bytes_per_s``; None before it catches up.
    ``step``: the position of its script, ``left`` steps behind the others; None if not reported.
    """

    rank: int
    phase: str
    since: float
    share: float | None = None
    bytes: int | None = None
    bytes_per_s: float | None = None
    step: int | None = None
    left: int | None = None

    def told(self, now: float) -> str:
        """Return the phase, how long it has lasted, and the progress, in words."""
        text = f"{self.phase}, for {now - self.since:.0f} s"
        if self.phase == RUNS and self.step is not None:
            text += f", at step {self.step}, {self.left} behind the others"
        if self.bytes is not None and self.share is not None:
            text += f", with {self.share:.0%} of its stage's state, {self.bytes / 1e6:.1f} MB"
            text += "" if self.bytes_per_s is None else f" at {self.bytes_per_s / 1e6:.1f} MB/s"
        return text


def comings(events: Iterable[dict]) -> list[Coming]:
    """Return the newcomers on their way after ``events``, in the order of their ranks."""
    found: dict[int, Coming] = {}
    for event in events:
        rank, kind = event.get("rank"), event["event"]
        if rank is None:
            continue
        if kind in OVER:
            found.pop(rank, None)
        elif kind in ("restart", "joined") or (kind == "worker" and event.get("incarnation")):
            found[rank] = Coming(rank, STARTED, event["time"])
        elif kind == "newcomer":
            found[rank] = Coming(rank, RUNS, event["time"])
        elif kind == "behind" and rank in found:
            found[rank] = replace(found[rank], step=event["step"], left=event["left"])
        elif kind == "catching_up":
            since = found[rank].since if rank in found and found[rank].phase == CATCHES_UP else event["time"]
            figures = event["share"], event["bytes"], event["bytes_per_s"]
            found[rank] = Coming(rank, CATCHES_UP, since, *figures)
        elif kind == "caught_up" and rank in found:
            there = {"share": 1.0, "bytes": event["bytes"], "bytes_per_s": None}
            found[rank] = replace(found[rank], phase=FOLLOWS, since=event["time"], **there)
        elif kind in ("restored", "replayed") and rank in found:
            phase = REPLAYS if kind == "restored" else REPLAYED
            found[rank] = Coming(rank, phase, event["time"])
    return [found[rank] for rank in sorted(found)]
