"""A check that replicas of a stage hold the same bits, and so do all copies of a weight that stages share: who doesn't,
by hashes after the same step.

All live workers of a stage apply the same reduced gradient to the same state, so any difference is a fault: of memory,
of an arithmetic unit, or of the software.  It says nothing of who is right, so a majority decides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from recycle_plugin.core.messages.from_workers import Fingerprint
from recycle_plugin.core.vocabulary.roster import Group, Member, Roster, WorkerId

KEPT = 4  # steps: the last that is committed, two that may be applied by now, and that of a checkpoint


@dataclass(frozen=True)
class Mismatch:
    """A difference between replicas: ``members`` of one stage differ from the others; from each other, if there is no
    ``majority``.

    ``weight``: in their copies of this one, which several stages have.
    """

    step: int
    members: Group
    majority: bool
    weight: str = ""

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The identities of the members that differ."""
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
        self._steps: dict[int, deque[tuple[WorkerId, int]]] = {}  # by rank, whose fingerprints of which steps came last

    def __bool__(self) -> bool:
        return bool(self._said)

    def add(self, message: Fingerprint) -> None:
        """Takes one in.  A step that was taken back and applied again is hashed again: the last word counts.  Of each
        rank the last few steps are kept; of a checkpoint that all have loaded the step may be any.
        """
        said = self._steps.setdefault(message.rank, deque())
        if (message.worker, message.step) not in said:
            said.append((message.worker, message.step))
        if len(said) > KEPT:
            self._forget(*said.popleft())
        self._said.setdefault(message.step, {})[message.worker] = message

    def _forget(self, worker: WorkerId, step: int) -> None:
        """Drops what ``worker`` has said of ``step``, if that was not compared yet."""
        if (said := self._said.get(step)) is not None:
            said.pop(worker, None)
            if not said:
                del self._said[step]

    def committed(self, step: int, roster: Roster) -> Iterator[Mismatch]:
        """Compares what everybody who is alive has said of ``step``, which is committed, and of those before it.

        Of a checkpoint that training begins with not all may have yet.  Shards of a seat hold different parts: each is
        compared with the same shard of the others.  Costs time in proportion to the members, for each step.
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
                        told.pop(member, None)  # it is known to be wrong: what else it says decides nothing

    @staticmethod
    def _of_step(step: int, told: dict[Member, Fingerprint], roster: Roster) -> Iterator[Mismatch]:
        """The mismatches of one step.  Copies of tied weights come first: there are more of them, so a majority is
        likelier.
        """
        for weight in sorted({weight for one in told.values() for weight in one.tied}):
            yield from compared(
                step, {member: one.tied[weight] for member, one in told.items() if weight in one.tied}, weight
            )
        for stage in roster.live_stages:
            yield from compared(step, {member: told[member].digest for member in roster.stage(stage) if member in told})


def compared(step: int, digests: dict[Member, str], weight: str = "") -> Iterator[Mismatch]:
    """The mismatch among ``digests`` after ``step``, if they are not all alike; ``weight``: of this one."""
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
