"""What is told of workers that come back, on the hand-written run and a few seconds more."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.lab.commands import came_back, demo
from recycle_plugin.lab.runs import RunFailed, RunOutcome
from recycle_plugin.observability import report
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import sentence
from tests.support.run_folder import CAME, FAILED, FAULT_FREE, LOSSES, WHY, Read, resume, rewrite

CAUGHT_UP = {"event": "caught_up", "seat": "0.1", "rank": 2, "step": 8, "bytes": 1200, "followed_bytes": 400}
BACK = {"event": "rejoined", "seat": "0.1", "rank": 2, "incarnation": 1, "step": 10}


def commits(*times: float) -> list[dict]:
    return [{"time": at, "event": "committed", "step": step, "workers": 4} for step, at in enumerate(times, 10)]


def with_return(events: list[dict]) -> list[dict]:
    """0.1 is started again at 102.83, asks at 103.2, has the state at 103.5, and has work from step 10 on, at 104.4;
    step 10 takes 0.3 s, 11 to 13 take 0.2 s.
    """
    more = [
        {"time": 102.83, "event": "restart", "rank": 2, "incarnation": 0, "after_s": 1.0},
        {"time": 102.9, "event": "worker", "rank": 2, "pid": 2002, "incarnation": 1},
        {"time": 103.2, **CAME},
        {"time": 103.5, **CAUGHT_UP},
        resume(103.96, 8, 0.6),
        {"time": 104.4, **BACK},
        resume(104.4, 9, 1.0),
        *commits(104.65, 104.85, 105.05, 105.25),
    ]
    ended = [
        {"time": 105.3, "event": "left", "rank": 0},
        {"time": 105.3, "event": "finished", "text": "all workers have left after step 13", "step": 13},
    ]
    return sorted(({"text": "", **event} for event in [*events[:-2], *more, *ended]), key=lambda event: event["time"])


def lost_again(events: list[dict]) -> list[dict]:
    """... and 0.1 is lost once more, after step 13, and does not come back."""
    lost = {"seat": "0.1", "rank": 2, "how": "its connection broke", "seen_at": 105.26}
    more = [{"time": 105.26, "event": "lost", "text": "", **lost}, {"text": "", **resume(105.27, 13, 0.6)}]
    last = {"time": 105.7, "event": "committed", "text": "", "step": 14, "workers": 3}
    events = with_return(events)
    return [*events[:-2], *more, last, events[-1]]


SENTENCE = (
    "The job trained 13 steps in 5.25 s and came to its planned end; 1 of 4 workers was lost (0.1 in step 6, back "
    "after 1.59 s): 0.4 s passed from the loss to the next commit (an undisturbed step took 0.23 s), and "
    "throughput went from 34.78 to 20 samples/s (58%) and back to 40 (115%)."
)


def test_a_seat_is_live_again_and_throughput_is_that_since(folder):
    history = rewrite(folder, with_return)
    (absence,) = history.absences
    assert history.gone == {} and len(history.view.live) == 4 and history.returns == (absence,)
    assert (absence.seat, absence.back_step, absence.bytes) == (Seat(0, 1), 10, 1200)
    assert (absence.restarted_at, absence.came_at, absence.caught_up_at, absence.back_at) == (
        102.83,
        103.2,
        103.5,
        104.4,
    )
    assert absence.lasted_s == pytest.approx(1.59) and history.failures[0].absence == absence
    assert history.now_s == pytest.approx(0.2) and history.meanwhile[0] == pytest.approx(0.4)
    assert history.predicted == 1.0 and history.pids[2] == 1002 and history.failures[0].pid == 1002
    assert sentence(history) == SENTENCE


def test_the_report_shows_the_return(folder):
    history = rewrite(folder, with_return)
    facts = dict(report.summary(history))
    assert facts["workers"] == "4 of 4 left; seat 0.1 (rank 2): back after 1.59 s"
    assert facts["throughput"].endswith("at the end 40 samples/s, 0.2 s a step: 115%, predicted 100%")
    assert all((chart.lost, chart.back) == ([6], [10]) for chart in report.charts(history))
    (row,) = report.failures(history).rows
    assert (row[1], row[-1]) == (WHY, "1.59 s, step 10")
    assert {"0.1", "1.59 s, step 10"} <= set(Read(report.write(folder).read_text()).texts["td"])


def test_who_is_lost_again_is_gone_and_its_next_process_was_the_lost_one(folder):
    history = rewrite(folder, lost_again)
    first, second = history.failures
    assert first.absence.is_over and not second.absence.is_over and isnan(second.absence.lasted_s)
    assert (first.pid, second.pid) == (1002, 2002) and history.gone["0.1"].how == "its connection broke"
    assert history.predicted == 0.6 and second.step == 14 and len(history.view.live) == 3
    assert "1 of 4 workers was lost, 2 times in all (0.1 in step 6, back after 1.59 s, 0.1 in step 14):" in (
        sentence(history)
    )
    assert [row[-1] for row in report.failures(history).rows] == ["1.59 s, step 10", "no"]


def test_of_newcomers_the_last_one_counts(folder):
    def twice(events: list[dict]) -> list[dict]:
        events = with_return(events)
        place = next(number for number, event in enumerate(events) if event["event"] == "caught_up")
        again = {"time": 103.6, "event": "restart", "text": "", "rank": 2, "incarnation": 1, "after_s": 2.0}
        return [*events[: place + 1], again, *events[place + 1 :]]

    history = rewrite(folder, twice)
    (absence,) = history.returns
    assert absence.restarted_at == 103.6 and absence.came_at is None and absence.is_over
    with pytest.raises(RunFailed, match="does not tell how it came"):
        came_back.rejoined(history, history.failures)


def test_who_left_as_planned_can_come_back(folder):
    def planned(events: list[dict]) -> list[dict]:
        events = [event for event in with_return(events) if event["event"] not in ("fault", "lost", "confirmed")]
        said = {"event": "leaving", "text": "", "seat": "0.1", "rank": 2, "why": "asked to leave"}
        gone = [{"time": 102.77, **said}, {"time": 102.8, "event": "left", "text": "", "rank": 2}]
        return sorted([*events, *gone], key=lambda event: event["time"])

    history = rewrite(folder, planned)
    (absence,) = history.returns
    assert absence.why == "asked to leave" and absence.lasted_s == pytest.approx(1.6) and history.gone == {}
    assert len(history.view.live) == 4 and history.failures == ()


@pytest.mark.parametrize("field, value", [("seat", "7.7"), ("step", None)])
def test_a_return_that_cannot_be_is_refused(folder, field, value):
    def wrong(events: list[dict]) -> list[dict]:
        return [{**event, field: value} if event["event"] == "rejoined" else event for event in with_return(events)]

    with pytest.raises(ValueError, match="rejoined event"):
        rewrite(folder, wrong)


# --- the demo's ------------------------------------------------------------------------------------------


def outcome() -> RunOutcome:
    losses = [*LOSSES, *(1.0 - step / 10 for step in range(4))]
    records = {rank: {"rank": rank, "pid": 1000 + rank, "losses": losses} for rank in (0, 1, 3)}
    records[2] = {"rank": 2, "pid": 2002, "losses": losses}
    return RunOutcome(tuple(with_return(list(FAILED.events))), 0, records)


def test_figures():
    failed = outcome()
    found = came_back.rejoined(failed, demo.failures(failed))
    assert found == {
        "seat": "0.1",
        "step": 10,
        "start_up_s": pytest.approx(0.37),
        "catch_up_s": pytest.approx(0.3),
        "away_s": pytest.approx(1.59),
        "bytes": 1200,
        "step_s_since": pytest.approx(0.2),
    }
    name, told = came_back.told({"rejoined": found})
    assert name == "back" and "0.1 has work from step 10 on, 1.6 s after its loss" in told


def test_the_newcomer_is_no_survivor_and_steps_after_are_those_without_it():
    failed = outcome()
    found = demo.report(replace(FAULT_FREE, records=failed.records), failed, 13)
    assert found["passed"] and found["survivors_restarted"] == 0
    assert [one["seat"] for one in found["survivors"]] == ["0.0", "1.0", "1.1"]
    assert found["step_s_after"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    "until, message", [(104.0, "seat 0.1 did not come back in 8 steps"), (104.7, "came back in the last steps")]
)
def test_who_comes_too_late_is_no_demo(until, message):
    late = RunHistory(tuple(event for event in outcome().events if event["time"] < until))
    with pytest.raises(RunFailed, match=message):
        came_back.rejoined(late, late.failures)
