"""Who sits on which host: no host holds every replica of a stage where that can be had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.placement import at_risk, most_on_a_host, spread, stages_at_risk
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.topology import Topology


def members(hosts: list[str], replicas: int) -> list[Member]:
    """``hosts``: of each rank.  DeepSpeed's own seats."""
    return [Member(rank, Seat(rank % replicas, rank // replicas), "", host) for rank, host in enumerate(hosts)]


def dealt(hosts: list[str]) -> list[str]:
    """The host of each rank, once ranks are dealt out."""
    return [hosts[place] for _, place in sorted((rank, place) for place, rank in enumerate(spread(hosts)))]


def test_stages_at_risk():
    apart = [
        Member(0, Seat(0, 0), "", "a"),
        Member(1, Seat(1, 0), "", "b"),
        Member(2, Seat(0, 1), "", "a"),
        Member(3, Seat(1, 1), "", "a"),
    ]
    assert stages_at_risk(apart) == {"a": (1,)}


@pytest.mark.parametrize(
    "hosts, order",
    [
        ("aabb", "abab"),
        ("aaabbb", "ababab"),
        ("aabbcc", "abcabc"),
        ("aaaaab", "aaabaa"),
        ("aaaa", "aaaa"),
        ("abbbb", "abbbb"),
    ],
)
def test_neighbouring_ranks_go_to_different_hosts(hosts, order):
    assert "".join(dealt(list(hosts))) == order


def sizes(total: int) -> Iterator[tuple[int, ...]]:
    """All ways to deal ``total`` places to hosts in a row."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        yield from ((first, *rest) for rest in sizes(total - first))


@pytest.mark.parametrize("workers", range(2, 13))
def test_no_host_holds_a_stage_unless_it_has_too_many_workers(workers):
    """All sizes of hosts, all numbers of replicas; places that are dealt out stay on their hosts, the first with rank
    0.
    """
    for each in sizes(workers):
        hosts = [str(number) for number, size in enumerate(each) for _ in range(size)]
        ranks = spread(hosts)
        assert sorted(ranks) == list(range(workers)) and ranks[0] == 0
        for replicas in (count for count in range(2, workers + 1) if workers % count == 0):
            shape = Topology(replicas, workers // replicas, 1)
            assert bool(stages_at_risk(members(dealt(hosts), replicas))) == (max(each) > most_on_a_host(shape)), (
                each,
                replicas,
            )


@pytest.mark.parametrize(
    "hosts, replicas, says",
    [
        (
            "aabb",
            2,
            "set recycle.placement to \"spread\", or give PipelineModule topology=ProcessTopology(axes=['data', "
            "'pipe'], dims=[2, 2])",
        ),
        (
            "aaab",
            2,
            "no placement helps while one host has more than 2 of the 4 workers, and a has 3: use hosts of more equal "
            "size",
        ),
        (
            "aaaa",
            2,
            "no placement helps while one host has more than 2 of the 4 workers, and a has 4: use hosts of more equal "
            "size",
        ),
    ],
)
def test_what_to_do_about_it(hosts, replicas, says):
    found = members(list(hosts), replicas)
    assert (
        at_risk("a", (0,), found, Topology(replicas, len(hosts) // replicas, 1))
        == f"host a holds every replica of stage 0: its loss ends the job; {says}"
    )
