"""Which boundaries of a pipeline are logged (recycle.log.boundaries): boundary b is between stages b and b + 1.

Stages with no logged boundary between them form one *group*. Boundary tensors inside a group are in no log, so a loss
of one of its stages needs all of them to replay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from recycle_plugin.core.vocabulary.roster import Roster

AUTO, ALL, HOSTS = "auto", "all", "hosts"


def at_start(boundaries: str | Sequence[int], hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the boundaries that a job logs from its start, in order: those of a list, all, or those between hosts. For
    ``auto`` they are all, until the job chooses. ``hosts``: of each stage. Raises ValueError for other settings.
    """
    everywhere = range(len(hosts) - 1)
    if not isinstance(boundaries, str):
        if wrong := [each for each in boundaries if each not in everywhere]:
            raise ValueError(f"there is no boundary {wrong[0]}: {_those_of(len(hosts))}")
        return tuple(sorted(set(boundaries)))
    if boundaries not in (AUTO, ALL, HOSTS):
        raise ValueError(f"boundaries is {boundaries!r}, and it has to be auto, all, hosts or a list")
    between = enumerate(pairwise(hosts))
    return tuple(at for at, (one, other) in between if boundaries != HOSTS or one != other)


def _those_of(stages: int) -> str:
    match stages:
        case 1:
            return "one stage has none"
        case 2:
            return "2 stages have only 0"
    return f"{stages} stages have 0 to {stages - 2}"


def stage_hosts(roster: Roster) -> tuple[str, ...]:
    """Return the hosts of each stage's workers, in the order of their replicas."""
    hosts: dict[int, list[str]] = {}
    for seat in sorted(roster.seats):
        hosts.setdefault(seat.stage, []).append(roster.holding(seat).host)
    return tuple(", ".join(hosts[stage]) for stage in sorted(hosts))


def groups(logged: Collection[int], stages: int) -> tuple[tuple[int, int], ...]:
    """Return the groups of stages, each as (its first, its last + 1)."""
    return tuple(pairwise((0, *(each + 1 for each in sorted(logged)), stages)))


def in_words(logged: Collection[int], stages: int) -> str:
    """Return text that names the logged boundaries and the stages that replay together."""
    which = ", ".join(f"{each}|{each + 1}" for each in sorted(logged)) or "no boundary"
    together = [f"{first} to {end - 1}" for first, end in groups(logged, stages) if end - first > 1]
    if not together:
        return f"logged: {which}; each stage replays alone"
    return f"logged: {which}; stages {' and '.join(together)} replay together"
