"""What a report says of the hand-written run: the sentence, the facts, and the schedule that was measured."""

from __future__ import annotations

import json
from math import isnan

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from recycle_plugin.cli import main
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.lab.commands import demo
from recycle_plugin.lab.commands.came_back import NotBack
from recycle_plugin.observability import report
from recycle_plugin.observability.console import QUIET
from recycle_plugin.observability.run_history import NO_REASON, RunHistory
from recycle_plugin.observability.run_summary import UNKNOWN, end, facts, sentence, wall_clock
from recycle_plugin.render import gantt
from tests.support.run_folder import Read, rewrite, spans, trace, two_at_once


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
    "passed from the loss to the next commit (an undisturbed step took 0.23 s), and throughput went from 34.78 "
    "to 20 samples/s (58%)."
)


def test_one_sentence_at_the_top(folder, capsys):
    """... says what happened and what it cost, in the report and in ``recycle status``."""
    found = Read(report.write(folder).read_text())
    assert found.texts["p"][0] == SENTENCE
    assert main(["status", str(folder)]) == 0 and capsys.readouterr().out.splitlines()[0] == SENTENCE


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
    assert main(["status", str(folder)]) == 1
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
    assert found["noticed"] == "0.1: 0.05 s after the fault"
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
        loaded = {"time": 104.37, "event": "loaded", "text": "", "step": 7}
        return [*events[:-2], loss, loaded, *again, *events[-2:]]

    again: list[dict] = []
    assert sorted(rewrite(folder, more).commits) == list(range(1, 10)), "as of a best model, after the last step"
    again = [{"time": 104.39, "event": "committed", "text": "", "step": 8}]
    history = rewrite(folder, more)
    assert sorted(history.commits) == sorted(history.curve) == list(range(1, 9))
    assert all(max(drawn.points) <= 8 for drawn in report.charts(history))


@pytest.mark.parametrize("back", (False, True))
def test_a_seat_whose_ranks_are_lost_together_is_lost_once(folder, back):
    """The first one's cause counts. A seat that is back is lost anew."""

    def more(events: list[dict]) -> list[dict]:
        start = next(event for event in events if event["event"] == "start")
        start["others"] = {seat: [10 + first] for seat, first in start["seats"].items()}
        place, first = next((place, event) for place, event in enumerate(events) if event["event"] == "lost")
        other = {**first, "rank": 10 + first["rank"], "cause": "together", "how": "it goes with the other"}
        both = [first, other]
        if back:
            returns = [{**each, "event": "rejoined", "step": 6, "time": each["time"] + 0.01} for each in both]
            both += [*returns, *({**each, "time": each["time"] + 0.02} for each in (other, first))]
        return [*events[:place], *both, *events[place + 1 :]]

    history = rewrite(folder, more)
    how = next(event["how"] for event in history.of("lost"))
    assert [failure.how for failure in history.failures] == [how, "it goes with the other"][: 1 + back]
    assert [str(absence.seat) for absence in history.absences] == ["0.1"] * (1 + back)
    assert history.gone["0.1"].rank == history.seats["0.1"] + 10 * back
    assert ("2 times" in sentence(history)) == back


def test_a_model_without_named_layers_has_parameters_only(folder):
    def more(events: list[dict]) -> list[dict]:
        built = [
            {"time": 100.0, "event": "stage", "stage": stage, "layers": [], "parameters": 7, "precision": "fp32"}
            for stage in range(RunHistory(tuple(events)).shape.stages)
        ]
        return [*events, *built]

    history = rewrite(folder, more)
    assert dict(facts(history))["model"] == f"{7 * history.shape.stages} parameters"


def test_two_losses_in_one_step_have_one_mark_and_one_picture(folder):
    history = rewrite(folder, two_at_once)
    assert [drawn.lost for drawn in report.charts(history)] == [[6]] * 2
    before, interrupted, after = report.panels(spans(), *history.failures)
    assert interrupted.deaths == after.deaths == {Seat(0, 1): 102_750_000, Seat(1, 0): 102_810_000}
    assert [pause.text for pause in interrupted.pauses] == ["100 ms to notice and regroup"] and not before.deaths
    trace(folder)
    pictures = [content for content in report.schedule(history, spans()) if isinstance(content, bytes)]
    assert len(pictures) == 1


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


# --- logs that tell less, or other things ------------------------------------------------------------------


def with_end(text: str, *more: dict):
    def changed(events: list[dict]) -> list[dict]:
        return [*events[:-1], *({"time": 104.36, "text": ""} | one for one in more), {**events[-1], "text": text}]

    return changed


ENDS = {
    "crash": (
        with_end("the job has ended after step 9: the script of 0.0 ended with E", {"event": "error", "rank": 0}),
        " and ended: the script of 0.0 ended with E;",
    ),
    "crash when stopped": (
        with_end("the job has ended after step 9: E", {"event": "terminate"}, {"event": "error", "rank": 0}),
        " and ended: E;",
    ),
    "an error that was a loss": (
        with_end("all workers have left after step 9", {"event": "error", "rank": 2}),
        " and came to its planned end;",
    ),
    "guards": (with_end("the job has ended after step 9: a guard was killed"), " and ended: a guard was killed;"),
    "no reason": (with_end(""), ", ended, and the log does not say why;"),
}


@pytest.mark.parametrize("change, said", ENDS.values(), ids=ENDS)
def test_a_planned_end_is_told_only_where_the_log_has_one(folder, change, said):
    history = rewrite(folder, change)
    assert said in sentence(history)
    assert end(history) == history.end["text"] or (history.end["text"], end(history)) == ("", NO_REASON)


def test_figures_of_a_failure_are_of_its_time_though_a_load_took_steps_back(folder):
    """Steps 5 to 9 are trained again 6 s later, each in 0.4 s; the failure was in step 6."""

    def again(events: list[dict]) -> list[dict]:
        steps = [{"time": 110 + 0.4 * (step - 4), "event": "committed", "step": step} for step in range(5, 10)]
        return [*events[:-1], {"time": 110.0, "event": "loaded", "step": 4}, *steps, {**events[-1], "time": 112.0}]

    history = rewrite(folder, again)
    assert sentence(history) == SENTENCE.replace("4.35 s", "12 s")
    assert history.failures[0].committed_at == 103.15 and 5 not in history.took and history.took[6] < 0.41


def dropped(*steps: int):
    def changed(events: list[dict]) -> list[dict]:
        return [event for event in events if not (event["event"] in ("committed", "loss") and event["step"] in steps)]

    return changed


def test_commits_whose_lines_are_missing_are_not_denied(folder):
    """As where the disk was full."""
    history = rewrite(folder, dropped(3, 6))
    assert sentence(history) == (
        "The job trained 9 steps in 4.35 s and came to its planned end; 1 of 4 workers was lost (0.1 in step 6): the "
        "time to the next commit is not in the log."
    )
    (row,) = report.failures(history).rows
    assert row[5:] == (UNKNOWN, UNKNOWN, "no")
    said = sentence(rewrite(folder, dropped(*range(1, 10))))
    assert said.startswith("The job trained up to step 9 (the commits are not in the log) and came")
    assert "no step" not in said


def test_a_long_log_keeps_its_first_and_last_events(folder):
    def long(events: list[dict]) -> list[dict]:
        more = [{"time": 104.0, "event": "warning", "text": f"w{number}"} for number in range(3000)]
        return [*events[:-1], *more, events[-1]]

    history = rewrite(folder, long)
    texts = [row[2] for row in report.events(history).rows]
    all_of_them = len([event for event in history.events if event["event"] not in QUIET])
    assert len(texts) == report.LISTED + 1 and texts[-1] == "all workers have left after step 9"
    assert texts[report.LISTED // 2] == f"{all_of_them - report.LISTED} events are left out here"


FAULTS = {
    "of another release": ({"fault": "slow 0.1 before 1F0.1@1"}, False),
    "that loses nobody": ({"fault": "leave 0.1 before 1F0.1@1"}, False),
    "long before": ({"struck_at": 20.0}, False),
    "a stop, but its connection broke": ({"fault": "stop 0.1 before 1F0.1@1"}, False),
    "no form of a fault": ({"fault": "kill it"}, False),
    "the fault": ({}, True),
}


@pytest.mark.parametrize("fields, was_it", FAULTS.values(), ids=FAULTS)
def test_only_a_fault_that_explains_a_loss_is_its_cause(folder, fields, was_it):
    def changed(events: list[dict]) -> list[dict]:
        return [{**event, **fields} if event["event"] == "fault" else event for event in events]

    (failure,) = rewrite(folder, changed).failures
    assert (failure.fault is not None) == was_it and (failure.struck_at < failure.seen_at) == was_it


@pytest.mark.parametrize("struck_at, was_it", [(102.75, True), (203.0, False)], ids=("meanwhile", "after the loss"))
def test_a_coordinator_that_stood_still_says_that_it_saw_a_loss_before_the_fault(folder, struck_at, was_it):
    """It stood still from 102.7 on for 100 s, which its own clock leaves out."""

    def stood_still(events: list[dict]) -> list[dict]:
        said = {"fault": {"struck_at": struck_at}, "lost": {"seen_at": 102.7}}
        return [
            {**event, "time": event["time"] + 100, **said.get(event["event"], {})} if event["time"] >= 102.8 else event
            for event in events
        ]

    (failure,) = rewrite(folder, stood_still).failures
    assert (failure.fault is not None) == was_it
    assert failure.struck_at == failure.seen_at == (struck_at if was_it else 102.7)


def test_figures_that_are_no_numbers_are_left_out(folder):
    def odd(events: list[dict]) -> list[dict]:
        for event in events:
            if event["event"] == "committed":
                event.update(step_s=None, stage_bubbles=[None, 0.2], bubble_share=None, redone_share=None)
            elif event["event"] == "loss":
                event["loss"] = None
        return [event for event in events if event["event"] != "worker"]

    history = rewrite(folder, odd)
    assert [drawn.title for drawn in report.charts(history)] == ["Throughput"] and history.failures[0].pid is None
    assert report.write(folder)


def test_commits_at_one_time_have_no_rate(folder, capsys):
    def at_once(events: list[dict]) -> list[dict]:
        return [{**event, "time": 102.0} if event["event"] == "committed" else event for event in events]

    history = rewrite(folder, at_once)
    assert isnan(history.before_s) and isnan(history.now_s) and "throughput" not in sentence(history)
    assert main(["status", str(folder)]) == 0 and "nan" not in capsys.readouterr().out
    assert "nan" not in report.throughput(history)


def test_the_commit_of_the_step_before_is_not_one_after_a_loss(folder):
    def late(events: list[dict]) -> list[dict]:
        fifth = next(event for event in events if event.get("step") == 5 and event["event"] == "committed")
        kept = [event for event in events if event["time"] < 103 and event is not fifth]
        return [*kept[:-1], {**fifth, "time": 102.83}, kept[-1]]

    history = rewrite(folder, late)
    assert history.last == 5 and sentence(history).endswith("no step was committed after that.")


def test_a_demo_whose_worker_is_not_back_in_time_trains_longer(monkeypatch, capsys):
    """... and says so, as often as it may; with a number of steps that was asked for it fails at once."""
    tried = []

    def run_of(out, name, steps, console):
        tried.append(steps)
        if steps < 200:
            raise NotBack("the worker of seat 0.1 did not come back")
        return 0

    monkeypatch.setattr(demo, "_demo", run_of)
    assert demo.run("out", "rejoin", None) == 0 and tried == [90, 270]
    assert "did not come back: this machine is slow to start processes now. Once more, with 270 steps" in (
        capsys.readouterr().out
    )
    assert demo.run("out", "rejoin", 60) == 1 and tried == [90, 270, 60]
    assert "failed: the worker of seat 0.1 did not come back (this machine is slow" in capsys.readouterr().out


def test_the_demo_waits_as_long_as_steps_are_committed():
    stall, steps = demo.Stall(300.0), iter((7, 12, 12))
    assert [stall.seen(took_s, lambda: next(steps)) for took_s in (299, 300, 301, 600)] == 4 * [False]
    assert stall.seen(900, lambda: next(steps))


def test_the_demo_gives_up_a_run_that_never_commits():
    assert demo.Stall(300.0).seen(300, lambda: 0)
