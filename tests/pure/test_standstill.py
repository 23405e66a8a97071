"""Where everybody waits for each other, all meet again once, and then the job ends and says who waited for whom."""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector
from recycle_plugin.core.coordinator.facts.wait_graph import wait_graph
from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, LONGEST, MOST, WAITS, Activity, awaited
from recycle_plugin.core.messages.from_workers import Heartbeat
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, Roster
from tests.support.membership import agree, computes, step
from tests.support.played import DEADLINE_S, HEARTBEAT_S, Played, ends, generations


def all_wait(played: Played) -> None:
    played.at = {
        0: awaited("grad 0.1@2", Seat(0, 1)),
        1: Activity(WAITS, "the commit of step 2"),
        2: awaited("act 0.1@2", Seat(0, 0), again=True),
        3: Activity(WAITS, "the commit of step 2"),
    }


def test_where_everybody_waits_all_meet_again_once_and_then_the_job_ends_with_the_graph():
    played = Played().first_step()
    all_wait(played)
    played.live_for(2 * DEADLINE_S - 0.5)
    assert played.said == []
    played.live_for(1.0)
    assert [len(each) for each in generations(played)] == [4] and not ends(played)
    (waits,) = (event for event in played.events if event.kind == "wait_graph")
    assert waits.details["edges"] == [
        {
            "who": ["0.0"],
            "at": WAITS,
            "what": "grad 0.1@2 from seat 0.1",
            "whom": ["0.1"],
            "for_s": pytest.approx(10.0, abs=0.5),
        },
        {
            "who": ["1.0", "1.1"],
            "at": WAITS,
            "what": "the commit of step 2",
            "whom": ["0.0", "0.1"],
            "for_s": pytest.approx(10.0, abs=0.5),
        },
        {
            "who": ["0.1"],
            "at": WAITS,
            "what": "act 0.1@2 from seat 0.0, once more",
            "whom": ["0.0"],
            "for_s": pytest.approx(10.0, abs=0.5),
        },
    ]
    agree(played.membership, 1, dict.fromkeys(range(4), 1))
    for rank in range(4):
        played.done[rank] += 1
    played.live_for(2 * DEADLINE_S - 0.5)
    assert not ends(played)
    played.live_for(1.0)
    (end,) = ends(played)
    assert end.failed and "once more since step 1 was committed" in end.reason
    assert "seats 1.0 (rank 1), 1.1 (rank 3) wait for the commit of step 2 for" in end.reason
    assert "which seats 0.0 (rank 0), 0.1 (rank 2) have not reached" in end.reason


def test_the_second_time_counts_from_when_all_had_met_again():
    """Also where nobody has done anything since: what is sent once more may be under way."""
    played = Played().first_step()
    all_wait(played)
    played.live_for(2 * DEADLINE_S + 0.5)
    agree(played.membership, 1, dict.fromkeys(range(4), 1))
    played.live_for(2 * DEADLINE_S - 0.5)
    assert not ends(played)
    played.live_for(1.0)
    (end,) = ends(played)
    assert "all workers have waited for 10.2 s, once more" in end.reason, end.reason


@pytest.mark.parametrize(
    "wait, missing",
    [
        (Activity(WAITS, "all_reduce among ranks 0, 2", ranks=(0, 2)), "seat 0.1 (rank 2) has"),
        (Activity(WAITS, "a sum", ranks=(0, 1, 2, 3)), "seats 1.0 (rank 1), 0.1 (rank 2), 1.1 (rank 3) have"),
        (Activity(WAITS, "a sum among ranks 0, 2"), "seats 1.0 (rank 1), 0.1 (rank 2), 1.1 (rank 3) have"),
        (Activity(WAITS, "a batch from seat 0.1"), "seats 1.0 (rank 1), 0.1 (rank 2), 1.1 (rank 3) have"),
    ],
    ids=str,
)
def test_a_wait_names_by_its_fields_for_whom_and_not_by_its_words(wait, missing):
    played = Played().first_step()
    all_wait(played)
    played.at[0] = wait
    played.live_for(2 * DEADLINE_S + 0.5)
    (waits,) = (event for event in played.events if event.kind == "wait_graph")
    assert f"which {missing} not reached" in waits.text.split("; seat")[0], waits.text


def test_after_a_commit_it_may_happen_again():
    played = Played().first_step()
    for number in range(1, 4):
        all_wait(played)
        played.live_for(2 * DEADLINE_S + 0.5)
        agree(played.membership, number, dict.fromkeys(range(4), number))
        step(played.membership, number, number + 1)
        for rank in range(4):
            played.done[rank] += 1
    assert len(generations(played)) == 3 and not ends(played)


@pytest.mark.parametrize(
    "other", [computes("1F0.1@2"), Activity(ELSEWHERE, "the training script")], ids=lambda other: other[0]
)
def test_as_long_as_one_does_something_nobody_stands_still(other):
    played = Played(busy={2}).first_step()
    all_wait(played)
    played.at[2] = other
    played.live_for(3 * DEADLINE_S)
    assert played.events == []


def test_a_wait_after_a_silence_is_a_new_one():
    """What was under way may still come."""
    played = Played().first_step()
    all_wait(played)
    played.live_for(2 * DEADLINE_S - 3)
    played.gone = {1, 3}
    played.live_for(HEARTBEAT_S - 0.5)
    played.gone = set()
    played.live_for(2 * DEADLINE_S - 1)
    assert played.events == []


def test_the_workers_of_a_seat_wait_for_those_of_their_seat_that_do_not_wait_for_the_same():
    held = [Member(rank, Seat(rank // 2, 0), "here", "host", shard=rank % 2) for rank in range(4)]
    roster, detector = Roster(held), FailureDetector()
    detector.admit(roster.workers)
    for rank, at in enumerate([COMPUTES, WAITS, WAITS, WAITS]):
        detector.heartbeat(Heartbeat(rank, 1, 0, Activity(at, "0F0.0@1", held[rank].seat)))
    whom = {tuple(each.rank for each in edge.who): edge.whom for edge in wait_graph(roster, detector)}
    assert whom == {(0,): (), (1,): (held[0],), (2, 3): tuple(held[2:])}


def test_a_group_too_large_to_be_sent_is_sent_as_all():
    ranks = tuple(range(MOST + 1))
    assert Activity.of(WAITS, Activity(WAITS, "a sum", ranks=ranks)).ranks == ()
    assert Activity.of(WAITS, Activity(WAITS, "a sum", ranks=ranks[1:])).ranks == ranks[1:]
    assert Activity.of(ELSEWHERE, lambda: "x" * (LONGEST + 1)) == Activity(ELSEWHERE, "x" * LONGEST)
