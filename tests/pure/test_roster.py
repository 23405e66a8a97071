"""Who takes part, who holds what, and who is given up with whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import FailureDomain, Member, Roster, WorkerId

SHARDS, REPLICAS, STAGES = 2, 3, 2


def member(rank: int, incarnation: int = 0) -> Member:
    place, shard = divmod(rank, SHARDS)
    return Member(
        rank,
        Seat(place // STAGES, place % STAGES),
        f"tcp://a:{rank}.{incarnation}",
        f"host{rank // 4}",
        incarnation,
        shard,
    )


ALL = Roster(tuple(map(member, range(SHARDS * REPLICAS * STAGES))))
alive = st.sets(st.sampled_from([one.worker for one in ALL])).map(lambda gone: ALL.without(gone))


@given(alive, st.randoms())
def test_every_answer_is_what_a_search_of_the_members_finds(roster, random):
    shuffled = list(roster.members)
    random.shuffle(shuffled)
    assert Roster(tuple(shuffled)) == roster and len(roster) == len(shuffled)
    assert list(roster) == sorted(shuffled, key=lambda one: one.rank)
    assert roster.ranks == {one.rank for one in shuffled} and set(roster.workers) == {one.worker for one in shuffled}
    assert set(roster.seats) == {one.seat for one in shuffled}
    assert set(roster.addresses) == {one.address for one in shuffled}
    for one in ALL:
        here = one in shuffled
        assert (
            roster.member(one.worker) is None,
            roster.holder(one.seat, one.shard) is None,
            roster.at(one.address) is None,
        ) == (not here,) * 3
        assert (
            not here or roster.member(one.worker) == roster.holder(one.seat, one.shard) == roster.at(one.address) == one
        )
        assert list(roster.group(one.seat)) == sorted(
            (other for other in shuffled if other.seat == one.seat), key=lambda other: other.shard
        )
    for stage in range(STAGES):
        assert [one.rank for one in roster.stage(stage)] == sorted(
            one.rank for one in shuffled if one.seat.stage == stage
        )
    assert roster.live_stages == tuple(sorted({one.seat.stage for one in shuffled}))
    for stage in roster.live_stages:
        for shard in range(SHARDS):
            peers = sorted(one.rank for one in shuffled if (one.seat.stage, one.shard) == (stage, shard))
            assert [one.rank for one in roster.peers(stage, shard)] == peers
            assert not peers or roster.first_of(stage, shard).rank == peers[0]
    shards = sorted({one.shard for one in shuffled})
    assert [list(group) for group in roster.counterparts] == [
        sorted((one for one in shuffled if one.shard == shard), key=lambda one: one.seat) for shard in shards
    ]
    for shard in range(SHARDS):
        assert roster.stages((1, 0, 1), shard) == tuple(one for one in roster if one.shard == shard)
    assert roster.stages((7,)) == ()
    for replica in range(REPLICAS):
        assert set(roster.replica(replica)) == {one for one in shuffled if one.seat.replica == replica}


def test_half_a_seat_has_no_work():
    roster = ALL.without({WorkerId(2)})
    assert roster.working == frozenset(ALL.seats) - {ALL.members[2].seat}


@given(alive, alive)
def test_what_joins_and_leaves_makes_one_roster_of_the_other(before, after):
    joins, leaves = after.joins(before), after.leaves(before)
    assert Roster((*before.without({one.worker for one in leaves}), *joins)) == after
    assert not {one.worker for one in joins} & before.workers and not {one.worker for one in leaves} & after.workers


def test_the_next_incarnation_of_a_rank_is_another_worker():
    back = member(3, incarnation=1)
    after = Roster((*ALL.without({WorkerId(3)}), back))
    assert after.joins(ALL) == (back,) and after.leaves(ALL) == (member(3),)
    assert after.member(WorkerId(3)) is None and after.member(WorkerId(3, 1)) == back and after.ranks == ALL.ranks


def test_first_is_the_lowest_rank_alive():
    assert ALL.first.rank == 0 and ALL.without({WorkerId(0), WorkerId(1)}).first.rank == 2
    with pytest.raises(IndexError):
        _ = Roster().first


@pytest.mark.parametrize(
    "twice, said",
    [(member(3, incarnation=1), "the rank 3"), (Member(99, Seat(1, 1), "", "h", 0, 1), "the seat and shard")],
)
def test_nobody_has_what_another_has(twice, said):
    with pytest.raises(ValueError, match=said):
        Roster((*ALL, twice))


@pytest.mark.parametrize(
    "domain, ranks",
    [(FailureDomain.WORKER, [6]), (FailureDomain.SEAT, [6, 7]), (FailureDomain.REPLICA, [6, 4, 5, 7])],
    ids=str,
)
def test_who_is_given_up_with_whom(domain, ranks):
    assert [one.rank for one in domain.of(member(6), ALL)] == ranks
    alone = ALL.without({WorkerId(rank) for rank in (4, 5, 7)})
    assert domain.of(member(6), alone) == (member(6),)
