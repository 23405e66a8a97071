"""What the user sees of an event, and what the log keeps."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.observability import telemetry
from recycle_plugin.observability.console import Announcer, event_line


def test_plain_lines_and_a_complete_log(tmp_path, capsys):
    announcer = Announcer(os.getpid())
    announcer.say(Event("worker", "worker 0 is process 7", {"rank": 0, "pid": 7}), 10.0)
    announcer.say(Event("start", "2 replicas", {"job": {"run_dir": str(tmp_path), "report": False}}), 10.5)
    announcer.say(Event("loss", "step 1", {"step": 1, "loss": 2.5}), 11.0)
    announcer.say(Event("committed", "step 1 committed", {"step": 1, "workers": 4}), 11.0)
    announcer.say(Event("committed", "step 2 committed", {"step": 2, "workers": 3}), 11.25)
    announcer.close()
    lines = [line.split("] ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["start: 2 replicas", "step: 1: loss 2.500000, 4 workers", "step: 2: 3 workers, 0.250 s"]
    logged = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in logged] == ["worker", "start", "loss", "committed", "committed"]
    assert logged[0]["pid"] == 7 and logged[2]["loss"] == 2.5


def test_a_quiet_console_shows_what_matters_and_a_step_a_minute(tmp_path, capsys):
    announcer = Announcer(os.getpid())
    job = {"run_dir": str(tmp_path), "report": False, "console": "quiet"}
    announcer.say(Event("start", "2 replicas", {"job": job}), 10.0)
    for step in range(1, 122):
        announcer.say(Event("committed", f"step {step} committed", {"step": step, "workers": 4}), 10.0 + step)
    for kind in ("suspected", "lost", "served", "rejoined", "warning", "left", "finished"):
        announcer.say(Event(kind, "x", {"rank": 1}), 140.0)
    announcer.close()
    lines = [line.split("] ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    steps = ["step: 1: 4 workers", "step: 61: 4 workers, 1.000 s", "step: 121: 4 workers, 1.000 s"]
    assert lines == ["start: 2 replicas", *steps, "lost: x", "rejoined: x", "warning: x", "finished: x"]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1 + 121 + 7


def test_nobody_reads_the_lines_any_more(tmp_path, monkeypatch):
    """The log goes on."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        announcer = Announcer(os.getpid())
        announcer.say(Event("start", "2 replicas", {"job": {"run_dir": str(tmp_path), "report": False}}), 10.0)
        assert b"start: 2 replicas" in os.read(reading, 1000)
        os.close(reading)
        for step in (1, 2):
            announcer.say(Event("committed", f"step {step} committed", {"step": step, "workers": 4}), 10.0 + step)
        announcer.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 3


def test_a_console_and_a_log_on_a_full_disk(tmp_path, monkeypatch):
    """The job goes on, and so does the log where it can be written, with what the console could not say."""
    monkeypatch.setattr(telemetry, "RETRY_S", 0.0)
    start = Event("start", "2 replicas", {"job": {"run_dir": str(tmp_path / "run"), "report": False}})
    (tmp_path / "run").write_text("no folder yet")
    with suppress(OSError), open("/dev/full", "w", buffering=1) as output:  # which holds a line yet when it is closed
        monkeypatch.setattr(sys, "stdout", output)
        announcer = Announcer(os.getpid())
        announcer.say(start, 10.0)
        announcer.say(Event("committed", "step 1 committed", {"step": 1, "workers": 4}), 11.0)
        (tmp_path / "run").unlink()
        for step in (2, 3):
            announcer.say(Event("committed", f"step {step} committed", {"step": step, "workers": 4}), 10.0 + step)
        with open(tmp_path / "console", "w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            announcer.say(Event("finished", "all have left", {}), 14.0)
            announcer.close()
    logged = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in logged]
    assert (
        kinds[0] == "start"
        and kinds.count("unwritten") == 2
        and kinds.count("written") == 2
        and kinds[-2:] == ["finished", "written"]
    ), kinds
    assert [event["step"] for event in logged if event["event"] == "committed"] == [2, 3]
    said = [line.split("] ", 1)[1] for line in (tmp_path / "console").read_text().splitlines()]
    assert said[0] == "finished: all have left" and said[1].startswith("written: all is written again, without ")
    assert len(said) == 2


def test_a_traceback_on_a_full_disk_is_dropped(tmp_path, monkeypatch):
    """As any line is: the coordinator goes on to tell all that the job ends."""
    error = Event("error", "ValueError: x", {"traceback": "Traceback:\n" + "  in a line\n" * 10_000})
    with suppress(OSError), open("/dev/full", "w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        Announcer(os.getpid()).say(error, 10.0)
        with open(tmp_path / "console", "w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            announcer = Announcer(os.getpid())
            announcer.say(error, 10.0)
            announcer.close()
    assert (tmp_path / "console").read_text().count("  in a line\n") == 10_000


def test_an_event_is_shown_whatever_its_text_and_its_details_are(capsys):
    Announcer(0).say(Event("warning", "no file \udcff", {"traceback": 1, "killed": 1}), 0.0)
    assert "no file \\udcff" in capsys.readouterr().out
    line = json.loads(event_line(Event("warning", "x", {"event": "lost", "time": 9, "text": "y"}), 1.0))
    assert line == {"time": 1.0, "event": "warning", "text": "x"}
