"""``report.html`` of a run: what happened, its cost, throughput and loss, the schedule before and after, events."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path

from recycle_plugin import folders
from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.span import Span, run_again
from recycle_plugin.observability.console import QUIET, STYLES, event_line
from recycle_plugin.observability.event_fields import number
from recycle_plugin.observability.event_log import EVENTS
from recycle_plugin.observability.measured_costs import COSTS, as_written, measured_bytes, measured_costs
from recycle_plugin.observability.run_history import WARM_UP, Failure, RunHistory
from recycle_plugin.observability.run_summary import UNKNOWN, end, facts, seconds, sentence, some, these
from recycle_plugin.observability.screen import printed, screen
from recycle_plugin.observability.trace import read_traces
from recycle_plugin.render import gantt
from recycle_plugin.render.page import Chart, Content, Screen, Table, page

NAME = "report.html"
LONGEST_S = 600  # most time for a process that nothing waits for
DRAWN_SEATS = 64  # a larger picture would be unreadable
DRAWN_FAILURES = 3
SCREEN = os.terminal_size((140, 60))  # columns and lines of the table of seats
LISTED = 2000  # most events in the report: half of them the first, half the last


def write(folder: Path, again_s: int | None = None) -> Path:
    """Write the report of the last job in the run folder ``folder``, and return the report's path. ``again_s``:
    browsers reload it at this interval, in seconds. Raises ValueError, in one line, if there is no job.
    """
    history = RunHistory.read(folder)
    began = _us(history.began)
    # an earlier job's traces stay in the folder
    spans = [span for span in read_traces(folder / "trace") if span.start_us >= began]
    path = folder / NAME
    text = page(f"Run {folder.resolve().name}", sentence(history), sections(history, spans), again_s)
    folders.put(path, text, f".{os.getpid()}")
    if (costs := costs_of(history, spans)) is not None:
        folders.put(folder / COSTS, costs, f".{os.getpid()}")
    return path


def costs_of(history: RunHistory, spans: Sequence[Span]) -> str | None:
    """Return JSON for the setting ``costs`` and ``recycle doctor``: costs of instructions and bytes of stages. The
    costs are measured after the first steps and before the first failure. Returns None if these were not traced.
    """
    steps = range(min(history.commits, default=0) + WARM_UP, history.last_before + 1)
    costs = measured_costs(spans, history.shape.stages, steps)
    if costs is None:
        return None
    found = as_written(costs) | measured_bytes(history.of("memory"), history.shape.stages)
    return json.dumps(found, indent=1) + "\n"


def sections(history: RunHistory, spans: Sequence[Span]) -> Iterator[tuple[str, list[Content]]]:
    if end(history) is None:
        lines = screen(history, time.time(), SCREEN)
        yield "Now", [Screen("\n".join(printed(line, SCREEN.columns) for line in lines))]
    yield "Job", [Table((), [*summary(history)])]
    yield "Steps", [*charts(history)]
    if history.failures:
        yield "Failures", [failures(history)]
    yield "Schedule", [*schedule(history, spans)]
    yield "Events", [events(history)]


def summary(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact about the whole run, beginning with why it ended."""
    commits = history.commits
    yield "end", end(history) or "none yet, as far as the log tells"
    yield (
        "steps",
        f"{min(commits)} to {max(commits)}, in {seconds(max(commits.values()) - history.began)}"
        if commits
        else "none committed",
    )
    yield (
        "workers",
        "{} of {} left".format(*history.workers)
        + "".join(f"; {told}" for told in some([f"{name}: {text}" for name, text in (*gone(history), *back(history))])),
    )
    yield "throughput", throughput(history)
    yield from facts(history)


def gone(history: RunHistory) -> list[tuple[str, str]]:
    """Return (worker, why) for each worker that is gone, named as in the events."""
    return [(named(absence.rank, seat), absence.why) for seat, absence in history.gone.items()]


def back(history: RunHistory) -> list[tuple[str, str]]:
    """Return (worker, how long it was away) for each worker that has come back, named as in the events."""
    return [
        (
            named(absence.rank, str(absence.seat)),
            ", ".join(filter(None, (f"back after {seconds(absence.lasted_s)}", absence.replayed))),
        )
        for absence in history.returns
    ]


def throughput(history: RunHistory) -> str:
    """Return the throughput before the first failure and now, beside the planner's prediction."""
    before, now = history.before_s, history.now_s
    rates = history.rate(before, history.last_before), history.rate(now, history.last)
    text = (
        f"{rates[0]:.4g} samples/s, {before:.3g} s a step"
        if isfinite(before)
        else "not known: too few steps before the first failure"
    )
    if history.absences and isfinite(now):
        share = f"{rates[1] / rates[0]:.0%}, " if isfinite(before) else ""
        predicted = f"predicted {history.predicted:.0%}" if history.predicted else "and then none"
        text += f"; at the end {rates[1]:.4g} samples/s, {now:.3g} s a step: {share}{predicted}"
    return text


def charts(history: RunHistory) -> Iterator[Chart]:
    """Yield charts of throughput, loss and waiting over the committed steps, with losses and returns marked."""
    rates = {step: history.rate(spent, step) for step, spent in history.took.items()}
    shares = {step: 100 * share for step, share in history.shares("bubble_share").items()}
    lost = sorted({failure.step for failure in history.failures})
    back = sorted({absence.back_step for absence in history.returns})
    for title, points, unit, from_zero in (
        ("Throughput", rates, "samples/s", True),
        ("Loss", history.curve, "mean loss", False),
        ("Waiting", shares, "% of live workers' time", True),
    ):
        if points:
            yield Chart(title, points, unit, lost, back, from_zero)


def failures(history: RunHistory) -> Table:
    """Return a row for each lost seat: why, and the times until notice, regrouping and the next commit."""
    redone = {event["time"]: event.get("redone_share", 0.0) for event in history.of("committed")}
    rows = []
    for failure in history.failures:
        notice = f"{failure.seen_at - failure.struck_at:.3f} s" if failure.fault else "not timed"
        regrouped = f"{failure.resumed_at - failure.seen_at:.3f} s" if failure.resumed_at else "never"
        stall = f"{failure.stall_s:.3f} s" if failure.committed_at else UNKNOWN if history.went_on else "the job ended"
        share = redone.get(failure.committed_at)
        again = f"{share:.1%}" if number(share) else UNKNOWN if history.went_on else "never committed"
        absence = failure.absence
        back = f"{absence.lasted_s:.3g} s, step {absence.back_step}" if absence.is_over else "no"
        back += absence.replayed and f", {absence.replayed}"
        rows.append((str(failure.seat), absence.why, str(failure.step), notice, regrouped, stall, again, back))
    head = (
        "seat",
        "why",
        "in step",
        "fault to known",
        "known to regrouped",
        "to the next commit",
        "of that step's compute, taken over or run again",
        "back after",
    )
    return Table(head, rows)


# --- the schedule --------------------------------------------------------------------------------------


def schedule(history: RunHistory, spans: Sequence[Span]) -> Iterator[bytes | str]:
    """Yield pictures of the traces around the failures, or of the last steps, or a text if there are none."""
    if len(history.shape.seats) > DRAWN_SEATS:
        yield f"{len(history.shape.seats)} workers are too many to draw; recycle plan --png draws a plan all the same."
        return
    traced, together = _extents(spans)[0].keys(), dict[int, list[Failure]]()
    for failure in history.failures:
        if failure.resumed_at and traced >= {failure.step - 2, failure.step - 1, failure.step, failure.step + 1}:
            together.setdefault(failure.step, []).append(failure)
    for lost in [*together.values()][:DRAWN_FAILURES]:
        seats = these(failure.seat for failure in lost)
        yield f"As it ran, measured, when {seats} {'were' if len(lost) > 1 else 'was'} lost; 0 is when that happened."
        yield _png(panels(spans, *lost))
    if together:
        return
    if not history.failures and (window := last_steps(spans)):
        yield "As it ran, measured: the last two steps that were traced."
        yield _png([window])
        return
    yield "No trace of these steps: recycle.trace: true draws what ran, and recycle plan --png draws a plan."


def events(history: RunHistory) -> Table:
    """Return the console's events except steps, with seconds since the start; bad news is red, good news green. If
    there are too many, the middle ones are replaced by their number.
    """
    began = history.began
    told = _listed([event for event in history.events if event["event"] not in QUIET])
    colours = {number: STYLES.get(event["event"], "").split()[-1:] for number, event in enumerate(told)}
    styles = {
        number: {"red": "bad", "green": "good"}[colour[0]]
        for number, colour in colours.items()
        if colour and colour[0] in ("red", "green")
    }
    return Table(
        ("s", "event", "text"),
        [(f"{max(0.0, event['time'] - began):.3f}", event["event"], event.get("text", "")) for event in told],
        styles,
    )


def _listed(told: list[dict]) -> list[dict]:
    left_out = len(told) - LISTED
    if left_out <= 0:
        return told
    first, last = told[: LISTED // 2], told[-LISTED // 2 :]
    return [*first, {"time": last[0]["time"], "event": "…", "text": f"{left_out} events are left out here"}, *last]


# --- pictures of traces --------------------------------------------------------------------------------


def panels(spans: Sequence[Span], first: Failure, *others: Failure) -> list[gantt.Panel]:
    """Return three consecutive windows of the run: two steps before the failure, the interrupted step, two steps after.
    ``others``: further failures in the step that ``first`` interrupted. The time axis is 0 when the first one struck.
    """
    lost, step = (first, *others), first.step
    struck = _us(min(failure.struck_at for failure in lost))
    begins, ends = _extents(spans)
    last = min(step + 2, max(ends))
    cuts = [begins[step - 2], begins[step], ends[step], ends[last]]
    windows = [_window(spans, start, end) for start, end in zip(cuts, cuts[1:])]
    dead = {failure.seat: _us(failure.struck_at) for failure in lost}
    return [
        gantt.Panel(f"steps {step - 2} and {step - 1}", windows[0], origin_us=struck),
        gantt.Panel(f"step {step}, interrupted", windows[1], dead, None, struck, run_again(windows[1]), pauses(lost)),
        gantt.Panel(f"steps {step + 1} and {last}", windows[2], dead, None, struck),
    ]


def pauses(lost: Sequence[Failure]) -> tuple[gantt.Pause, ...]:
    """Return the pauses from failures until the survivors went on; failures with the same regroup share one."""
    struck: dict[float, float] = {}
    for failure in lost:
        if failure.resumed_at is not None:
            struck[failure.resumed_at] = min(struck.get(failure.resumed_at, failure.struck_at), failure.struck_at)
    times = " and ".join(f"{1000 * (resumed - at):.0f} ms" for resumed, at in sorted(struck.items()))
    texts = [f"{times} to notice and regroup", *[""] * (len(struck) - 1)]
    return tuple(gantt.Pause(text, _us(at), _us(resumed)) for text, (resumed, at) in zip(texts, sorted(struck.items())))


def last_steps(spans: Sequence[Span]) -> gantt.Panel | None:
    """Return the last two consecutive steps that were traced, or None."""
    begins, ends = _extents(spans)
    steps = [(one, two) for one, two in pairwise(sorted(begins)) if one > 0 and two == one + 1]
    if not steps:
        return None
    one, two = steps[-1]
    return gantt.Panel(f"steps {one} and {two}", _window(spans, begins[one], ends[two]))


def _extents(spans: Sequence[Span]) -> tuple[dict[int, int], dict[int, int]]:
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for span in spans:
        number = span.instruction.step
        begins[number] = min(begins.get(number, span.start_us), span.start_us)
        ends[number] = max(ends.get(number, 0), span.end_us)
    return begins, ends


def _window(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    inside = (span for span in spans if span.end_us > start and span.start_us < end)
    return [span._replace(start_us=max(start, span.start_us), end_us=min(end, span.end_us)) for span in inside]


def _png(drawn: Sequence[gantt.Panel]) -> bytes:
    picture = io.BytesIO()
    gantt.draw(picture, *drawn)
    return picture.getvalue()


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def main(folder: Path) -> int:
    """Write the report of the run in ``folder``, in the process that a job leaves behind, and return its exit code. An
    error goes to the job's log, since nobody reads this process's output.
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
