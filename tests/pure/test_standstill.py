"""Where everybody waits for each other, all meet again once, and then the job ends and says who waited for whom."""

from __future__ import annotations

import pytest

from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, WAITS
from tests.support.membership import agree, step
from tests.support.played import DEADLINE_S, HEARTBEAT_S, Played, ends, generations


def all_wait(played: Played) -> None:
    played.at = {
        0: (WAITS, "grad 0.1@2 from seat 0.1"),
        1: (WAITS, "the commit of step 2"),
        2: (WAITS, "act 0.1@2 from seat 0.0, once more"),
        3: (WAITS, "the commit of step 2"),
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
    "what, missing",
    [
        ("all_reduce among ranks 0, 2", "seat 0.1 (rank 2) has"),
        (
            "the connections among ranks 0, 2; missing of 2 are number 1 for all_reduce among ranks 0, 2",
            "seat 0.1 (rank 2) has",
        ),
        ("all_reduce among ranks 0, 1, 2, 3", "seats 1.0 (rank 1), 0.1 (rank 2), 1.1 (rank 3) have"),
        ("barrier among ranks 0, 1".ljust(200, "0"), "seats 1.0 (rank 1), 0.1 (rank 2), 1.1 (rank 3) have"),
    ],
)
def test_a_collective_waits_for_members_of_its_group_only(what, missing):
    """A name that was cut off does not have all of them."""
    played = Played().first_step()
    all_wait(played)
    played.at[0] = (WAITS, what)
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
    "other", [(COMPUTES, "1F0.1@2"), (ELSEWHERE, "the training script")], ids=lambda other: other[0]
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
