"""What is told of a stage that was replayed, on the hand-written run and a few seconds more."""

from __future__ import annotations

import pytest

from recycle_plugin.lab.commands import came_back, demo
from recycle_plugin.lab.runs import RunFailed, RunOutcome
from recycle_plugin.observability import report
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import sentence
from tests.support.run_folder import CAME, FAILED, FAULT_FREE, LOSSES, resume, rewrite

REPLAYED = {"event": "replayed", "seat": "0.1", "rank": 2, "step": 5, "steps": 3, "bytes": 1200}


def with_replay(events: list[dict]) -> list[dict]:
    """0.1 is lost at 102.77 and started again at 102.83, asks at 103.2, has the checkpoint of step 2 at 103.5, has
    replayed three steps at 104.0, and goes on with step 6; what the others had done meanwhile is not there.
    """
    kept = [event for event in events if event["time"] < 102.8 or event["event"] in ("lost", "confirmed", "fault")]
    restored = {"seat": "0.1", "rank": 2, "step": 2, "bytes": 1200, "seconds": 0.2}
    back = {"event": "rejoined", "seat": "0.1", "rank": 2, "incarnation": 1, "step": 6}
    commits = [(104.3 + 0.2 * more, 6 + more) for more in range(4)]
    more = [
        {"time": 102.8, "event": "recovery", "way": "replay", "stages": [1]},
        {"time": 102.83, "event": "restart", "rank": 2, "incarnation": 0, "after_s": 1.0},
        {"time": 103.2, **CAME},
        {"time": 103.5, "event": "restored", **restored},
        {"time": 104.0, **REPLAYED},
        {"time": 104.02, **back},
        resume(104.03, 5, 1.0),
        *({"time": at, "event": "committed", "step": step, "workers": 4} for at, step in commits),
        {"time": 105.0, "event": "finished", "step": 9},
    ]
    return sorted(({"text": "", **event} for event in [*kept, *more]), key=lambda event: event["time"])


def outcome() -> RunOutcome:
    losses = (LOSSES * 2)[:9]
    records = {rank: {"rank": rank, "pid": 1000 + rank, "losses": losses} for rank in (0, 1, 3)}
    return RunOutcome(
        tuple(with_replay(list(FAILED.events))), 0, records | {2: {"rank": 2, "pid": 2, "losses": losses}}
    )


def test_the_absence_knows_of_the_replay(folder):
    (absence,) = rewrite(folder, with_replay).absences
    assert absence.is_over and (absence.replayed_steps, absence.replayed_at, absence.bytes) == (3, 104.0, 1200)
    assert (absence.restored_at, absence.helpers) == (103.5, 0)


def test_summary_and_report_say_that_it_was_replayed(folder):
    history = rewrite(folder, with_replay)
    assert ", back after 1.21 s, 3 steps of its stage replayed)" in sentence(history), sentence(history)
    assert report.back(history) == [("seat 0.1 (rank 2)", "back after 1.21 s, 3 steps of its stage replayed")]
    (row,) = [row for row in report.failures(history).rows if row[0] == "0.1"]
    assert row[-1] == "1.21 s, step 6, 3 steps of its stage replayed"


def test_figures():
    failed = outcome()
    struck_at = demo.failures(failed)[0].struck_at
    found = came_back.replayed(failed, demo.failures(failed))
    assert found == {
        "recovered_by": "replay",
        "replayed_steps": 3,
        "helpers": 0,
        "restart_s": pytest.approx(102.83 - struck_at, abs=1e-3),
        "start_up_s": pytest.approx(0.37),
        "load_s": pytest.approx(0.3),
        "replay_s": pytest.approx(0.5),
        "bytes": 1200,
    }
    name, told = came_back.told(found)
    assert name == "replayed" and told.startswith("3 steps from the log: ")
    assert came_back.told({}) is None


def test_steps_after_are_all_from_then_on():
    failed = outcome()
    found = demo.report(FAULT_FREE, failed, 9)
    assert found["step_s_after"] == pytest.approx(0.2)
    assert found["stall_s"] == pytest.approx(104.3 - demo.failures(failed)[0].struck_at)


def test_a_stage_that_was_not_replayed_is_no_demo():
    events = [event for event in with_replay(list(FAILED.events)) if event["event"] not in ("replayed", "rejoined")]
    history = RunHistory(tuple(events))
    with pytest.raises(RunFailed, match="the stage of seat 0.1 was not replayed"):
        came_back.replayed(history, history.failures)
