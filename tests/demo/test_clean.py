"""``recycle clean``: what goes of jobs that are over, and that nothing else does."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest

from recycle_plugin import folders
from recycle_plugin.cli import main
from recycle_plugin.commands import clean
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.control import claims
from recycle_plugin.runtime.control.claims import LOCK, Claims
from recycle_plugin.runtime.log.segment import called
from recycle_plugin.runtime.worker.log_mirror import mirror_in

OLD = time.time() - folders.STALE_S - 60


def write(path: Path, size: int, old: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    for each in (path, path.parent):
        os.utime(each, (OLD, OLD) if old else None)
    return path


@pytest.fixture
def job(folder, tmp_path_factory) -> Path:
    """The run folder of a job that is over, and had a checkpoint folder and a log folder of its own."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    start = next(event for event in events if event["event"] == "start")
    start["job"] |= {"folders": [["checkpoint_dir", str(elsewhere / "saved")], ["log.folder", str(elsewhere / "log")]]}
    saved = {"time": 105.0, "event": "checkpoint", "text": "", "path": str(elsewhere / "mine" / "global_step5")}
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in [*events, saved]))
    log = elsewhere / "log"
    for path in (log / called(WorkerId(3, 1), 7), mirror_in(log, 2) / "0.0-000001.log"):
        write(path, 1000)
    for name in ("train.log", "notes", "1.token"):
        write(log / name, 10)
    for place in ("saved", "mine"):
        write(elsewhere / place / "global_step5" / "weights", 500)
        write(elsewhere / place / "global_step6.incomplete-other-1" / "weights", 3000)
        write(elsewhere / place / "global_step7.incomplete-other-2" / "weights", 3000, old=False)
    write(folder / "checkpoints" / "step3.incomplete-own-1" / "weights", 3000)
    return folder


def names(*places: Path) -> set[str]:
    return {path.name for place in places for path in place.rglob("*")}


def test_what_may_go_is_shown_and_then_goes(job, capsys):
    elsewhere = Path(clean._told(job, clean.RunHistory.read(job))["log.folder"]).parent
    before = names(job, elsewhere)
    assert main(["clean", str(job)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert names(job, elsewhere) == before
    assert f"{job}: 1.95 KiB: logs for replays, 2 files in {elsewhere / 'log'}" in shown
    assert shown[-1] == "10.7 KiB in all can be removed: --yes does so" and len(shown) == 5
    assert main(["clean", str(job), "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "10.7 KiB in all removed"
    gone = {called(WorkerId(3, 1), 7), "2.mirror", "0.0-000001.log", "step3.incomplete-own-1"}
    gone |= {"global_step6.incomplete-other-1"}
    assert names(job, elsewhere) == before - gone, (
        "whole checkpoints, the user's files, and what may be written to stay"
    )
    assert main(["clean", str(job)]) == 0 and capsys.readouterr().out == "nothing to remove\n"


@pytest.mark.parametrize("ahead_s", (0, 7200))
def test_what_another_job_writes_in_this_ones_run_folder_stays(job, ahead_s):
    """It has its own run folder in there, or its script saves there; of this job the same goes at once, also by a clock
    that is ahead.
    """
    ended = time.time() - 300
    end = {"time": ended + ahead_s, "event": "finished", "text": "", "steps": 10}
    with (job / "events.jsonl").open("a") as log:
        log.write(f"{json.dumps(end)}\n")
    own, other = (job / "second" / f"step{step}.incomplete-x" for step in (4, 5))
    for path, last in ((own, ended - 1), (other, time.time())):
        for each in (write(path / "weights", 3000), path):
            os.utime(each, (last, last))
    assert main(["clean", str(job), "--yes"]) == 0
    assert other.exists() and not own.exists()


def unended(job: Path, last: float) -> None:
    lines = [line for line in (job / "events.jsonl").read_text().splitlines() if '"finished"' not in line]
    lines.append(json.dumps({"time": last, "event": "committed", "text": "", "step": 10}))
    (job / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("setting", ("run_dir", "checkpoint_dir", "log.folder"))
def test_nothing_goes_of_a_job_that_holds_one_of_its_folders(job, setting, capsys):
    place = {"run_dir": job, **clean._told(job, clean.RunHistory.read(job))}[setting]
    running, before = Claims(print, "job 7, process 8 on host h"), names(job)
    assert not running.claim(setting, place)
    try:
        assert main(["clean", str(job), "--yes"]) == 1
    finally:
        assert (place / LOCK).exists(), "whose lock it was has it"
        running.release()
    kept = f"{job}: kept: recycle.{setting}: {place} is the folder of job 7, process 8 on host h, which runs\n"
    assert capsys.readouterr().out == kept and names(job) == before


@pytest.mark.parametrize("age_s, code", ((60.0, 1), (folders.STALE_S + 60, 0)))
def test_a_job_without_an_end_may_run_for_an_hour(job, age_s, code, capsys):
    """As on a file system without locks, and from another host."""
    unended(job, time.time() - age_s)
    assert main(["clean", str(job)]) == code
    assert ("its event log has no end, and the last event is 60 s old" in capsys.readouterr().out) == bool(code)


def test_where_nothing_can_be_locked_a_job_without_an_end_may_run_for_ever(job, capsys, monkeypatch):
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    assert main(["clean", str(job)]) == 0
    unended(job, OLD)
    assert main(["clean", str(job)]) == 1 and "can't be locked" in capsys.readouterr().out


def test_folders_of_which_one_is_no_runs_are_refused_before_anything_goes(job, capsys):
    before = names(job)
    assert main(["clean", str(job), "nowhere", "--yes"]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err and names(job) == before


def test_relative_folders_count_where_the_job_was_started(job, monkeypatch, tmp_path):
    """Elsewhere they would be another's."""
    events = (job / "events.jsonl").read_text().replace('"run_dir": "x"', f'"run_dir": "{job.name}"')
    start = next(line for line in events.splitlines() if '"start"' in line)
    changed = json.loads(start)
    changed["job"]["folders"] = [["log.folder", "logs"]]
    (job / "events.jsonl").write_text(events.replace(start, json.dumps(changed)))
    history = clean.RunHistory.read(job)
    monkeypatch.chdir(job.parent)
    assert clean._told(job, history) == {"log.folder": Path("logs")}
    monkeypatch.chdir("/")
    assert clean._told(job, history) == {}
