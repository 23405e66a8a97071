"""A job ends well only where all scripts have ended after the same step."""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.facts.ending import Ending
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.messages.activity import ELSEWHERE, WAITS, Activity
from recycle_plugin.core.messages.from_coordinator import Over
from recycle_plugin.core.messages.from_workers import Crashed, Exited, Heartbeat, Leaving, Left
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from tests.support.membership import agree
from tests.support.played import Played, ends


@pytest.mark.parametrize("order", ["said before", "said afterwards"])
def test_a_script_that_ends_earlier_than_the_others_ends_the_job(order):
    played = Played().first_step()
    going_on, through = Heartbeat(1, 1, 9, Activity(WAITS, "anything"), 2), Left(0, 0, False, 1)
    for message in (going_on, through) if order == "said before" else (through, going_on):
        played.outs.append(played.membership.receive(message, played.now))
    (end,) = ends(played)
    assert end.failed
    assert end.reason.startswith(
        "the training script of seat 0.0 (rank 0) ended after step 1, and that of seat 1.0 (rank 1) is in step 2: all "
        "scripts have to train the same number of steps"
    )
    assert [one.code for out in played.outs for whom, one in out.messages if isinstance(one, Over)] == [1]


def test_a_step_that_nobody_can_be_in_is_not_where_a_script_is_once_it_can_be():
    played = Played().first_step()
    played.membership.receive(Heartbeat(1, 1, 9, Activity(WAITS, "anything"), unstarted(1)), played.now)
    played.steps(range(2, 4), 0.1)
    played.outs.append(played.membership.receive(Left(0, 0, False, 3), played.now))
    assert not ends(played)


def test_scripts_that_end_alike_end_well_in_any_order():
    played = Played().first_step()
    for rank in (3, 0, 2, 1):
        played.membership.receive(Heartbeat(rank, 1, 9, Activity(ELSEWHERE, "the training script"), 1), played.now)
    for rank in (3, 0, 2, 1):
        played.outs.append(played.membership.receive(Left(rank, 0, False, 1), played.now))
    assert not ends(played) and played.events[-1].kind == "finished"


@pytest.mark.parametrize("step, code", [(1, 1), (0, 0)], ids=["behind the last step", "before it"])
def test_what_a_script_ends_with_behind_the_last_step_is_the_jobs_code(step, code):
    """In any order; and one that was lost on the way is not."""
    played = Played().first_step()
    played.membership.receive(Crashed(0, "ValueError: no", "", step), played.now)
    for rank in (3, 2, 1):
        played.outs.append(played.membership.receive(Left(rank, 0, False, 1), played.now))
    played.outs.append(played.membership.receive(Exited(0, 1, played.now), played.now))
    (finished,) = (event for event in played.events if event.kind == "finished")
    assert ("the script of seat 0.0 (rank 0) ended with ValueError: no" in finished.text) == bool(code), finished.text
    assert [one.code for out in played.outs for whom, one in out.messages if isinstance(one, Over)] == [code]


def test_who_leaves_as_planned_ends_no_script():
    played = Played().first_step()
    played.membership.receive(Leaving(0, "SIGTERM"), played.now)
    agree(played.membership, 1, dict.fromkeys(range(4), 1))
    played.outs.append(played.membership.receive(Left(0, 0, True, 1), played.now))
    played.membership.receive(Heartbeat(1, 1, 9, Activity(WAITS, "anything"), 2), played.now)
    assert not ends(played)


def test_the_end_is_said_once_also_where_somebody_goes_after_it():
    """One that was no member any more may still be there; supervisors hear the job's code again."""
    ending, out = Ending(), CoordinatorOutput()
    ending.finish(3, "", out)
    ending.finish(3, "", out)
    assert [event.kind for event in out.events] == ["finished"]
    assert [message for _, message in out.messages] == [Over(0), Over(0)]
