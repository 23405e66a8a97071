"""Which hosts hold every replica of a stage: losing one of those loses the stage."""

from __future__ import annotations

from typing import Iterable

from recycle_plugin.core.protocol import Member


def stages_at_risk(members: Iterable[Member]) -> dict[str, tuple[int, ...]]:
    """For each host that is the only one to hold some stages: those stages, in order."""
    hosts: dict[int, set[str]] = {}
    for member in members:
        hosts.setdefault(member.seat.stage, set()).add(member.host)
    risky: dict[str, tuple[int, ...]] = {}
    for stage, holders in sorted(hosts.items()):
        if len(holders) == 1:
            (host,) = holders
            risky[host] = (*risky.get(host, ()), stage)
    return risky


def at_risk(host: str, stages: tuple[int, ...]) -> str:
    """What that means, and what to do about it, in a line."""
    names = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    return (
        f"host {host} holds every replica of {names}: its loss ends the job; give the replicas of a stage to different hosts, "
        "for instance with ProcessTopology(axes=['data', 'pipe'], …)"
    )
