"""Which boundaries of a pipeline are logged (recycle.log.boundaries): boundary b is between stages b and b + 1.

Stages with no logged boundary between them are one *group*: what crosses between them is in no log, so that a loss of
either needs both to replay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from recycle_plugin.core.vocabulary.roster import Roster

AUTO, ALL, HOSTS = "auto", "all", "hosts"


def at_start(boundaries: str | Sequence[int], hosts: Sequence[str]) -> tuple[int, ...]:
    """The boundaries that a job logs from its start on, in order: those of a list, all, those between hosts; and all
    where it is to choose them (``auto``) and has not yet.

    ``hosts``: where each stage is.  Raises ValueError for a setting that can't be.
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
    """Where each stage is: the hosts of its workers, in the order of their replicas."""
    hosts: dict[int, list[str]] = {}
    for seat in sorted(roster.seats):
        hosts.setdefault(seat.stage, []).append(roster.holding(seat).host)
    return tuple(", ".join(hosts[stage]) for stage in sorted(hosts))


def groups(logged: Collection[int], stages: int) -> tuple[tuple[int, int], ...]:
    """The groups of stages, each as its first and the one behind its last."""
    return tuple(pairwise((0, *(each + 1 for each in sorted(logged)), stages)))


def in_words(logged: Collection[int], stages: int) -> str:
    """The boundaries that are logged, and which stages replay together."""
    which = ", ".join(f"{each}|{each + 1}" for each in sorted(logged)) or "no boundary"
    together = [f"{first} to {end - 1}" for first, end in groups(logged, stages) if end - first > 1]
    if not together:
        return f"logged: {which}; each stage replays alone"
    return f"logged: {which}; stages {' and '.join(together)} replay together"
