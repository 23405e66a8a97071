"""Replicas of a stage hold the same bits, and so do all copies of a weight that stages share: who doesn't, by hashes after the same step.

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
    """``seats`` of one stage differ from the others; from each other, if there is no ``majority``.  ``weight``: in their copies of this one,
    which several stages have."""

    step: int
    seats: tuple[Seat, ...]
    majority: bool
    weight: str = ""

    def __str__(self) -> str:
        if self.majority:
            return f"its copy of {self.weight} after step {self.step} is unlike the others" if self.weight else f"its state after step {self.step} is unlike that of the stage's other replicas"
        if self.weight:
            return f"the copies of {self.weight} at {', '.join(map(str, self.seats))} differ after step {self.step}, and no majority says which is right"
        return f"the replicas {', '.join(map(str, self.seats))} differ after step {self.step}, and no majority says which is right"


class Fingerprints:
    """What workers have said of steps that are not committed."""

    def __init__(self) -> None:
        self._said: dict[int, dict[int, Fingerprint]] = {}

    def add(self, message: Fingerprint) -> None:
        """A step that was taken back and applied again is hashed again: the last word counts."""
        self._said.setdefault(message.step, {})[message.rank] = message

    def committed(self, step: int, members: Iterable[Member]) -> Iterator[Mismatch]:
        """``step`` is: what everybody who is alive has said, of it or before, is compared.  Of a checkpoint that training begins with not all may have yet."""
        members = sorted(members, key=lambda member: member.seat)
        ranks = {member.rank for member in members}
        for checked in sorted(checked for checked, said in self._said.items() if checked <= step and ranks <= said.keys()):
            said = self._said.pop(checked)
            by_seat = {member.seat: said[member.rank] for member in members if member.rank in said}
            for mismatch in self._of_step(checked, by_seat):
                yield mismatch
                for seat in mismatch.seats if mismatch.majority else ():
                    by_seat.pop(seat, None)  # it is known to be wrong: what else it says decides nothing

    @staticmethod
    def _of_step(step: int, by_seat: dict[Seat, Fingerprint]) -> Iterator[Mismatch]:
        """Copies of tied weights first: there are more of them, so a majority is likelier."""
        for weight in sorted({weight for one in by_seat.values() for weight in one.tied}):
            yield from _compared(step, {seat: one.tied[weight] for seat, one in by_seat.items() if weight in one.tied}, weight)
        for stage in sorted({seat.stage for seat in by_seat}):
            yield from _compared(step, {seat: one.digest for seat, one in by_seat.items() if seat.stage == stage})


def _compared(step: int, digests: dict[Seat, str], weight: str = "") -> Iterator[Mismatch]:
    counts = Counter(digests.values())
    if len(counts) > 1:
        common, votes = counts.most_common(1)[0]
        majority = 2 * votes > len(digests)
        yield Mismatch(step, tuple(seat for seat, digest in digests.items() if not majority or digest != common), majority, weight)
