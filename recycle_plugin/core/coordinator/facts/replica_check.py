"""A check that replicas of a stage hold the same bits, and all copies of a shared weight too, by hashes after one step.
All live workers of a stage apply the same reduced gradient to the same state. Any difference is a fault of memory, of
an arithmetic unit or of the software. A hash does not tell who is right, so a majority decides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from recycle_plugin.core.messages.from_workers import Fingerprint
from recycle_plugin.core.vocabulary.roster import Group, Member, Roster, WorkerId

KEPT = 4  # steps: the last committed, two that may be applied, and a checkpoint's


@dataclass(frozen=True)
class Mismatch:
    """A difference between replicas after ``step``. ``members`` differ from the other workers of their stage or,
    without a ``majority``, from each other. ``weight``: the shared weight whose copies differ, "" for the whole state.
    """

    step: int
    members: Group
    majority: bool
    weight: str = ""

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(member.worker for member in self.members)

    def __str__(self) -> str:
        if self.majority:
            return (
                f"its copy of {self.weight} after step {self.step} is unlike the others"
                if self.weight
                else f"its state after step {self.step} is unlike that of the stage's other replicas"
            )
        if self.weight:
            return (
                f"the copies of {self.weight} at {', '.join(map(str, self.members))} differ after step {self.step}, "
                "and no majority says which is right"
            )
        return (
            f"the replicas at {', '.join(map(str, self.members))} differ after step {self.step}, "
            "and no majority says which is right"
        )


class Fingerprints:
    """The fingerprints that workers have sent of steps that are not committed."""

    def __init__(self) -> None:
        self._said: dict[int, dict[WorkerId, Fingerprint]] = {}
        self._steps: dict[int, deque[tuple[WorkerId, int]]] = {}  # by rank, the last ones kept

    def __bool__(self) -> bool:
        return bool(self._said)

    def add(self, message: Fingerprint) -> None:
        """Record a fingerprint; a later one for the same step replaces it. A rank's last few are kept, since a
        checkpoint may be of any step.
        """
        said = self._steps.setdefault(message.rank, deque())
        if (message.worker, message.step) not in said:
            said.append((message.worker, message.step))
        if len(said) > KEPT:
            self._forget(*said.popleft())
        self._said.setdefault(message.step, {})[message.worker] = message

    def _forget(self, worker: WorkerId, step: int) -> None:
        """Drop the fingerprint of ``worker`` after ``step``, if it was not compared yet."""
        if (said := self._said.get(step)) is not None:
            said.pop(worker, None)
            if not said:
                del self._said[step]

    def committed(self, step: int, roster: Roster) -> Iterator[Mismatch]:
        """Compare the fingerprints of ``step``, which is committed, and of earlier steps, as far as all members have
        sent them. Some may be missing for a checkpoint that training begins with. Shards of a seat hold different
        parts: each is compared with the same shard of other seats. O(members) for each step.
        """
        for checked in sorted(
            checked for checked, said in self._said.items() if checked <= step and roster.workers <= said.keys()
        ):
            said = self._said.pop(checked)
            for counterparts in roster.counterparts:
                told = {member: said[member.worker] for member in counterparts}
                for mismatch in self._of_step(checked, told, roster):
                    yield mismatch
                    for member in mismatch.members if mismatch.majority else ():
                        told.pop(member, None)  # known to be wrong: it must not decide anything else

    @staticmethod
    def _of_step(step: int, told: dict[Member, Fingerprint], roster: Roster) -> Iterator[Mismatch]:
        """Yield the mismatches of one step. Tied weights come first: more copies make a majority likelier."""
        for weight in sorted({weight for one in told.values() for weight in one.tied}):
            yield from compared(
                step, {member: one.tied[weight] for member, one in told.items() if weight in one.tied}, weight
            )
        for stage in roster.live_stages:
            yield from compared(step, {member: told[member].digest for member in roster.stage(stage) if member in told})


def compared(step: int, digests: dict[Member, str], weight: str = "") -> Iterator[Mismatch]:
    """Yield the mismatch among ``digests`` after ``step``, if they are not all equal. ``weight``: the weight that they
    are of.
    """
    counts = Counter(digests.values())
    if len(counts) > 1:
        common, votes = counts.most_common(1)[0]
        majority = 2 * votes > len(digests)
        yield Mismatch(
            step,
            tuple(member for member, digest in digests.items() if not majority or digest != common),
            majority,
            weight,
        )
