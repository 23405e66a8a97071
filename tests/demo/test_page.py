"""``recycle report`` and ``recycle status`` on the hand-written run: what they say, and that a browser shows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import recycle_plugin
from recycle_plugin.cli import main
from recycle_plugin.commands.status import lines, status
from recycle_plugin.observability import report
from recycle_plugin.observability.run_history import EVENTS, RENAMED, RunHistory, place, read_events
from recycle_plugin.observability.trace import TraceFile
from recycle_plugin.render.page import Chart, Table, chart, page, ticks
from tests.demo.test_report import spans

LOG = Path(__file__).parent / "with_failure.jsonl"
WHY = "its process was killed by signal 9 (SIGKILL), says its supervisor"
VOID = {"meta", "img"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run folder with the events; every step has a loss."""
    lines = [json.loads(line) for line in LOG.read_text().splitlines()]
    losses = [
        {"time": one["time"], "event": "loss", "text": "", "step": one["step"], "loss": 5 - one["step"] / 10}
        for one in lines
        if one["event"] == "committed"
    ]
    (tmp_path / "events.jsonl").write_text(
        "".join(f"{json.dumps(one)}\n" for one in sorted(lines + losses, key=lambda one: one["time"]))
    )
    return tmp_path


def trace(folder: Path) -> None:
    files = {seat: TraceFile(folder / "trace", seat, print) for seat in {span.seat for span in spans()}}
    for span in spans():
        files[span.seat].add(span)
    for file in files.values():
        file.close()


class Read(HTMLParser):
    """Checks that every element is closed in its order; ``texts`` by element, ``links``: whatever a browser would
    fetch.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.links: list[str] = []
        self.images: list[bytes] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes) -> None:
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes) -> None:
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag) -> None:
        assert tag == self.open.pop(), f"</{tag}> closes {self.open}"

    def handle_data(self, data) -> None:
        if data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


@pytest.mark.parametrize("traced", (False, True))
def test_the_report(folder, traced, capsys):
    if traced:
        trace(folder)
    assert main(["report", str(folder)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == folder / "report.html"
    found = Read(path.read_text())
    assert found.texts["h2"] == ["Job", "Steps", "Failures", "Schedule", "Events"]
    assert len(found.links) == 1 and found.links[0].startswith("data:image/png;base64,iVBOR"), (
        "self-contained: nothing is fetched"
    )
    cells = found.texts["td"]
    assert {
        "0.1",
        "0.400 s",
        f"3 of 4 left; seat 0.1 (rank 2): {WHY}",
        "2 replicas of 2 stages, 4 micro-batches each",
    } <= set(cells)
    assert "34.78 samples/s, 0.23 s a step; at the end 20 samples/s, 0.4 s a step: 58%, predicted 60%" in cells
    assert found.texts["text"].count("0.1 lost") == 2, "on the throughput's and the loss's chart"
    assert any("As it ran when 0.1 was lost" in text for text in found.texts["p"]) == traced
    assert (
        "As planned, with the costs in the settings, before the first failure and after the last one."
        in found.texts["p"]
    ) != traced


def test_without_a_trace_it_shows_the_plans_before_and_after(folder):
    before, after = report.planned(RunHistory.read(folder))
    assert (before.title, after.title) == ("with everybody there", "without 0.1")
    assert len({span.seat for span in before.spans}) == 4 and len({span.seat for span in after.spans}) == 3


def test_what_events_say_is_text(folder):
    with (folder / "events.jsonl").open("a") as log:
        log.write(json.dumps({"time": 105.0, "event": "warning", "text": "<script>alert(1)</script> & co"}) + "\n")
    text = report.write(folder).read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in text


def test_a_run_that_never_committed_a_step_has_a_report(folder):
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(line for line in lines if '"worker"' in line or '"start"' in line))
    cells = Read(report.write(folder).read_text()).texts["td"]
    assert "none committed" in cells and "not known: too few steps before the first failure" in cells


def test_only_the_last_job_of_a_folder_counts(folder):
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(
        text + text.replace('"kill 0.1', '"kill 1.1').replace('"seat": "0.1"', '"seat": "1.1"')
    )
    history = RunHistory.read(folder)
    assert set(history.gone) == {"1.1"} and len(history.of("start")) == 1 and len(history.of("worker")) == 4


# --- status --------------------------------------------------------------------------------------------


def test_status(folder, capsys):
    assert main(["status", str(folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["step"] == "9, loss 4.100000" and lines["workers"] == "3 of 4" and lines["checkpoint"] == "none"
    assert lines["gone"].startswith("seat 0.1 (rank 2), ") and lines["gone"].endswith(f" s ago: {WHY}")
    assert lines["now"] == "20 samples/s, 0.400 s a step" and lines["before"] == "34.78 samples/s, 0.230 s a step"
    assert lines["predicted"] == "60% of the throughput with everybody there"


def test_status_as_data(folder, capsys):
    more = [
        {"event": "checkpoint", "text": "", "path": "saved/global_step9"},
        {
            "event": "throughput_margin",
            "text": "one more loss of stage 0 and nobody is left there",
            "stage": 0,
            "losses": 1,
        },
    ]
    lines = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"finished"' not in line]
    (folder / "events.jsonl").write_text(
        "\n".join([*lines, *(json.dumps({"time": 104.6} | one) for one in more)]) + "\n"
    )
    assert main(["status", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["end"], found["step"], found["workers"]) == ("running", None, 9, {"live": 3, "of": 4})
    assert found["step_s"] == {"now": 0.4, "before": 0.23} and found["samples_per_s"] == {
        "now": 20.0,
        "before": 34.7826,
    }
    assert found["checkpoint"] == "saved/global_step9" and found["margin"].startswith("one more loss")


def test_status_says_where_metrics_are_while_the_job_runs(folder):
    url = "http://127.0.0.1:9400/metrics"
    assert without_end(folder, {"event": "metrics", "url": url})["metrics"] == url
    assert "metrics" not in without_end(
        folder, {"event": "metrics", "url": url}, {"event": "finished", "text": "all have left"}
    )


def without_end(folder: Path, *more: dict, **start: object) -> dict[str, str]:
    """``recycle status`` of that run before its end, with ``more`` events and another ``start``, by the word that each
    line begins with.
    """
    events = [
        json.loads(line)
        for line in (folder / "events.jsonl").read_text().splitlines()
        if '"finished"' not in line and '"left"' not in line
    ]
    next(event for event in events if event["event"] == "start").update(start)
    (folder / "events.jsonl").write_text(
        "".join(f"{json.dumps(event)}\n" for event in [*events, *({"time": 104.6, "text": ""} | one for one in more)])
    )
    known = status(RunHistory.read(folder), 200.0)
    assert json.loads(json.dumps(known)) == known
    return dict(lines(known))


def test_nothing_is_predicted_where_a_stage_is_gone_nor_before_there_is_a_plan(folder):
    one = {"event": "lost", "seat": "0.0", "rank": 0, "how": "its connection broke", "seen_at": 104.6}
    assert without_end(folder, one)["predicted"] == "not known yet"
    assert without_end(folder, {**one, "seat": "1.1", "rank": 3})["predicted"] == "nothing: nobody is left in stage 1"
    assert "predicted 0%" not in (text := report.write(folder).read_text()) and "predicted None" not in text


def test_a_job_whose_coordinator_was_killed_runs_no_more(folder):
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = {"host": "h", "stop": 7, "place": place()}
    killed = f"killed: the coordinator's process on host h, {ended.pid}, is gone, and has not said why"
    assert (
        without_end(folder, coordinator=here | {"pid": ended.pid})["state"] == killed
        and killed in Read(report.write(folder).read_text()).texts["td"]
    )
    assert without_end(folder, coordinator=here | {"pid": os.getpid()})["state"].startswith("killed"), (
        "the log is of 1970, and this process is not"
    )
    running = without_end(folder, coordinator=here | {"pid": os.getpid()}, time=time.time())
    assert (
        running["state"].startswith("running") and running["to stop it"] == "kill 7 on host h ends the job at a commit"
    )
    assert without_end(folder, coordinator={"host": "h", "stop": 7, "place": "elsewhere", "pid": ended.pid})[
        "state"
    ].startswith("running")


WRONG = {
    "missing": (None, "nowhere is no folder: name a run folder"),
    "empty": ("", "tells of no job: it has no start event"),
    "broken": ('{"time": 1}\n', "events.jsonl, line 1 is no event: "),
    "other": ("[1]\n", "events.jsonl, line 1 is no event: [1]"),
}


@pytest.mark.parametrize("command", ("status", "report"))
@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_a_bad_folder_is_one_line(tmp_path, capsys, command, text, message):
    folder = tmp_path / ("nowhere" if text is None else "run")
    if text is not None:
        folder.mkdir()
        (folder / "events.jsonl").write_text(text)
    assert main([command, str(folder)]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out
    assert not (folder / "report.html").exists()


def test_a_line_that_is_being_written_is_left_out(folder):
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"time": 105.0, "event": "war')
    assert RunHistory.read(folder).events[-1]["event"] == "finished"


# --- the page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "low, high, expected",
    [(0, 9.4, [0, 5, 10]), (5.2, 5.6, [5.2, 5.3, 5.4, 5.5, 5.6]), (3, 3, [3, 4]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_hold_everything(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_long_line_is_thinned_out_and_keeps_its_peaks():
    points = {step: 100.0 if step == 54_321 else 1.0 for step in range(1, 100_001)}
    drawn = Read(chart(Chart("", points, 1, 100_000)))
    line = chart(Chart("", points, 1, 100_000)).partition('polyline points="')[2].partition('"')[0].split()
    assert drawn.links == [] and len(line) < 2500 and sum(float(point.partition(",")[2]) < 30 for point in line) == 1


def test_what_is_no_number_is_not_drawn():
    assert "no two steps" in chart(Chart("loss", {1: float("nan"), 2: 1.0}, 1, 2))


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
def test_a_browser_shows_it(folder):
    """Laid out by Chromium: every chart and picture has a size, and nothing was fetched or went wrong."""
    trace(folder)
    path = report.write(folder)
    measure = (
        "<script>onload = () => { const seen = [...document.querySelectorAll('svg, img, table')].map(e => "
        "[e.tagName.toLowerCase(), "
        "e.getBoundingClientRect().width, e.getBoundingClientRect().height, e.tagName != 'IMG' || e.naturalWidth > "
        "0]); "
        "document.title = JSON.stringify({seen, wide: document.documentElement.scrollWidth, fetched: "
        "performance.getEntriesByType('resource')"
        ".map(r => r.name.slice(0, 5)).filter(n => n != 'data:')}); }</script></body>"
    )
    path.write_text(path.read_text().replace("</body>", measure))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1100,900",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    title = Read(done.stdout).texts["title"][0]
    found = json.loads(title)
    assert [name for name, *_ in found["seen"]] == ["table", "svg", "svg", "table", "img", "table"]
    assert all(width > 100 and height > 20 and complete for _, width, height, complete in found["seen"]), found
    assert found["wide"] <= 1100 and found["fetched"] == []


def test_tables_and_paragraphs_are_escaped():
    read = Read(page("a < b", [("x & y", [Table(("<",), [(">",)], {0: "bad"}), "c < d"])]))
    assert (
        read.texts["h1"] == ["a < b"]
        and read.texts["th"] == ["<"]
        and read.texts["td"] == [">"]
        and read.texts["p"] == ["c < d"]
    )


@pytest.mark.parametrize("before, now", RENAMED.items())
def test_logs_of_the_last_release_are_read(tmp_path, before, now):
    (tmp_path / EVENTS).write_text(json.dumps({"event": before, "time": 1.0}) + "\n")
    assert [event["event"] for event in read_events(tmp_path / EVENTS)] == [now]
    assert f"`{before}` for `{now}`" in " ".join(
        (Path(recycle_plugin.__file__).parent / "docs" / "operations.md").read_text().split()
    )
