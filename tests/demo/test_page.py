"""``recycle report`` and ``recycle status`` on the hand-written run: what they say, and that a browser shows it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import recycle_plugin
from recycle_plugin import planner
from recycle_plugin.cli import main
from recycle_plugin.commands.status import lines, status
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.observability import measured_costs, report
from recycle_plugin.observability.run_history import EVENTS, RENAMED, RunHistory, place, read_events
from recycle_plugin.observability.run_summary import UNKNOWN, facts, sentence, wall_clock
from recycle_plugin.observability.trace import TraceFile
from recycle_plugin.render import gantt
from recycle_plugin.render.page import Chart, Table, chart, page, ticks
from tests.demo.test_report import spans
from tests.support.boxes import BROWSER, NARROW, WIDE, WIDTHS, measured, wrong

LOG = Path(__file__).parent / "with_failure.jsonl"
WHY = "its process was killed by signal 9 (SIGKILL), says its supervisor"
VOID = {"meta", "img"}


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
        WHY,
        f"3 of 4 left; seat 0.1 (rank 2): {WHY}",
        "2 replicas of 2 stages, 4 micro-batches each",
    } <= set(cells)
    assert "34.78 samples/s, 0.23 s a step; at the end 20 samples/s, 0.4 s a step: 58%, predicted 60%" in cells
    assert found.texts["text"].count("0.1 lost") == 2, "on the throughput's and the loss's chart"
    assert any("As it ran, measured, when 0.1 was lost" in text for text in found.texts["p"]) == traced
    assert any("its times are no measurement" in text for text in found.texts["p"]) != traced


def test_without_a_trace_and_figures_it_shows_the_plans_with_assumed_costs_and_says_so(folder):
    history = RunHistory.read(folder)
    assert measured_costs.before(history) is None and measured_costs.after(history) is None
    before, after = report.planned(history, None, None)
    assert (before.title, after.title) == ("with everybody there (assumed costs)", "without 0.1 (assumed costs)")
    assert len({span.seat for span in before.spans}) == 4 and len({span.seat for span in after.spans}) == 3


def figures(folder: Path) -> None:
    """Let each committed step say that workers of stage 0 compute half of the time, and those of stage 1 a quarter."""
    previous = 100.0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "committed":
            event.update(step_s=event["time"] - previous, stage_bubbles=[0.5, 0.75], bubble_share=0.6)
            previous = event["time"]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))


def test_without_a_trace_plans_have_the_costs_that_were_measured(folder):
    """Before: steps 4 and 5, median 0.23 s, of two workers a stage; after: steps 7 to 9, 0.4 s, of two and one."""
    figures(folder)
    history = RunHistory.read(folder)
    before, after = measured_costs.before(history), measured_costs.after(history)
    assert (before.first, before.last, after.first, after.last) == (4, 5, 7, 9)
    assert before.micro_batch_us == (round(0.23 / 8 * 1e6), round(0.115 / 8 * 1e6))
    assert after.micro_batch_us == (round(0.4 / 8 * 1e6), round(0.1 / 8 * 1e6))
    assert before.costs.forward[0] == before.costs.input[0] == before.costs.weight[0] == round(28750 / 3)
    whole, without = report.planned(history, before, after)
    assert whole.title == "with everybody there (measured, steps 4 to 5)"
    busy = sum(span.end_us - span.start_us for span in whole.spans if span.seat.stage == 0)
    assert busy == pytest.approx(8 * 28750, rel=0.01)
    for seat in {span.seat for span in whole.spans}:  # nobody does two things at once
        mine = sorted((span for span in whole.spans if span.seat == seat), key=lambda span: span.start_us)
        assert all(one.end_us <= two.start_us for one, two in pairwise(mine)) and len(mine) == 12
    assert without.title == "without 0.1 (measured, steps 7 to 9)"
    (note,) = (text for text in Read(report.write(folder).read_text()).texts["p"] if "No trace" in text)
    assert "before the first failure 28.8, 14.4 ms" in note and "no measurement" not in note


def test_no_text_of_a_picture_covers_another(folder, monkeypatch):
    """A pause at the left edge beside the rows' names, and two losses in one step."""
    history, drawn = rewrite(folder, two_at_once), []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    late = [span for span in spans() if span.instruction.step != 6 or span.start_us >= 102_745_000]
    gantt.draw("", *report.panels(late, *history.failures))
    (figure,) = drawn
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in axes.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts]
    pauses = [box for text, box in boxes if "to notice and regroup" in text]
    names = [box for text, box in boxes if text.startswith("replica ")]
    assert len(pauses) == 1 and len(names) == 12
    assert not any(pause.overlaps(name) for pause in pauses for name in names)
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for _, box in boxes)


def test_a_plan_that_is_timed_with_its_own_costs_is_as_the_planner_has_it_from_rest():
    """F of a micro-batch after that of the stage before, I after that of the next one, each as soon as it may."""
    view, costs = Topology(1, 2, 1).full(), CostModel((5, 7), (11, 13), (17, 19), communication=3)
    plan = planner.plan(view, costs, Policy())
    found = {(str(span.seat), span.instruction.op.value): span[2:] for span in measured_costs.timed(plan, costs)}
    assert found == {
        ("0.0", "F"): (0, 5),
        ("0.1", "F"): (8, 15),
        ("0.1", "I"): (15, 28),
        ("0.1", "W"): (28, 47),
        ("0.0", "I"): (31, 42),
        ("0.0", "W"): (42, 59),
    }


def test_a_run_without_a_failure_shows_its_last_traced_steps(folder):
    trace(folder)
    kinds = ("fault", "lost", "confirmed", "resume")
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text(
        "".join(line for line in lines if json.loads(line)["event"] not in kinds).replace(
            '"workers": 3', '"workers": 4'
        )
    )
    text = report.write(folder).read_text()
    assert "As it ran, measured: the last two steps that were traced." in text
    assert report.last_steps(spans()).title == "steps 8 and 9"
    assert (
        Read(text).texts["p"][0] == "The job trained 9 steps in 4.35 s and came to its planned end; no worker was lost."
    )


SENTENCE = (
    "The job trained 9 steps in 4.35 s and came to its planned end; 1 of 4 workers was lost (0.1 in step 6): 0.4 s "
    "passed from the loss to the next commit, where an undisturbed step took 0.23 s, and throughput went from 34.78 to 20 "
    "samples/s (58%)."
)


def test_one_sentence_at_the_top(folder, capsys):
    """... says what happened and what it cost, in the report and in ``recycle status``."""
    found = Read(report.write(folder).read_text())
    assert found.texts["p"][0] == SENTENCE
    assert main(["status", str(folder)]) == 0 and capsys.readouterr().out.splitlines()[0] == SENTENCE


def rewrite(folder: Path, change: Callable[[list[dict]], list[dict]]) -> RunHistory:
    """The run with other events."""
    path = folder / "events.jsonl"
    events = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return RunHistory.read(folder)


END = {"time": 104.41, "event": "end", "text": "the job ends: the disk burns"}


def stopped(events: list[dict]) -> list[dict]:
    return [*events[:-1], {"time": 104.0, "event": "terminate", "text": ""}, events[-1]]


def ended(events: list[dict]) -> list[dict]:
    return [*events[:-1], END]


@pytest.mark.parametrize(
    "change, said", [(stopped, "and was stopped as asked"), (ended, "and ended before its planned end")]
)
def test_the_sentence_says_how_it_ended(folder, change, said):
    assert said in sentence(rewrite(folder, change))


def test_a_job_that_never_went_on_says_so(folder):
    def cut(events: list[dict]) -> list[dict]:
        return [event for event in events if event["time"] < 102.84]

    assert sentence(rewrite(folder, cut)) == (
        "The job has so far trained 5 steps in 2.76 s; 1 of 4 workers was lost (0.1 in step 6): no step was committed "
        "after that."
    )


def test_the_end_is_a_fact_of_the_report_and_of_status(folder, capsys):
    rewrite(folder, ended)
    found = Read(report.write(folder).read_text())
    assert found.texts["th"][0] == "end" and found.texts["td"][0] == "the job ends: the disk burns"
    assert main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "state      the job ends: the disk burns"


def test_model_batch_precision_hosts_times_notice_and_checkpoints(folder):
    def told(events: list[dict]) -> list[dict]:
        start = next(number for number, event in enumerate(events) if event["event"] == "start")
        events[start]["seat_hosts"] = {"0.0": "a", "0.1": "a", "1.0": "b", "1.1": "b"}
        parts = [("Embedding", "Block", "Block"), ("Block", "Head")]
        stages = [
            {"time": 100.1, "event": "stage", "text": "", "stage": stage, "layers": layers, "parameters": 1000}
            | {"precision": "bf16, with fp32 masters"}
            for stage, layers in enumerate(parts)
        ]
        saved = [{"time": 103.5, "event": "checkpoint", "text": "", "path": f"saved/{step}"} for step in (6, 7)]
        return [*events[: start + 1], *stages, *events[start + 1 : -3], *saved, *events[-3:]]

    found = dict(facts(rewrite(folder, told)))
    assert found["model"] == "5 layers (Embedding, 3 Block, Head), 2,000 parameters"
    assert found["batch"] == "8 samples a step, 1 a micro-batch" and found["precision"] == "bf16, with fp32 masters"
    assert found["hosts"] == "a: 0.0, 0.1; b: 1.0, 1.1"
    assert found["notice"] == "0.1: 0.05 s after the fault"
    assert found["checkpoint"] == "2 written, the last one saved/7"
    assert found["started"] == wall_clock(100.0) and found["ended"] == wall_clock(104.4)
    assert {*found.values()} < {*Read(report.write(folder).read_text()).texts["td"]}


def test_what_a_log_does_not_say_is_not_made_up(folder):
    found = dict(facts(RunHistory.read(folder)))
    assert (found["model"], found["precision"], found["hosts"]) == (UNKNOWN, UNKNOWN, "vm")


def test_only_committed_steps_are_shown(folder):
    """A loss that was announced of a step that was never committed, and steps that a load took back, are left out."""

    def more(events: list[dict]) -> list[dict]:
        loss = {"time": 104.36, "event": "loss", "text": "", "step": 10, "loss": 77.0}
        return [*events[:-2], loss, {"time": 104.37, "event": "loaded", "text": "", "step": 7}, *events[-2:]]

    history = rewrite(folder, more)
    assert sorted(history.commits) == sorted(history.curve) == list(range(1, 8))
    assert all(drawn.last == 7 and max(drawn.points) <= 7 for drawn in report.charts(history))


def two_at_once(events: list[dict]) -> list[dict]:
    """1.0 is lost with 0.1."""
    lost = {"time": 102.815, "event": "lost", "text": "", "seat": "1.0", "rank": 1, "how": "silent", "seen_at": 102.81}
    place = next(number for number, event in enumerate(events) if event["event"] == "confirmed")
    return [*events[:place], lost, *events[place:]]


def test_two_losses_in_one_step_have_one_mark_and_one_picture(folder):
    history = rewrite(folder, two_at_once)
    assert [dict(drawn.marks) for drawn in report.charts(history)] == [{6: "0.1, 1.0 lost"}] * 2
    before, interrupted, after = report.panels(spans(), *history.failures)
    assert interrupted.deaths == after.deaths == {Seat(0, 1): 102_750_000, Seat(1, 0): 102_810_000}
    assert [pause.text for pause in interrupted.pauses] == ["100 ms to notice and regroup"] and not before.deaths
    trace(folder)
    pictures = [content for content in report.schedule(history, spans()) if isinstance(content, bytes)]
    assert len(pictures) == 1


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
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
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
    assert drawn.links == [] and len(line) < 2500 and sum(float(point.partition(",")[2]) < 40 for point in line) == 1


def test_what_is_no_number_is_not_drawn():
    assert "No two steps" in chart(Chart("loss", {1: float("nan"), 2: 1.0}, 1, 2))


def drawn_texts(given: Chart) -> list[str]:
    return Read(chart(given)).texts["text"]


def test_axes_have_names_and_begin_at_0():
    """... but for a loss that would be a flat line then, which says where its axis begins."""
    flat, steep = {1: 9.0, 2: 8.5, 3: 8.2}, {1: 9.0, 2: 5.0, 3: 1.0}
    assert {"samples/s", "step", "0", "10"} <= set(drawn_texts(Chart("", flat, 1, 3, {}, "samples/s")))
    assert {"mean loss", "step", "0", "10"} <= set(drawn_texts(Chart("", steep, 1, 3, {}, "mean loss", False)))
    cut = drawn_texts(Chart("", flat, 1, 3, {}, "mean loss", False))
    assert {"mean loss (the axis begins at 8)", "step", "8.5", "9"} <= set(cut)
    assert cut.count("0") == 1, "of the steps"
    assert "100" in drawn_texts(Chart("", {101: 1.0, 140: 2.0}, 100, 140)), "a run that goes on begins where it does"


def test_marks_without_room_for_their_text_keep_their_line():
    marks = {step: f"{step}.0 lost" for step in range(1, 11)}
    drawn = Read(chart(Chart("", dict.fromkeys(range(1, 101), 1.0), 1, 100, marks)))
    assert drawn.texts["title"] == [*marks.values()]
    assert "1.0 lost" in drawn.texts["text"] and 1 < sum("lost" in text for text in drawn.texts["text"]) < 10


def test_the_page_is_light_or_dark_and_made_for_phones():
    text = page("", "", [])
    assert "@media (prefers-color-scheme: dark)" in text and "color-scheme: light dark" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media (max-width:" in text


def long_words(events: list[dict]) -> list[dict]:
    """Two losses in one step, a path without a blank, and a cause that is a paragraph."""
    events = two_at_once(events)
    path = "/scratch/" + "a-folder-with-a-long-name/" * 12 + "global_step9"
    saved = {"time": 104.38, "event": "checkpoint", "text": f"checkpoint in {path}", "path": path}
    table = {"time": 100.0, "event": "deadlines", "text": "who waits how long:\n" + "  15 s  a word of a worker\n" * 5}
    for event in events:
        if event["event"] == "confirmed":
            event["how"] = "its process was killed by signal 9 (SIGKILL) " * 8
    return [*events[:6], table, *events[6:-2], saved, *events[-2:]]


@pytest.fixture
def crowded() -> str:
    """A page of charts with the widest numbers and more marks than there is room for."""
    marks = {step: f"{step % 64}.{step % 7}, {step % 9}.1 lost" for step in range(40_000, 1_000_000, 30_000)}
    points = {step: 1.5e6 + step for step in range(1, 1_000_001, 1000)}
    late = Chart(
        "b", {step: 1 + step * 1e-9 for step in points}, 999_990, 1_000_000, {999_999: "1.1 lost"}, "loss", False
    )
    charts = [Chart("a", points, 1, 1_000_000, marks, "% of live workers' time, no micro-batch"), late]
    return page("a" * 200, "b" * 400, [("c" * 100, charts), ("d", [Table(("e", "f"), [("g" * 300, "1.0")])])])


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("which", ("traced", "untraced", "crowded"))
def test_nothing_is_cut_off_or_covered_in_a_browser(folder, which, crowded):
    """Laid out by Chromium at the widths of a phone, a tablet and a desk."""
    if which == "traced":
        trace(folder)
    rewrite(folder, long_words)
    found = measured(crowded if which == "crowded" else report.write(folder).read_text(), folder)
    assert {width: (*wrong(at),) for width, at in found.items()} == dict.fromkeys(WIDTHS, ())
    assert [at["width"] for at in found.values()] == [*WIDTHS] and not any(at["fetched"] for at in found.values())
    if which != "crowded":
        wide, narrow = found[WIDE], found[NARROW]
        assert len(wide["charts"]) == 2 and len(wide["images"]) == 1 and len(narrow["texts"]) > 40
        assert wide["charts"][0]["box"][1] == pytest.approx(wide["charts"][1]["box"][1]), "side by side"
        assert narrow["charts"][0]["box"][3] <= narrow["charts"][1]["box"][1], "one below the other"
        assert narrow["images"][0]["width"] > NARROW, "it scrolls, and can be read"


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
def test_what_is_cut_off_or_covered_is_found(tmp_path):
    """The check of boxes itself, on a page with each mistake."""
    svg = '<svg viewBox="0 0 400 90" style="width: 300px"><text y="{}">one text</text><text y="{}">another</text></svg>'
    bad = {
        "the page is 2008 wide": '<p style="width: 2000px">text</p>',
        "sticks out of its element": f'<p style="width: 50px">{"a" * 40}</p>',
        "sticks out of its chart": svg.format(2, 60),
        "cover each other in a chart": svg.format(40, 45),
        "'here' and 'there' cover": '<p>here</p><p style="margin-top: -2.4em">there</p>',
        "pixels high": svg.replace("<text", '<text font-size="8"').format(30, 60),
    }
    for said, body in bad.items():
        found = measured(f"<!DOCTYPE html><html><body>{body}</body></html>", tmp_path)[WIDE]
        assert any(said in one for one in wrong(found)), (said, [*wrong(found)])


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
def test_a_browser_shows_it_light_or_dark(tmp_path):
    """As the reader's system is."""
    scheme = "--blink-settings=preferredColorScheme={}"
    dark, light = (measured(page("", "", []), tmp_path, scheme.format(number)) for number in (0, 1))
    assert dark[WIDE]["background"] == "rgb(21, 27, 33)" and light[WIDE]["background"] == "rgb(255, 255, 255)"


def test_tables_and_paragraphs_are_escaped():
    read = Read(page("a < b", "lead <", [("x & y", [Table(("<",), [(">",)], {0: "bad"}), "c < d"])]))
    assert (
        read.texts["h1"] == ["a < b"]
        and read.texts["th"] == ["<"]
        and read.texts["td"] == [">"]
        and read.texts["p"] == ["lead <", "c < d"]
    )


@pytest.mark.parametrize("before, now", RENAMED.items())
def test_logs_of_the_last_release_are_read(tmp_path, before, now):
    (tmp_path / EVENTS).write_text(json.dumps({"event": before, "time": 1.0}) + "\n")
    assert [event["event"] for event in read_events(tmp_path / EVENTS)] == [now]
    assert f"`{before}` for `{now}`" in " ".join(
        (Path(recycle_plugin.__file__).parent / "docs" / "operations.md").read_text().split()
    )
