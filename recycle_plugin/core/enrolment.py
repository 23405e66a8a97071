"""The start of a job: all workers are there and want the same; and what the job will not survive, which is said before it begins."""

from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple

from recycle_plugin.core.placement import at_risk, stages_at_risk
from recycle_plugin.core.protocol import Member, Ready
from recycle_plugin.core.topology import Topology


class Enrolment:
    """Of a job of so many ``ranks``."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: dict[int, Ready] = {}

    def add(self, ready: Ready) -> bool:
        """Whether all are there."""
        self._ready[ready.member.rank] = ready
        return len(self._ready) >= self._ranks

    @property
    def members(self) -> dict[int, Member]:
        return {rank: ready.member for rank, ready in sorted(self._ready.items())}

    def contradiction(self) -> str | None:
        """Why they can't train together."""
        jobs = {str(sorted(ready.job.items())) for ready in self._ready.values()}
        if len(jobs) == len({ready.stepped for ready in self._ready.values()}) == 1:
            return None
        return "workers were started with different recycle settings or from different checkpoints: " + " | ".join(sorted(jobs))


class WeakPoint(NamedTuple):
    """``refused``: the user wants no job that has it."""

    text: str
    details: dict
    refused: bool = False


def weak_points(job: dict, members: Iterable[Member], shape: Topology) -> Iterator[WeakPoint]:
    """What this job does not survive, and what keeps it from its best speed.  ``members``: rank 0's first."""
    members = list(members)
    yield WeakPoint(f"single point of failure: host {members[0].host} runs the coordinator and the store; its loss ends the job", {})
    for host, stages in stages_at_risk(members).items():
        text, strict = at_risk(host, stages, members, shape), job["strict_placement"]
        yield WeakPoint("strict_placement: " * strict + text, {"host": host, "stages": list(stages)}, strict)
    if job["clipping"] and job["clip"] == "sync" and job["stagger_optimizer"]:
        yield WeakPoint(f"gradient_clipping is {job['clipping']:g}, so each step waits for the norm over all stages and the optimizer is "
                        "not staggered; set recycle.clip to \"validate\" where the norm is seldom over that", {})  # fmt: skip
