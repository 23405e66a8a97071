"""The demo itself: two jobs under the launcher, workers from a warm fork server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from recycle_plugin.cli import main
from tests.support.samples import never_printed, shapes
from tests.support.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
ASKED_FOR = (
    "topology",
    "killed",
    "steps",
    "max_loss_difference",
    "survivors_restarted",
    "stall_s",
    "step_s_before",
    "step_s_after",
)
ROOT = Path(__file__).parents[2]
STEPS, STEPS_BACK, STEPS_STAGE = 10, 60, 40
STATE_BYTES = 3 * 4 * 8192 + 4  # of the layer's weights and Adam's two moments of them, and its count of steps


@pytest.fixture(scope="module")
def warm(server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECYCLE_FORK_SERVER", server.path)
        yield


def processes_that_name(text: str) -> list[str]:
    """Command lines that contain ``text``: launchers and supervisors have the run folder in theirs."""
    lines = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return [line for line in lines if text in line]


def demo(out: Path, capsys, *asked: str) -> tuple[str, dict]:
    """What the demo says, and its report: it has passed, the losses are those without the kill, and nobody was started
    anew who had survived.
    """
    code = main(["demo", "--out", str(out), *asked])
    said = capsys.readouterr().out
    assert code == 0, said
    found = json.loads((out / "report.json").read_text())
    assert found["passed"] and found["max_loss_difference"] <= 5e-6 and found["survivors_restarted"] == 0
    return said, found


def back_at(found: dict, seat: str) -> dict:
    """What the report says of the return of ``seat``, which was killed in the run's first fifth."""
    assert [(one["seat"], one["instruction"]) for one in found["killed"]] == [
        (seat, f"1F{seat[0]}.1@{STEPS_BACK // 5}")
    ]
    back = found["rejoined"]
    assert back["seat"] == seat and STEPS_BACK // 5 < back["step"] < STEPS_BACK
    assert back["bytes"] == STATE_BYTES
    assert found["step_s_after"] > back["step_s_since"] > 0, "the others did its work too meanwhile"
    return back


def test_demo(warm, tmp_path, capsys):
    out = tmp_path / "a folder"
    said, found = demo(out, capsys, "--steps", str(STEPS))
    assert all(key in found for key in ASKED_FOR)
    assert found["topology"] == {"replicas": 2, "stages": 2, "micro_batches": 4} and found["steps"] == STEPS
    assert [(one["seat"], one["instruction"]) for one in found["killed"]] == [("0.1", "1F0.1@5")]
    assert 0 < found["detection_s"] + found["regroup_s"] < found["stall_s"]
    assert found["step_s_before"] > 0 and found["step_s_after"] > 0
    assert "fault: kill 0.1 before 1F0.1@5" in said and "lost: seat 0.1" in said and "passed" in said
    sample = (
        (ROOT / "README.md")
        .read_text()
        .partition("## What you see when a worker dies")[2]
        .partition("In another run")[0]
    )
    assert shapes(sample) and not never_printed(sample, said)
    assert "[INFO]" not in said, "DeepSpeed's own lines do not belong here"
    assert said.count("single point of failure") == 1
    picture_opens(out / "gantt.png")
    assert (out / "with_failure" / "report.html").exists(), "the demo is over when it is written"


@pytest.mark.some_of(1, among="walk-throughs")
@pytest.mark.timeout(400)
def test_the_demo_of_a_return(warm, tmp_path, capsys):
    """Of emulated layers: the losses are those without the kill, also the newcomer's, and nobody else was started."""
    out = tmp_path / "back"
    said, found = demo(out, capsys, "--scenario", "rejoin", "--steps", str(STEPS_BACK))
    back = back_at(found, "0.1")
    assert back["start_up_s"] > 0 and 0 < back["catch_up_s"] < back["away_s"]
    assert "rejoined: seat 0.1" in said and "the lost worker came back" in said
    picture_opens(out / "gantt.png")
    report = (out / "with_failure" / "report.html").read_text()
    assert f"(0.1 in step {STEPS_BACK // 5}, back after " in report


@pytest.mark.some_of(1, among="walk-throughs")
@pytest.mark.timeout(400)
def test_the_demo_of_a_whole_replica(warm, tmp_path, capsys):
    """Its other worker goes with the killed one and comes with it; the others train its part, to the same losses."""
    out = tmp_path / "whole"
    said, found = demo(out, capsys, "--scenario", "replica", "--steps", str(STEPS_BACK))
    back_at(found, "1.1")
    assert found["gone_along"] == ["1.0"] and [one["seat"] for one in found["survivors"]] == ["0.0", "0.1"]
    assert "it is given up with seat 1.1" in said and "rejoined: seat 1.0" in said and "rejoined: seat 1.1" in said
    assert "the lost replica came back" in said


@pytest.mark.some_of(1, among="walk-throughs")
@pytest.mark.timeout(400)
def test_the_demo_of_a_stage_that_nobody_is_left_in(warm, tmp_path, capsys):
    """All others wait for its replay with what they have, and the losses are those without the kill."""
    out = tmp_path / "stage"
    said, found = demo(out, capsys, "--scenario", "stage", "--steps", str(STEPS_STAGE))
    assert found["topology"] == {"replicas": 1, "stages": 4, "micro_batches": 8}
    assert [one["seat"] for one in found["killed"]] == ["0.1"] and len(found["survivors"]) == 3
    assert found["recovered_by"] == "replay" and found["helpers"] == 3
    assert 0 < found["replayed_steps"] < STEPS_STAGE // 2
    parts = [found[f"{name}_s"] for name in ("restart", "start_up", "load", "replay")]
    assert min(parts) > 0 and sum(parts) < found["stall_s"] and found["bytes"] == STATE_BYTES
    assert found["step_s_after"] > 0
    assert "replayed: seat 0.1" in said and "its stage was replayed" in said
    assert not (out / "gantt.png").exists()


def picture_opens(path: Path) -> None:
    from matplotlib.image import imread

    height, width, _ = imread(path).shape
    assert 1000 < width <= 1400 and 400 < height < 1200 and path.stat().st_size < 300_000


@pytest.mark.some_of(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(warm, tmp_path, number):
    out = tmp_path / "interrupted"
    command = [Path(sys.executable).with_name("recycle"), "demo", "--out", out]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    events = out / "fault_free" / "events.jsonl"
    until(lambda: (events.exists() and events.read_text()) or demo.poll() is not None, "event", 120)
    said = map(json.loads, events.read_text().splitlines())
    pids = [event["pid"] for event in said if event["event"] == "worker"]
    demo.send_signal(number)
    told, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130 and "interrupted" in told
    assert len(pids) == 4
    until(lambda: not any(map(psutil.pid_exists, pids)), "end of the workers", 10)
    assert not processes_that_name(str(out))
