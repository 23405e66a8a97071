"""``report.html`` of a run: throughput and loss with the failures marked, the schedule before and after, the events."""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path

from recycle_plugin import folders
from recycle_plugin.core.coordinator.output import Event
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.span import Span, run_again
from recycle_plugin.observability.console import QUIET, STYLES, event_line
from recycle_plugin.observability.run_history import EVENTS, KILLED, Failure, RunHistory
from recycle_plugin.observability.trace import read_traces
from recycle_plugin.render import gantt
from recycle_plugin.render.page import Chart, Table, page

NAME = "report.html"
LONGEST_S = 600  # that a process which nobody waits for may take
DRAWN_SEATS = 64  # a picture of more would not be read
DRAWN_FAILURES = 3
LISTED = 2000  # events


def write(folder: Path) -> Path:
    """Write the report of the last job in the run folder ``folder``.

    Raises ValueError, in one line, where there is none.
    """
    history = RunHistory.read(folder)
    began = _us(history.of("start")[0]["time"])
    spans = [
        span for span in read_traces(folder / "trace") if span.start_us >= began
    ]  # traces of an earlier job in the folder stay there
    path = folder / NAME
    folders.replace(folders.prepared(path, page(f"Run {folder.resolve().name}", sections(history, spans))), path)
    return path


def sections(history: RunHistory, spans: Sequence[Span]) -> Iterator[tuple[str, list]]:
    yield "Job", [Table((), [row for row in summary(history) if row[1]])]
    yield "Steps", charts(history)
    if history.failures:
        yield "Failures", [failures(history)]
    yield "Schedule", [*schedule(history, spans)]
    yield "Events", [events(history)]


def summary(history: RunHistory) -> Iterator[tuple[str, str]]:
    shape, commits = history.shape, history.commits
    began = history.of("start")[0]["time"]
    yield "topology", f"{shape.replicas} replicas of {shape.stages} stages, {shape.micro_batches} micro-batches each"
    yield "started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    yield (
        "steps",
        f"{min(commits)} to {max(commits)}, in {max(commits.values()) - began:.1f} s" if commits else "none committed",
    )
    yield (
        "workers",
        f"{len(history.view.live)} of {len(shape.seats)} left"
        + "".join(f"; {name}: {why}" for name, why in gone(history)),
    )
    yield "throughput", throughput(history)
    yield "last checkpoint", history.checkpoint or ""
    yield (
        "end",
        history.end["text"]
        if history.end
        else KILLED.format(**history.coordinator)
        if history.was_killed
        else "none yet",
    )


def gone(history: RunHistory) -> list[tuple[str, str]]:
    """Who, by the names of all lines, and why."""
    return [(named(history.seats[seat], seat), why) for seat, why in history.gone.items()]


def throughput(history: RunHistory) -> str:
    """Before the first failure and now, beside what the planner predicted."""
    before, now = history.before_s, history.now_s
    rates = history.rate(before, history.last_before), history.rate(now, history.last)
    text = (
        f"{rates[0]:.4g} samples/s, {before:.3g} s a step"
        if isfinite(before)
        else "not known: too few steps before the first failure"
    )
    if history.gone and isfinite(now):
        share = f"{rates[1] / rates[0]:.0%}, " if isfinite(before) else ""
        then = f"predicted {history.predicted:.0%}" if history.predicted else "and then none"
        text += f"; at the end {rates[1]:.4g} samples/s, {now:.3g} s a step: {share}{then}"
    return text


def charts(history: RunHistory) -> list[Chart]:
    marks = [(failure.step, f"{failure.seat} lost") for failure in history.failures]
    taken = {later: history.commits[later] - history.commits[step] for step, later in pairwise(sorted(history.commits))}
    shares = {
        event["step"]: 100 * event["bubble_share"] for event in history.of("committed") if "bubble_share" in event
    }
    lines = {
        "samples per second": {step: history.rate(spent, step) for step, spent in taken.items()},
        "loss": history.curve,
        "bubbles: share of the live workers' time in which they computed no micro-batch, %": shares,
    }
    steps = sorted(history.commits.keys() | history.curve.keys()) or [0]
    return [Chart(title, points, steps[0], steps[-1], marks) for title, points in lines.items() if points]


def failures(history: RunHistory) -> Table:
    redone = {event["step"]: event.get("redone_share", 0.0) for event in history.of("committed")}
    rows = []
    for failure in history.failures:
        stall = f"{failure.stall_s:.3f} s" if failure.committed_at else "the job ended"
        noticed = f"{failure.resumed_at - failure.seen_at:.3f} s" if failure.resumed_at else ""
        again = f"{redone[failure.step]:.1%}" if failure.step in redone else ""
        rows.append((str(failure.seat), failure.how, str(failure.step), noticed, stall, again))
    return Table(
        ("seat", "how", "in step", "known to regrouped", "to the next commit", "of that step's compute, run again"),
        rows,
    )


def schedule(history: RunHistory, spans: Sequence[Span]) -> Iterator[bytes | str]:
    """As it was traced, around each failure; without traces as it was planned, before and after."""
    if len(history.shape.seats) > DRAWN_SEATS:
        yield f"{len(history.shape.seats)} workers are too many to draw; recycle plan --png draws a plan all the same."
        return
    traced = [failure for failure in history.failures if failure.resumed_at and _around(spans, failure)][
        :DRAWN_FAILURES
    ]
    for failure in traced:
        yield f"As it ran when {failure.seat} was lost; 0 is when that happened."
        yield _png(panels(spans, failure))
    if not traced:
        yield "As planned, with the costs in the settings" + (
            ", before the first failure and after the last one." if history.gone else "."
        )
        yield _png(planned(history))


def planned(history: RunHistory) -> list[gantt.Panel]:
    from recycle_plugin import planner
    from recycle_plugin.planner.assemble import timeline

    views = [history.shape.full()] + [history.view] * bool(history.gone and not history.view.empty_stages())
    made = [planner.plan(view, history.costs, history.policy) for view in views]
    lost = ", ".join(map(str, history.view.lost))
    return [
        gantt.Panel(f"without {lost}" if plan.view.lost else "with everybody there", timeline(plan, history.costs))
        for plan in made
    ]


def events(history: RunHistory) -> Table:
    began = history.of("start")[0]["time"]
    told = [event for event in history.events if event["event"] not in QUIET][:LISTED]
    colours = {number: STYLES.get(event["event"], "").split()[-1:] for number, event in enumerate(told)}
    styles = {
        number: {"red": "bad", "green": "good"}[colour[0]]
        for number, colour in colours.items()
        if colour and colour[0] in ("red", "green")
    }
    return Table(
        ("s", "event", ""),
        [(f"{max(0.0, event['time'] - began):.3f}", event["event"], event["text"]) for event in told],
        styles,
    )


# --- pictures of traces --------------------------------------------------------------------------------


def panels(spans: Sequence[Span], failure: Failure) -> list[gantt.Panel]:
    """Three consecutive windows of the run: two steps before the failure, the interrupted step, two steps after."""
    step, struck, resumed = failure.step, _us(failure.struck_at), _us(failure.resumed_at)
    begins, ends = _extents(spans)
    last = min(step + 2, max(ends))
    cuts = [begins[step - 2], begins[step], ends[step], ends[last]]
    windows = [_window(spans, start, end) for start, end in zip(cuts, cuts[1:])]
    pause = gantt.Pause(
        f"{1000 * (failure.resumed_at - failure.struck_at):.0f} ms to notice and regroup", struck, resumed
    )
    dead = {failure.seat: struck}
    return [
        gantt.Panel(f"steps {step - 2} and {step - 1}", windows[0], origin_us=struck),
        gantt.Panel(f"step {step}, interrupted", windows[1], dead, None, struck, run_again(windows[1]), (pause,)),
        gantt.Panel(f"steps {step + 1} and {last}", windows[2], dead, None, struck),
    ]


def _around(spans: Sequence[Span], failure: Failure) -> bool:
    """Whether there are traces of the steps that a picture of ``failure`` shows."""
    begins, _ = _extents(spans)
    return {failure.step - 2, failure.step - 1, failure.step, failure.step + 1} <= begins.keys()


def _extents(spans: Sequence[Span]) -> tuple[dict[int, int], dict[int, int]]:
    """When each step begins and ends."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for span in spans:
        number = span.instruction.step
        begins[number] = min(begins.get(number, span.start_us), span.start_us)
        ends[number] = max(ends.get(number, 0), span.end_us)
    return begins, ends


def _window(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """What was run between two times; spans over the edge are cut there."""
    inside = (span for span in spans if span.end_us > start and span.start_us < end)
    return [span._replace(start_us=max(start, span.start_us), end_us=min(end, span.end_us)) for span in inside]


def _png(drawn: Sequence[gantt.Panel]) -> bytes:
    picture = io.BytesIO()
    gantt.draw(picture, *drawn)
    return picture.getvalue()


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def main(folder: Path) -> int:
    """Of the process that a job leaves behind: what goes wrong is in the job's log, since nobody reads what is printed
    here.
    """
    signal.alarm(LONGEST_S)
    try:
        write(folder)
        return 0
    except Exception as error:
        wrong = Event("warning", f"no report: {type(error).__name__}: {error}; recycle report {folder} tries again")
        with (folder / EVENTS).open("a") as log:
            log.write(f"{event_line(wrong, time.time())}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
