"""Placement: which hosts hold every replica of a stage, so that their loss loses the stage, and how to avoid it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.topology import Topology


def stages_at_risk(members: Iterable[Member]) -> dict[str, tuple[int, ...]]:
    """Return by host the stages that only this host holds, in order."""
    hosts: dict[int, set[str]] = {}
    for member in members:
        hosts.setdefault(member.seat.stage, set()).add(member.host)
    risky: dict[str, tuple[int, ...]] = {}
    for stage, holders in sorted(hosts.items()):
        if len(holders) == 1:
            (host,) = holders
            risky[host] = (*risky.get(host, ()), stage)
    return risky


def at_risk(host: str, stages: tuple[int, ...], members: Iterable[Member], shape: Topology) -> str:
    """Return one line: ``host`` holds every replica of ``stages``, what its loss does, and how to avoid that."""
    names = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    return (
        f"host {host} holds every replica of {names}: its loss ends the job; "
        f"{remedy(Counter(member.host for member in members), shape)}"
    )


def remedy(workers: Counter[str], shape: Topology) -> str:
    """Return advice on how the replicas of each stage get to different hosts. ``workers``: how many each host has."""
    host, most = workers.most_common(1)[0]
    limit, total = most_on_a_host(shape), workers.total()
    if most > limit:
        return (
            f"no placement helps while one host has more than {limit} of the {total} workers, and {host} has {most}: "
            "use hosts of more equal size"
        )
    axes = f"ProcessTopology(axes=['data', 'pipe'], dims=[{shape.replicas}, {shape.stages}])"
    return f'set recycle.placement to "spread", or give PipelineModule topology={axes}'


def most_on_a_host(shape: Topology) -> int:
    """Return the number of workers above which a host must hold every replica of some stage."""
    return shape.stages * (shape.replicas - 1)


def spread(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the rank of each slot that the launcher has filled, slot i on ``hosts[i]``; slot 0 keeps rank 0.

    DeepSpeed gives the replicas of a stage neighbouring ranks, so neighbouring ranks go to different hosts. If one host
    has more than half of the slots, its runs of neighbouring ranks are as short as possible. So no host with at most
    :func:`most_on_a_host` workers holds a whole stage, whatever the number of replicas, which is unknown when ranks are
    given out. Costs slots times hosts.
    """
    left = Counter(hosts)
    order: list[str] = []
    together = 0  # places at the end of ``order`` that are on the same host
    while len(order) < len(hosts):
        last = order[-1] if order else hosts[0]
        others = {host: count for host, count in left.items() if host != last and count}
        stays = not order or left[last] > together * sum(others.values())
        host = last if stays else max(others, key=others.__getitem__)
        together = together + 1 if host == last else 1
        order.append(host)
        left[host] -= 1
    ranks = {host: iter([rank for rank, where in enumerate(order) if where == host]) for host in left}
    return tuple(next(ranks[host]) for host in hosts)
