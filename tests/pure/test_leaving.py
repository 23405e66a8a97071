"""The coordinator's state machine: who leaves as planned, who says goodbye when all is done, and how that ends the job,
whoever dies meanwhile.
"""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.facts.output import SUPERVISORS, WORKERS
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, Collected, Committed, End, Generation, Over, Resume
from recycle_plugin.core.messages.from_workers import Exited, Leaving, Left, Ready, SurvivorReport, Terminate, Unguarded
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.control_view import ControlView, JobEnded
from tests.support.membership import agree, holds, job, member, resumed, said, started, step

ALL = Leaving(1, "time is over", all=True)


def test_a_planned_leave_holds_from_a_step_that_nobody_can_have_started():
    membership = started()
    step(membership, 0, 1)
    (generation,) = said(membership.receive(Leaving(3, "SIGTERM"), 0.0), Generation)
    assert generation.from_step == 4 and [m.rank for m in generation.members] == [0, 1, 2]
    for number in (2, 3):
        assert step(membership, 0, number) == [Committed(number)]
    assert resumed(agree(membership, 1, {0: 3, 1: 3, 2: 3})) == [(1, 3)]
    assert step(membership, 1, 4, [0, 1, 2]) == [Committed(4)]


def test_a_loss_before_a_planned_leave_comes_first_and_the_leave_is_planned_again():
    membership = started()
    membership.receive(Leaving(3, "SIGTERM"), 0.0)
    (generation,) = said(membership.receive(Exited(0, -9, 0.0), 0.0), Generation)
    assert generation.from_step == 0 and 3 in [m.rank for m in generation.members]
    out = agree(membership, generation.number, {1: 0, 2: 0, 3: 0})
    assert said(out, Resume) and [g.from_step for g in said(out, Generation)] == [3]


def test_a_leave_that_is_planned_again_waits_for_who_has_not_resumed_yet():
    """A worker may read both in one go: what holds at once, and where it goes on, are not forgotten for what holds
    later.
    """
    membership, line = started(), ControlView(1)
    membership.receive(Leaving(3, "SIGTERM"), 0.0)
    (at_once,) = said(membership.receive(Exited(0, -9, 0.0), 0.0), Generation)
    line.take(at_once)
    out = agree(membership, at_once.number, {1: 0, 2: 0, 3: 0})
    (resume,), (planned,) = said(out, Resume), said(out, Generation)
    for message in (resume, planned):
        line.take(message)
    assert line.interruption() is at_once and line.resume_of(at_once) is resume
    line.adopt(at_once)
    assert line.pending is planned and line.interruption() is None and line.number == at_once.number


def test_a_leave_that_follows_one_that_all_have_come_to_waits_for_who_has_not_resumed_yet():
    """Everybody has reported for the first; the second must not make anybody forget where that goes on."""
    membership, line = started(replicas=2), ControlView(1)
    (first,) = said(membership.receive(Leaving(0, "SIGTERM"), 0.0), Generation)
    line.take(first)
    for number in (1, 2):
        step(membership, 0, number)
    (resume,) = said(agree(membership, first.number, {1: 2, 2: 2, 3: 2}), Resume)
    (second,) = said(membership.receive(Leaving(3, "SIGTERM"), 0.0), Generation)
    for message in (resume, second):
        line.take(message)
    assert line.resume_of(first) is resume
    line.adopt(first)
    assert line.pending is second and line.number == first.number and line.interruption() is None


@pytest.mark.parametrize("gone", (True, False))
def test_a_leave_does_not_put_off_an_earlier_one_whose_step_has_come(gone):
    """Who leaves by that is gone, or on its way, while the others may still be in their scripts: the step that they
    come to is to be without it.
    """
    membership = Membership(6)
    for rank in range(6):
        membership.receive(Ready(member(rank, replicas=3), 0, job(replicas=3)), 0.0)
    agree(membership, 0, dict.fromkeys(range(6), 0))
    (first,) = said(membership.receive(Leaving(0, "SIGTERM"), 0.0), Generation)
    for number in (1, 2):
        step(membership, 0, number, range(6))
    assert first.from_step == 3 and membership.committed == 2
    if gone:
        membership.receive(Left(0, planned=True), 0.0)
    assert not said(membership.receive(Leaving(4, "SIGTERM"), 0.0), Generation)
    out = agree(membership, first.number, dict.fromkeys(range(1, 6), 2))
    (second,) = said(out, Generation)
    assert resumed(out) == [(first.number, 2)] and second.from_step == 5
    assert [one.rank for one in second.members] == [1, 2, 3, 5]


def ended_by_leaving() -> tuple[Membership, End]:
    """A job whose stage 1 would be empty without rank 3, which leaves; and how it is to end."""
    membership = started()
    membership.receive(Exited(2, -9, 0.0), 0.0)
    agree(membership, 1, {0: 0, 1: 0, 3: 0})
    (end,) = said(membership.receive(Leaving(3, "SIGTERM"), 0.0), End)
    return membership, end


def test_the_last_worker_of_a_stage_may_only_leave_with_the_job_which_has_not_come_to_its_end():
    _, end = ended_by_leaving()
    assert (end.failed, end.step, end.code) == (False, 3, TRY_AGAIN) and decode(encode(end)) == end


def test_the_launcher_gets_the_code_where_the_workers_left_with_it():
    for codes, expected in (((75, 75, 75), 75), ((0, 0, 0), 0)):  # the second: the script was through before that step
        membership, _ = ended_by_leaving()
        for rank, code in zip((0, 1, 3), codes):
            out = membership.receive(Left(rank, code), 0.0)
        assert out.messages == [(SUPERVISORS, Over(expected))]


def test_a_stage_that_dies_out_on_the_way_is_a_failure():
    membership, _ = ended_by_leaving()
    out = membership.receive(Exited(3, -9, 0.0), 0.0)
    assert [(whom, message.failed) for whom, message in out.messages if isinstance(message, End)] == [(WORKERS, True)]
    assert said(out, Over) == [Over(1)]


def test_an_end_carries_its_code_to_the_script():
    line = ControlView(0)
    line.take(End(0, "lost", True))
    with pytest.raises(JobEnded) as caught:
        line.check()
    assert caught.value.code == 1 and JobEnded("slow", False, TRY_AGAIN).code == TRY_AGAIN
    assert JobEnded("leave", False).code == 0


@pytest.mark.parametrize("first, more", [(Terminate(0, "SIGTERM"), Terminate(1, "SIGTERM")), (ALL, ALL)])
def test_termination_ends_the_job_once_at_a_commit_line(first, more):
    membership = started()
    (end,) = said(membership.receive(first, 0.0), End)
    assert (end.step, end.failed) == (3, False)
    assert said(membership.receive(more, 0.0), End) == []


def test_normal_exits_at_different_times_are_no_deaths():
    membership = started()
    step(membership, 0, 1)
    outs = [membership.receive(Left(rank), 0.0) for rank in range(4)]
    assert not any(said(out, Generation) for out in outs)
    assert said(outs[-1], Over) == [Over(0)]


def test_a_death_while_others_have_finished_their_script_ends_nothing():
    membership = started()
    step(membership, 0, 1)
    membership.receive(Left(0), 0.0)
    membership.receive(Left(1), 0.0)
    out = membership.receive(Exited(3, -9, 0.0), 0.0)
    assert not said(out, Generation) and not said(out, End)
    assert said(membership.receive(Left(2), 0.0), Over) == [Over(0)]


def test_a_death_while_the_others_say_goodbye_does_not_hold_them_up():
    """All steps are committed and the script is through; who has left will not report for the new membership."""
    membership = started()
    step(membership, 0, 1)
    membership.receive(Exited(3, -9, 0.0), 0.0)
    assert membership.regrouping == 1
    membership.receive(Left(0), 0.0)
    membership.receive(SurvivorReport(1, 1, 1, "plan", holds(1)), 0.0)
    out = membership.receive(SurvivorReport(2, 1, 1, "plan", holds(2)), 0.0)
    assert resumed(out) == [(1, 1)] and membership.regrouping is None
    for rank in (1, 2):
        out = membership.receive(Left(rank), 0.0)
    assert said(out, Over) == [Over(0)]


def test_a_second_death_while_the_others_say_goodbye_does_not_hold_them_up_and_is_no_good_end():
    """Nobody of stage 1 does what scripts do behind the last step: the job fails, once the others are through."""
    membership = started()
    step(membership, 0, 1)
    membership.receive(Exited(3, -9, 0.0), 0.0)
    membership.receive(Left(0), 0.0)
    membership.receive(SurvivorReport(1, 1, 1, "plan", holds(1)), 0.0)
    out = membership.connection_lost(WorkerId(2), 0.0)
    assert resumed(out) == [(1, 1)] and membership.regrouping is None
    assert not said(out, End)
    out = membership.receive(Left(1), 0.0)
    assert said(out, Over) == [Over(1)] and not membership.regroup_overdue(1.0).messages
    assert [event.text for event in out.events if event.kind in ("end", "finished")] == [
        "the job ends: stage 1 has no live worker left, so its script's work after step 1, the last one, is not "
        "done. No checkpoint was saved"
    ]


def test_a_death_when_all_others_have_left_is_no_failure():
    membership = started()
    step(membership, 0, 1)
    membership.receive(Exited(3, -9, 0.0), 0.0)
    for rank in (0, 1, 2):
        out = membership.receive(Left(rank), 0.0)
    assert said(out, Over) == [Over(0)] and membership.regrouping is None


def test_who_is_gone_without_a_goodbye_once_its_leave_holds_has_left():
    membership = started()
    membership.receive(Leaving(3, "SIGTERM"), 0.0)
    for number in (1, 2):
        step(membership, 0, number)
    agree(membership, 1, {0: 2, 1: 2, 2: 2})
    out = membership.connection_lost(WorkerId(3), 0.0)
    assert [event.kind for event in out.events] == ["left"] and not out.messages and not membership.lost
    (generation,) = said(membership.receive(Exited(0, -9, 0.0), 0.0), Generation)
    assert said(agree(membership, generation.number, {1: 2, 2: 2}), Generation) == [], (
        "nobody plans the leave once more"
    )


@pytest.mark.parametrize("gone", ([], [0], [0, 1]))
def test_a_death_at_a_planned_end_is_no_failure(gone):
    """The last of its stage, or the first to go at all: all steps up to the end are committed.

    Before anybody is through they may have to meet yet.
    """
    membership = started()
    (end,) = said(membership.receive(Terminate(0, "SIGTERM"), 0.0), End)
    for number in range(1, end.step):
        step(membership, 0, number)
    for rank in gone:
        membership.receive(Left(rank), 0.0)
    out = membership.connection_lost(WorkerId(2), 0.0)
    assert not said(out, End) and bool(said(out, Generation)) == (not gone)
    for rank in {0, 1, 3}.difference(gone):
        out = membership.receive(Left(rank), 0.0)
    assert said(out, Over) == [Over(0)]


@pytest.mark.parametrize("end", (None, End(5, "SIGTERM", failed=False), End(0, "no worker left", failed=True)))
def test_who_loses_the_coordinator_ends_whatever_was_planned(end):
    line = ControlView(1)
    if end is not None:
        line.take(end)
    assert line.lose_coordinator() == (end is None or not end.failed)
    with pytest.raises(JobEnded):
        line.check()
    assert not line.lose_coordinator()


def test_a_planned_leave_that_meets_a_death_makes_a_membership_without_both():
    """The one that leaves has gone before it could hear of the death, and of the membership that still counts on it."""
    membership = started()
    membership.receive(Leaving(0, "asked to"), 0.0)
    membership.receive(Exited(3, -9, 0.0), 0.0)
    out = membership.receive(Left(0, planned=True), 0.0)
    (generation,) = said(out, Generation)
    assert {member.rank for member in generation.members} == {1, 2} and membership.regrouping == generation.number


def test_a_planned_leave_that_meets_the_death_of_the_stages_last_other_worker_ends_the_job():
    membership = started()
    membership.receive(Leaving(0, "asked to"), 0.0)
    membership.receive(Exited(1, -9, 0.0), 0.0)
    (end,) = said(membership.receive(Left(0, planned=True), 0.0), End)
    assert end.failed and end.reason.startswith("stage 0 has no live worker left")


@pytest.mark.parametrize("order", ([0, 3, 1], [3, 0, 1]))
def test_who_was_to_leave_and_comes_to_its_scripts_end_before_leaves_no_stage_empty(order):
    """All steps are committed: nobody is needed for a membership that a death has made necessary on the way."""
    membership = started()
    membership.receive(Leaving(3, "SIGTERM"), 0.0)
    step(membership, 0, 1)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    outs = [membership.receive(Left(rank), 0.0) for rank in order]
    assert not any(said(out, End) for out in outs) and said(outs[-1], Over) == [Over(0)]


@pytest.mark.parametrize("ends", (Terminate(0, "a supervisor got SIGTERM"), Leaving(2, "SIGTERM")))
def test_where_a_guard_was_killed_a_planned_end_has_a_checkpoint_and_says_so(ends):
    """Launchers that end the job for it send SIGTERM to supervisors and workers, in whatever order: the stage's last
    worker may seem to leave by itself.
    """
    membership = started()
    membership.receive(Unguarded(3, 77), 0.0)
    (lost,) = [event for event in membership.receive(Exited(3, -9, 0.0), 0.0).events if event.kind == "lost"]
    assert "went with its guard, process 77, which was killed" in lost.text
    agree(membership, 1, {0: 0, 1: 0, 2: 0})
    (end,) = said(membership.receive(ends, 0.0), End)
    assert (end.failed, end.code) == (False, TRY_AGAIN)
    assert end.reason.endswith(", after the guard of rank 3, process 77, was killed")


def test_a_guard_that_is_killed_is_no_end():
    membership = started()
    out = membership.receive(Unguarded(3, 77), 0.0)
    assert not out.messages and membership.ended is None


def test_who_leaves_still_gets_the_norm_of_its_last_step_when_the_others_are_through_with_the_next():
    """It has heard nothing for a while, and then all at once; the others need it for no commit of later steps."""
    line = ControlView(1)
    for message in (
        Generation(2, (member(0), member(2)), 5, "leave", 0.0),
        Collected(4, "norm", {"0": 1.0, "1": 2.0}),
        Committed(4),
        Committed(5),
    ):
        line.take(message)
    assert line.collected(4, "norm") == {"0": 1.0, "1": 2.0}


def test_who_stays_keeps_no_norm_of_a_step_before_the_committed_one():
    line = ControlView(0)
    for message in (
        Generation(2, (member(0), member(2)), 5, "leave", 0.0),
        Collected(4, "norm", {"0": 1.0, "1": 2.0}),
        Committed(5),
    ):
        line.take(message)
    assert line.collected(4, "norm") is None
