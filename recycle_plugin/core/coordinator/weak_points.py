"""Losses that a job will not survive, and settings that slow it down: reported before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from recycle_plugin.core.coordinator.succession import LEAST
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.placement import at_risk, stages_at_risk
from recycle_plugin.core.vocabulary.roster import Roster
from recycle_plugin.core.vocabulary.topology import Topology


class WeakPoint(NamedTuple):
    """A weakness of a job. ``kind``: "warning" (can be mended) or "note". ``refused``: the user wants no such job."""

    kind: str
    text: str
    details: dict[str, Any]
    refused: bool = False


def weak_points(job: JobSpec, roster: Roster, shape: Topology) -> Iterator[WeakPoint]:
    """Yield losses that the job does not survive, and settings that slow it down. O(members)."""
    hosts, strict = {member.host for member in roster}, job.placement == "strict"
    alone, runs = len(hosts) == 1, "the coordinator"
    if len(hosts) < LEAST:
        runs = f"all workers, {runs}" if alone else runs
        text = f"single point of failure: host {roster.first.host} runs {runs}; its loss ends the job"
        yield WeakPoint("note", text, {})
    if shape.replicas == 1 and not job.log:
        text = "each stage has one worker, so the first loss ends the job: start the job with more replicas"
        yield WeakPoint("warning", text, {})
    for host, stages in stages_at_risk(roster).items() if strict or not alone else ():
        yield WeakPoint(
            "warning",
            'recycle.placement "strict": ' * strict + at_risk(host, stages, roster, shape),
            {"host": host, "stages": list(stages)},
            strict,
        )
    if job.clipping and job.clip == "sync" and job.stagger_optimizer:
        yield WeakPoint(
            "warning",
            f"gradient_clipping is {job.clipping:g}, so each step waits for the norm over all stages, and the "
            'optimizer is not staggered; if the norm is seldom over that, set recycle.clip to "validate"',
            {},
        )
