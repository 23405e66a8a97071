"""Replicas of a stage hold the same bits: who doesn't, by hashes of their states after the same step.

All live workers of a stage apply the same reduced gradient to the same state, so any difference is a fault: of memory, of
an arithmetic unit, or of the software.  It says nothing of who is right, so a majority decides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Iterable, Iterator

from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Fingerprint, Member


@dataclass(frozen=True)
class Mismatch:
    """``seats`` of one stage differ from the others; from each other, if there is no ``majority``."""

    step: int
    seats: tuple[Seat, ...]
    majority: bool

    def __str__(self) -> str:
        if self.majority:
            return f"its state after step {self.step} is unlike that of the stage's other replicas"
        return f"the replicas {', '.join(map(str, self.seats))} differ after step {self.step}, and no majority says which is right"


class Fingerprints:
    """What workers have said of steps that are not committed."""

    def __init__(self) -> None:
        self._digests: dict[int, dict[int, str]] = {}

    def add(self, message: Fingerprint) -> None:
        """A step that was taken back and applied again is hashed again: the last word counts."""
        self._digests.setdefault(message.step, {})[message.rank] = message.digest

    def committed(self, step: int, members: Iterable[Member]) -> Iterator[Mismatch]:
        """``step`` is, so everybody who is alive has said what it has of it and before."""
        members = sorted(members, key=lambda member: member.seat)
        for checked in sorted(checked for checked in self._digests if checked <= step):
            digests = self._digests.pop(checked)
            for stage in sorted({member.seat.stage for member in members}):
                yield from _compared(checked, {m.seat: digests[m.rank] for m in members if m.seat.stage == stage and m.rank in digests})


def _compared(step: int, digests: dict[Seat, str]) -> Iterator[Mismatch]:
    counts = Counter(digests.values())
    if len(counts) > 1:
        common, votes = counts.most_common(1)[0]
        majority = 2 * votes > len(digests)
        yield Mismatch(step, tuple(seat for seat, digest in digests.items() if not majority or digest != common), majority)
