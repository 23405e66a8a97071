"""Who is lost when scripts are through: its stage is replayed all the same, and its next process runs to the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator import losses
from recycle_plugin.core.messages.from_coordinator import End, Generation, MayGo, Over, Replay, Restart
from recycle_plugin.core.messages.from_workers import Left, LogBroken, Terminate, Through, Unreplayable
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario, Trouble
from tests.support.membership import said
from tests.support.replaying import come, decisions, has_replayed, having_lost, logging, lose

LATER = WorkerId(3, 1)  # of stage 1, who follows where rank 2 is not started again any more


def goes(membership, *ranks: int) -> list:
    """Their scripts are through, and they go; what was said."""
    outs = []
    for rank in ranks:
        outs.append(membership.receive(Through(rank), 1.0))
        assert said(outs[-1], MayGo) == [MayGo(2)]
        outs.append(membership.receive(Left(rank, 0, False, 2), 1.0))
    return outs


def comes_back(membership) -> None:
    """The next process of stage 1, of whoever was lost last, replays it."""
    (replay,) = said(come(membership, LATER), Replay)
    assert replay.helpers == () and replay.stages == (1,)
    out = has_replayed(membership, LATER)
    assert not said(out, Generation) and [event.kind for event in out.events][-1] == "rejoined"


def last_words(out) -> list[str]:
    return [event.text for event in out.events if event.kind in ("end", "finished")]


def test_who_is_through_goes_at_once():
    membership = logging()
    assert last_words(goes(membership, 0, 1, 2, 3)[-1]) == ["all workers have left after step 2"]


def test_who_is_through_waits_while_a_stage_is_replayed():
    membership = having_lost(2, 3)
    for rank in (0, 1):
        assert not said(membership.receive(Through(rank), 1.0), MayGo)
    come(membership)
    out = has_replayed(membership)
    assert said(out, MayGo) == [MayGo(2)] * 2 and "rejoined" in [event.kind for event in out.events]
    goodbyes = [membership.receive(Left(rank, 0, False, 2), 1.0) for rank in (0, 1)]
    assert not any(map(last_words, goodbyes))
    back = membership.receive(Through(2, incarnation=1), 1.0)
    assert said(back, MayGo) == [MayGo(2)]
    out = membership.receive(Left(2, 0, False, 2, incarnation=1), 1.0)
    assert said(out, Over) == [Over(0)] and last_words(out) == ["all workers have left after step 2"]


def test_a_stage_that_is_lost_when_all_others_have_gone_is_replayed_alone():
    membership = logging()
    goes(membership, 0, 1)
    out = lose(membership, 2, 3)
    assert not last_words(out) and not said(out, Generation)
    assert [each.rank for each in said(out, Restart)] == [3]
    comes_back(membership)
    membership.receive(Through(3, incarnation=1), 1.0)
    out = membership.receive(Left(3, 0, False, 2, incarnation=1), 1.0)
    assert said(out, Over) == [Over(0)] and last_words(out) == ["all workers have left after step 2"]


def test_a_stage_of_which_one_script_has_come_to_its_end_has_lost_nothing():
    membership = logging()
    goes(membership, 0, 1, 2)
    out = lose(membership, 3)
    assert said(out, Over) == [Over(0)] and not decisions(out)


@pytest.mark.parametrize("why", ("it is not durable", "a log that is needed lacks something", "it can't be replayed"))
def test_where_it_can_t_be_replayed_the_job_fails_once_all_others_are_through_and_says_so_once(why):
    membership = logging(durable=why != "it is not durable")
    if why == "a log that is needed lacks something":
        membership.receive(LogBroken(0, 2, "its disk is full"), 1.0)
    goes(membership, 0)
    out = lose(membership, 2, 3)
    if why == "it can't be replayed":
        come(membership, LATER)
        out = membership.receive(Unreplayable(3, "a file is damaged", 0, incarnation=1), 1.0)
    (decision,) = decisions(out)
    assert decision.details["way"] == "end" and not said(out, End) and not last_words(out)
    (out,) = goes(membership, 1)[1:]
    (text,) = last_words(out)
    assert said(out, Over) == [Over(1)] and text.startswith("the job ends: stage 1 has no live worker left")
    assert "checkpoint" in text


def test_an_end_that_is_asked_for_leaves_nobody_waiting_for_a_stage_behind_the_last_step():
    membership = logging()
    goes(membership, 0, 1)
    lose(membership, 2, 3)
    membership.receive(Terminate(0, "SIGTERM"), 1.0)
    out = membership.tick(2.0)
    assert said(out, Over) == [Over(1)] and len(last_words(out)) == 1


def test_regrouping_is_over_once_scripts_are_through():
    """Who is in its script's last lines need not report for a membership that nobody goes on in."""
    membership = having_lost(3)
    membership.receive(Through(0), 1.0)
    assert membership.regrouping is not None and not membership.regroup_overdue(1.0).messages


# --- simulated ----------------------------------------------------------------------------------------

LAST = campaign.REPLAY.job.steps
PAUSES = replace(campaign.REPLAY.job, between=((1, "save"), (LAST, "pause")), faults=())  # seat 0.0 has the longest


def killed(seat: Seat, after_ms: int) -> Scenario:
    """It dies so many milliseconds after the last step was applied."""
    at_us = max(span.end_us for span in campaign.run("x", PAUSES).spans) + after_ms * MILLISECOND
    return replace(PAUSES, troubles=(Trouble("kill", at_us, (seat,)),))


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_that_dies_with_the_last_step_comes_to_its_end(stage):
    fault = Fault.parse(f"kill 0.{stage} after {stage}STEP@{LAST}")
    outcome = campaign.run("x", replace(PAUSES, faults=(fault,)))
    assert not outcome.violations and any(" replayed: " in line for line in outcome.story)


@pytest.mark.parametrize("after_ms", (5, 100, 200, 400, 550))
def test_a_stage_that_dies_behind_the_last_step_comes_to_its_end(after_ms, monkeypatch):
    """Whether the others are there still, or some have gone, or all."""
    given = killed(Seat(0, 0), after_ms)
    outcome = campaign.run("x", given)
    assert not outcome.violations and any(" replayed: " in line for line in outcome.story)
    if after_ms >= 200:
        monkeypatch.setattr(losses, "_is_missed", lambda state, member: False)
        assert campaign.run("x", given).violations == (
            "no script of stage 0 has come to its end, and the job has not failed",
        )


def test_one_that_has_come_back_and_dies_is_followed_by_another():
    given = killed(Seat(0, 0), 400)
    outcome = campaign.run("x", replace(given, faults=(Fault.parse("kill 0.0#1 after 0F0.0@6"),)))
    assert not outcome.violations and sum("replayed: " in line for line in outcome.story) >= 1
