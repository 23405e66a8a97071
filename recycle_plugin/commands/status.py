"""``recycle status``: the state of a running job, read from its event log in another terminal."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite, nan
from pathlib import Path
from statistics import median_high

from recycle_plugin.commands.parsers import add_job, command, folder_of
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.observability.comings import comings
from recycle_plugin.observability.event_log import EVENTS, last_event
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import MOST, end, exit_code, facts, sentence, some
from recycle_plugin.observability.training_time import goodput

DESCRIPTION = """\
Say where a job is: first in one sentence, then why it has ended, steps, live workers, who is lost and why, who is
coming back and how far each has come, how many copies of its state each stage has, throughput now and before, what the
planner predicts, goodput, model, batch, precision, hosts, times, checkpoints.  Reads events.jsonl of the run folder
(recycle.run_dir; the line "start" names it) and asks no process; on the coordinator's host it sees whether that process
runs.  It takes the coordinator's address too, if the run folder can be read here.

recycle status runs/train
recycle status node1:29500

Exit code: 0 while the job runs or if it came to its planned end, 1 if it has ended otherwise; 2 for bad input.
"""


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "status", "where a running job is: steps, live workers, throughput", DESCRIPTION, run)
    add_job(made)
    made.add_argument("--json", action="store_true", help="the same as data")


def run(found: argparse.Namespace) -> int:
    """Print the state of the job ``found.job``, as text or JSON; return 1 if it ended before its planned end."""
    folder = folder_of(found.job)
    if early := ended_early(folder):
        print(json.dumps({"state": "end", "end": early}, indent=1) if found.json else f"{'state':<11}{early}")
        return 1
    history = RunHistory.read(folder, whole=False)
    known = status(history, time.time())
    if found.json:
        print(json.dumps(known, indent=1))
    else:
        print("\n".join([known["sentence"], *(f"{name:<11}{text}" for name, text in lines(known))]))
    return exit_code(history)


def ended_early(folder: Path) -> str:
    """Return why the last job in this folder ended before training began, "" if training began."""
    last = last_event(folder / EVENTS)
    return last["text"] if "killed" in last else ""


def status(history: RunHistory, now: float) -> dict:
    """Return the state of the job of ``history`` as data: seconds and samples a second, None if not known yet. ``now``:
    seconds since the epoch. ``sentence`` and ``facts`` are text, as in the report.
    """
    commits = history.commits
    lost_at = {event["seat"]: event["time"] for event in [*history.of("leaving"), *history.of("lost")]}
    step = max(commits, default=None)
    before, current = history.before_s, history.now_s
    return {
        "sentence": sentence(history),
        "state": history.end["event"] if history.end else "killed" if history.was_killed else "running",
        "end": end(history),
        "coordinator": history.coordinator,
        "silent_s": round(now - history.events[-1]["time"], 1),
        "step": step,
        "loss": _number(history.curve.get(history.last, nan), 12),
        "workers": dict(zip(("live", "of"), history.workers)),
        "live": [str(seat) for seat in sorted(history.view.live)],
        "joining": [] if end(history) is not None else _joining(history, now),
        "copies": {str(stage): len(history.view.live_replicas(stage)) for stage in range(history.shape.stages)},
        "gone": [
            {"seat": seat, "rank": one.rank, "why": one.why, "before_s": round(now - lost_at[seat], 1)}
            for seat, one in history.gone.items()
        ],
        "step_s": {
            "now": _number(current),
            "before": _number(before),
            "predicted": _number(before / history.predicted) if history.predicted else None,
        },
        "samples_per_s": {
            "now": _number(history.rate(current, history.last)),
            "before": _number(history.rate(before, history.last_before)),
        },
        "predicted_throughput": history.predicted,
        "ettr": _number(goodput(history, now)),
        "unmanned_stages": list(history.unmanned),
        "checkpoint": history.checkpoint,
        "facts": dict(facts(history)),
        "metrics": next((event["url"] for event in reversed(history.of("metrics"))), None),
    }


def lines(known: dict) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line after the sentence; ``known``: the result of :func:`status`."""
    workers, speed, rate = known["workers"], known["step_s"], known["samples_per_s"]
    yield "state", known["end"] or f"running; last event {known['silent_s']:.1f} s ago"
    yield (
        "step",
        "none committed yet" if known["step"] is None else f"{known['step']}" + _if(known["loss"], ", loss {:.6f}"),
    )
    yield "workers", f"{workers['live']} of {workers['of']}"
    if 0 < len(known["live"]) <= MOST:
        yield "live", ", ".join(known["live"])
    yield "copies", f"of each stage's state: {_copies(known['copies'])}"
    gone = [f"{named(one['rank'], one['seat'])}, {one['before_s']:.0f} s ago: {one['why']}" for one in known["gone"]]
    yield from (("gone", text) for text in some(gone))
    joining = [f"{named(one['rank'], one['seat'])}: {one['told']}" for one in known["joining"]]
    yield from (("joining", text) for text in some(joining))
    if speed["now"] is not None:
        yield "now", f"{rate['now']:.4g} samples/s, {speed['now']:.3f} s a step"
    if speed["before"] is not None and known["gone"]:
        yield "before", f"{rate['before']:.4g} samples/s, {speed['before']:.3f} s a step"
    yield (
        "predicted",
        _predicted(known["predicted_throughput"], known["unmanned_stages"])
        + _if(speed["predicted"], ", {:.3f} s a step"),
    )
    if known["ettr"] is not None:
        yield "goodput", f"{known['ettr']:.1%} of the time since the start, spent on steps that count"
    yield from known["facts"].items()
    if known["metrics"] and known["state"] == "running":
        yield "metrics", known["metrics"]
    if known["coordinator"] and known["state"] == "running":
        yield "to stop it", "kill {stop} on host {host} (ends the job at a commit)".format(**known["coordinator"])


def _copies(of: dict[str, int]) -> str:
    """Return the number of each stage's copies; of many stages the usual number, and the stages that have another."""
    usual = median_high(of.values())
    odd = [f"{count} of stage {stage}" for stage, count in of.items() if count != usual]
    if len(of) <= MOST or len(odd) > MOST:
        return ", ".join(map(str, of.values()))
    return ", ".join([*odd, f"{usual} of all {'others' if odd else len(of)}"])


def _joining(history: RunHistory, now: float) -> list[dict]:
    return [
        {"seat": history.seat_of[one.rank], "for_s": round(now - one.since, 1), "told": one.told(now), **asdict(one)}
        for one in comings(history.events)
        if one.rank in history.seat_of
    ]


def _predicted(throughput: float | None, unmanned: list[int]) -> str:
    if unmanned:
        return f"nothing: no worker is left in stage{'s' * (len(unmanned) > 1)} {', '.join(map(str, unmanned))}"
    return "not known yet" if throughput is None else f"{throughput:.0%} of the throughput with all workers"


def _number(value: float, digits: int = 4) -> float | None:
    return round(value, digits) if isfinite(value) else None


def _if(value: object, text: str) -> str:
    return "" if value is None else text.format(value)
