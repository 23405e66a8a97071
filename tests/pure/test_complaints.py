"""The coordinator's state machine: connections between live workers that break."""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.from_coordinator import End, Fence, Generation
from recycle_plugin.core.messages.from_workers import Exited, Missing
from tests.support.membership import agree, said, started, step


def fails(membership: Membership, generation: int, source: str, rank: int = 1) -> CoordinatorOutput:
    """Seat 1.0 says so, or that of another ``rank``; where all meet again, they do."""
    out = membership.receive(Missing(rank, generation, "what it waits for", source), 0.0)
    if said(out, Generation):
        agree(membership, generation + 1, dict.fromkeys(range(4), membership.committed))
    return out


@pytest.mark.parametrize("source", ["0.0", ""], ids=["tensor", "collective"])
def test_all_meet_again_where_a_connection_breaks_and_each_commit_gives_new_tries(source):
    membership = started()
    for generation in range(6):
        (met,) = said(fails(membership, generation, source), Generation)
        assert len(met.members) == 4 and membership.lost == set()
        if generation % 2:
            step(membership, generation + 1, membership.committed + 1)
    assert not fails(membership, 3, source).messages, "an older membership's connection is nobody's business"
    assert not fails(membership, 6, "2.0").messages, "nor is that to a worker which is none"


@pytest.mark.parametrize("source, lost", [("0.0", {0}), ("", set())], ids=["tensor", "collective"])
def test_where_that_does_not_help_the_one_that_is_not_heard_goes_and_the_job_ends_where_nobody_knows_which(
    source, lost
):
    membership = started()
    for generation in range(2):
        fails(membership, generation, source)
    out = membership.receive(Missing(1, 2, "what it waits for", source), 0.0)
    assert {worker.rank for worker in membership.lost} == lost and {fence.rank for fence in said(out, Fence)} == lost
    reasons = [end.reason.partition(" between")[0] for end in said(out, End)]
    assert reasons == (
        []
        if lost
        else [
            "seat 1.0 (rank 1) could not finish what it waits for, 3 times, and all workers that take part in "
            "it are alive: check the network"
        ]
    )


def given_up(out: CoordinatorOutput) -> set[int]:
    return {fence.rank for fence in said(out, Fence)}


def test_who_misses_something_from_several_goes_before_them():
    """Seat 1.0 from 0.0 and 0.1, of whom nobody else complains; each commit makes good what was before it."""
    membership = started()
    for generation, source in enumerate(("0.0", "0.1", "1.1")):
        assert not given_up(fails(membership, generation, source)) or generation == 2
    assert {worker.rank for worker in membership.lost} == {1}
    membership = started()
    fails(membership, 0, "0.1")
    step(membership, 1, 1)
    for generation in (1, 2):
        assert not given_up(fails(membership, generation, "0.0"))
    assert given_up(fails(membership, 3, "0.0")) == {0}


def test_whom_several_miss_something_from_goes():
    membership = started()
    for generation, rank in enumerate((1, 2, 3)):
        out = fails(membership, generation, "0.0", rank)
    assert given_up(out) == {0}


def test_who_has_cost_one_peer_and_still_misses_something_is_the_next_to_go():
    membership = started(replicas=4, stages=1)
    for generation in range(3):
        out = fails(membership, generation, "0.0")
    assert given_up(out) == {0}
    agree(membership, 3, dict.fromkeys((1, 2, 3), 0))
    assert given_up(membership.receive(Missing(1, 3, "what it waits for", "2.0"), 0.0)) == {1}


def test_who_does_not_hear_itself_goes_whoever_complains():
    """It also says so while all meet again, which then changes nothing; a worker that waits for it complains of
    another.
    """
    membership = started()
    assert not given_up(membership.receive(Missing(3, 0, "act", "0.1"), 0.0))
    assert not membership.receive(Missing(1, 0, "what peers send", "1.0"), 0.0).messages, "all meet already"
    assert not membership.receive(Missing(2, 0, "what peers send", "0.0"), 0.0).messages, (
        "what others miss from each other meanwhile is of an older membership"
    )
    agree(membership, 1, dict.fromkeys(range(4), 0))
    out = membership.receive(Missing(3, 1, "act", "0.1"), 0.0)
    assert given_up(out) == {1}
    (lost,) = [event.text for event in out.events if event.kind == "lost"]
    assert "seat 1.0 (rank 1) misses its own data" in lost


def test_a_seat_that_cannot_be_is_nobodys_business():
    assert not started().receive(Missing(1, 0, "what it waits for", "the other one"), 0.0).messages


def test_a_stages_last_worker_stays_and_who_does_not_hear_it_goes():
    """Seat 0.1 is lost, so that 1.1 is the last one of stage 1."""
    membership = started()
    membership.receive(Exited(2, -9, 0.0), 0.0)
    for generation in range(1, 4):
        agree(membership, generation, dict.fromkeys((0, 1, 3), 0))
        out = fails(membership, generation, "1.1")
    assert given_up(out) == {1}
    assert "which is the last one of its stage" in next(event.text for event in out.events if event.kind == "lost")
