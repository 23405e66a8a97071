"""A disk that is full, or can't be written to, ends no training: checkpoints are all or none, and logs and traces can
wait.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from recycle_plugin.folders import STALE_S
from recycle_plugin.observability.trace import read_traces
from tests.support.jobs import CHECKPOINT, assert_one_line

PLAIN_TOO, PLAIN = pytest.mark.plain_too, pytest.mark.plain_too(deepspeed=False)
SAVES, SEATS = [3, 6, 9], ("0.0", "0.1", "1.0", "1.1")
ROOM = r"disk full: \S+ can't be written, [\d.e+]+ (B|KiB|MiB|GiB|TiB) of [\d.e+]+ (B|KiB|MiB|GiB|TiB) are free"


@pytest.fixture
def start(launch, tmp_path):
    """``start(*overrides, **plan)``: a run of tests/jobs/checkpoint.py that saves to tmp_path/saved."""

    def run(*overrides: str, **plan: object):
        return launch(
            "steps=12",
            *overrides,
            script=CHECKPOINT,
            RECYCLE_TEST_CHECKPOINT=json.dumps({"folder": str(tmp_path / "saved"), "save_at": SAVES} | plan),
        )

    return run


@PLAIN_TOO
def test_a_checkpoint_that_one_worker_cannot_write_is_none_for_all_and_a_script_may_go_on(start, vehicle, tmp_path):
    """First there is no room for the tag, then for what seat 0.1 writes, and then there is.

    For what DeepSpeed's monitor writes there is none all the time.
    """
    saved, curve = tmp_path / "saved", tmp_path / "csv" / "Train_Samples_train_loss.csv"
    curve.parent.mkdir()
    curve.symlink_to("/dev/full")
    stocks = (f"deepspeed={{csv_monitor: {{enabled: true, output_path: {tmp_path}, job_name: csv}}}}",) * (
        vehicle.name == "deepspeed"
    )
    result = start(*stocks, full={"3": "latest", "6": "0.1"}, catch=True).finish()
    # twice where an attempt was at another of its files
    unwritten = {event["path"] for event in result.of("unwritten")}
    assert unwritten == ({"DeepSpeed's monitors"} if stocks else set())
    assert result.code == 0 and not result.of("lost"), result.output[-6000:]
    ((first, second),) = {tuple(record["refused"]) for record in result.records.values()}
    assert len(result.records) == 4 == len(result.pids)
    assert re.fullmatch(
        rf"NotSaved: save_checkpoint\('{saved}', 'global_step3'\) has failed: seat 0.0 \(rank 0\): {ROOM}", first
    )
    assert re.fullmatch(
        rf"NotSaved: save_checkpoint\('{saved}', 'global_step6'\) has failed: seat 0.1 \(rank [12]\): {ROOM}", second
    )
    assert f"{saved}/latest can't" in first and f"{saved}/global_step6/" in second
    assert {path.name for path in saved.iterdir()} == {"latest", "global_step9"}
    assert (saved / "latest").read_text() == "global_step9"
    assert [
        event["text"].count("the script goes on without it")
        for event in result.of("warning")
        if "has failed" in event["text"]
    ] == [1, 1]


@PLAIN
def test_a_checkpoint_that_cannot_be_written_ends_the_job_with_that_cause_where_no_script_catches_it(start, tmp_path):
    """The one before stays; of what other jobs have left, what nobody has written to for long goes."""
    saved = tmp_path / "saved"
    theirs, stale = (saved / f"global_step9.incomplete-{job}-0" for job in ("theirs", "stale"))
    for folder in (theirs, stale):
        folder.mkdir(parents=True)
    os.utime(stale, (time.time() - STALE_S - 60,) * 2)
    result = start(full={"6": "0.1"}).finish()
    assert_one_line(result, "disk full: ")
    assert not result.of("lost") and [event["event"] for event in result.events if "disk full: " in event["text"]] == [
        "end"
    ], result.output[-6000:]
    assert {path.name for path in saved.iterdir()} == {"latest", "global_step3", theirs.name}
    assert (saved / "latest").read_text() == "global_step3"


@PLAIN
def test_background_checkpoints_that_cannot_be_written_leave_nothing_and_are_tried_again(start, tmp_path):
    folder, room, enough = tmp_path / "own", tmp_path / "room", tmp_path / "enough"
    settings = "steps=100000", "recycle.checkpoint={overhead: 0.9, keep: 1}", f"recycle.checkpoint_dir={folder}"
    run = start(*settings, save_at=[], full={str(room): "0.1"}, until=str(enough))
    said = "disk full"
    run.wait_for(lambda: sum(said in event["text"] for event in run.events()) >= 3, "three events of a full disk")
    # one that is being written
    assert not (folder / "latest").exists() and len(list(folder.glob("*.incomplete-*"))) <= 1
    room.touch()
    run.hear("checkpoint", 1)
    enough.touch()
    result = run.finish()
    assert result.code == 0 and not result.of("lost"), result.output[-6000:]
    failed = [event["text"] for event in result.of("warning") if said in event["text"]]
    assert all(
        re.fullmatch(
            rf"no checkpoint of step \d+: seat 0.1 \(rank 2\): {ROOM}; the next one is tried before step \d+", text
        )
        for text in failed
    ), failed
    # one that was being written when the job ended
    assert (folder / (folder / "latest").read_text()).is_dir() and len(list(folder.glob("*.incomplete-*"))) <= 1


@PLAIN
def test_a_trace_and_a_log_that_cannot_be_written_are_dropped_and_come_back(start, tmp_path):
    """All five files are on a full disk; one line says so, another one when all of them are written again."""
    folder, enough = tmp_path / "run0", tmp_path / "enough"
    (folder / "trace").mkdir(parents=True)
    files = [folder / "events.jsonl", *(folder / "trace" / f"{seat}.txt" for seat in SEATS)]
    for path in files:
        path.symlink_to("/dev/full")
    run = start("steps=100000", "recycle.trace=true", save_at=[], until=str(enough))
    run.wait_for(lambda: "step: 5:" in run.output, "step 5")
    for path in files:
        path.unlink()
    run.hear("written", len(files))
    enough.touch()
    result = run.finish()
    assert result.code == 0 and not result.of("lost"), result.output[-6000:]
    assert len(result.of("start")) == 1 and len(result.of("worker")) == 4 and len(result.of("unwritten")) == len(files)
    assert {Path(event["path"]) for event in result.of("written")} == set(files)
    said = [line.partition("] ")[2] for line in result.output.splitlines() if "written: " in line]
    assert len(said) == 2 and re.fullmatch(rf"unwritten: {ROOM}: lines are dropped until that is possible", said[0]), (
        said
    )
    assert said[1] == "written: all is written again, without what was dropped"
    assert {str(span.seat) for span in read_traces(folder / "trace")} == set(SEATS)
