"""What workers are told of a generation: who all are, and where those near are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.messages.encoding import HEAD, decode, encode
from recycle_plugin.core.messages.from_coordinator import FirstGeneration, Generation, Run, WhereNear
from recycle_plugin.core.messages.generation_forms import GenerationForEach, numbers, runs, whole
from recycle_plugin.core.messages.typed import Unreadable
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member

ON_A_HOST = 8


def generation(replicas: int, stages: int, shards: int = 1) -> Generation:
    """The ranks of a host hold stages of one replica, and of each the shards."""
    members = []
    for rank in range(replicas * stages * shards):
        place, shard = divmod(rank, shards)
        host = f"node{rank // ON_A_HOST}"
        members.append(Member(rank, Seat(*divmod(place, stages)), f"tcp://{host}:{40_000 + rank}", host, 0, shard))
    return Generation(0, tuple(members), 0, "start", 1.5)


def hosts(of: Generation) -> dict[str, int]:
    return {name: number for number, name in enumerate(sorted({each.host for each in of.members}))}


def told(of: Generation, member: Member) -> Generation:
    heard = whole(decode(encode(GenerationForEach(of, hosts(of)).first(member.seat, member.shard))))
    assert isinstance(heard, Generation), heard
    return heard


@given(st.lists(st.integers(-5, 5) | st.integers(-(1 << 40), 1 << 40)))
def test_any_numbers_come_back(given_numbers):
    assert [*numbers(runs(given_numbers))] == given_numbers


@pytest.mark.parametrize("shards", (1, 2))
def test_each_hears_who_all_are_and_where_those_beside_it_are(shards):
    full = generation(3, 5, shards)
    for own in full.members:
        heard = told(full, own)
        assert replace(heard, members=()) == replace(full, members=())
        for each, real in zip(heard.members, full.members, strict=True):
            assert replace(each, host="", address="") == replace(real, host="", address="")
            apart = abs(real.seat.stage - own.seat.stage)
            beside = (apart <= 1 or apart == 4) and real.shard == own.shard  # the ends of 5 stages draw alike
            assert each.address == real.address * (beside or real.seat == own.seat)
        assert len({(each.host, real.host) for each, real in zip(heard.members, full.members)}) == len(hosts(full))


def test_who_is_no_member_hears_where_every_shard_is():
    full = generation(2, 4, 2)
    heard = whole(GenerationForEach(full, hosts(full)).first(Seat(0, 0), None))
    assert {each.seat.stage for each in heard.members if each.address} == {0, 1, 3}
    assert heard.roster.addresses == {each.address for each in full.members if each.seat.stage != 2}


def test_nothing_is_sent_to_somebody_of_whom_it_is_not_told_where():
    roster = told(generation(2, 4), generation(2, 4).members[0]).roster
    assert roster.address(Seat(1, 1)) == "tcp://node0:40005" and roster.at("") is None and "" not in roster.addresses
    with pytest.raises(AssertionError, match=r"seat 1\.2 is not near"):
        roster.address(Seat(1, 2))


def test_who_comes_back_is_on_a_host_of_the_same_number():
    """Who is told of it alone, and who is told of all, take the same workers for neighbours on a host."""
    before = generation(2, 8)
    back = replace(before.members[3], incarnation=1, address="tcp://node1:50000", host="node1")
    after = replace(before, number=1, members=tuple(back if each.rank == 3 else each for each in before.members))
    change = decode(encode(GenerationForEach(after, hosts(after)).changed(before)))
    heard = change.behind(told(before, before.members[2]))
    assert heard == replace(told(after, before.members[2]), number=1)
    assert heard.members[3] == replace(back, host="1")


def test_a_job_of_twelve_thousand_is_told_in_megabytes():
    full = generation(64, 192)
    each = GenerationForEach(full, hosts(full))
    sizes = [len(encode(each.first(member.seat, member.shard))) for member in full.members[: 2 * 192]]
    assert max(sizes) < 2048 and 50 * max(sizes) < len(encode(full))


@pytest.mark.parametrize(
    "wrong",
    (
        lambda first: replace(first, everyone=first.near[0]),
        lambda first: replace(first, near=(first.everyone,)),
        lambda first: replace(first, everyone=b"?" * HEAD.size),
        lambda first: replace(first, near=(encode(WhereNear((Run(0, 2),), ("a",))),)),
        lambda first: replace(
            first, everyone=encode(replace(decode(first.everyone), shards=(Run(0, 1 << 60), Run(0, -(1 << 60)))))
        ),
    ),
)
def test_nonsense_is_no_generation_and_takes_no_memory(wrong):
    full = generation(2, 2)
    first = GenerationForEach(full, hosts(full)).first(Seat(0, 0), 0)
    assert isinstance(first, FirstGeneration) and isinstance(whole(wrong(first)), Unreadable)
