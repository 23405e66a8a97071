"""What is told of a stage that was replayed, on the hand-written run and a few seconds more."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from recycle_plugin.commands import demo, replayed
from recycle_plugin.observability import report
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import sentence
from recycle_plugin.runs import RunFailed, RunOutcome
from tests.support.run_folder import CAME, FAILED, FAULT_FREE, LOSSES, resume, rewrite, spans

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
    assert (absence.restored_at, absence.restoring_s, absence.helpers) == (103.5, 0.2, 0)


def test_summary_and_report_say_that_it_was_replayed(folder):
    history = rewrite(folder, with_replay)
    assert ", back after 1.21 s, 3 steps of its stage replayed)" in sentence(history), sentence(history)
    assert report.back(history) == [("seat 0.1 (rank 2)", "back after 1.21 s, 3 steps of its stage replayed")]
    (row,) = [row for row in report.failures(history).rows if row[0] == "0.1"]
    assert row[-1] == "1.21 s, step 6, 3 steps of its stage replayed"


def test_figures():
    failed = outcome()
    struck_at = demo.failures(failed)[0].struck_at
    found = replayed.figures(failed, demo.failures(failed))
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
    assert "3 steps from the log, of 5 MB" in replayed.told(found | {"log_bytes": 5_000_000})


def test_steps_after_are_all_from_then_on_and_nothing_is_planned_to_be_slower():
    failed = outcome()
    found = demo.report(FAULT_FREE, failed, spans(), 9)
    assert found["step_s_after"] == pytest.approx(0.2) and found["predicted_ratio"] == 1
    assert found["stall_s"] == pytest.approx(104.3 - demo.failures(failed)[0].struck_at)


def test_a_stage_that_was_not_replayed_is_no_demo():
    events = [event for event in with_replay(list(FAILED.events)) if event["event"] not in ("replayed", "rejoined")]
    history = RunHistory(tuple(events))
    with pytest.raises(RunFailed, match="the stage of seat 0.1 was not replayed"):
        replayed.figures(history, history.failures)


def test_the_size_of_a_log_is_that_of_a_moment(tmp_path: Path, monkeypatch):
    clock = iter((10.0, 20.0, 30.0))
    monkeypatch.setattr(replayed.time, "time", lambda: next(clock))
    size = replayed.LogSize(tmp_path)
    size.look()
    (tmp_path / "0.0-000001.log").write_bytes(bytes(70))
    (tmp_path / "else.txt").write_bytes(bytes(9))
    size.look()
    (tmp_path / "1.0-000001.log").write_bytes(bytes(30))
    size.look()
    assert [size.at(moment) for moment in (5.0, 10.0, 25.0, 31.0)] == [0, 0, 70, 100]


def test_the_picture_opens(tmp_path: Path):
    failed = outcome()
    replayed.draw(tmp_path / "throughput.png", FAULT_FREE, failed, demo.failures(failed))
    height, width, _ = imread(tmp_path / "throughput.png").shape
    assert 1000 < width <= 1400 and 300 < height < 700
