"""Run each side (the plugin, releases of torchft) under each strike (an injected fault) in turns. Take medians of the
measurements, and compare them with what was promised.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from recycle_plugin.lab.experiments.against_torchft.sides import LOOPS, Side
from recycle_plugin.lab.experiments.against_torchft.strikes import Job, TrainedShape, given, in_turns, strike
from recycle_plugin.lab.runs import RunFailed, environment
from recycle_plugin.observability.event_log import read_events

FAULT_FREE = "no fault"
OURS, RELEASE, TUNED = "recycle", "torchft 0.2.0", "torchft 0.2.0, 1 s"
SHORT = TrainedShape(2, 1, 0.03, 7)  # small and quick, so that the time around a step's compute shows
PAIRS, WINDOW_S = 8, 1.5  # turns of SHORT and of the same model without fault tolerance, some 40 steps each
REFERENCE, REFERENCE_S = 120, 300.0  # steps with known losses, and the most seconds to compute them
NOT_TUNED = {"stop", "coordinator", FAULT_FREE}  # strikes to which a shorter heartbeat timeout does not matter
Rounds = dict[str, dict[str, list[dict]]]  # {strike: {side: measurements}}


def compare(
    sides: Sequence[Side], strikes: Sequence[str], shape: TrainedShape, rounds: int, seed: int, folder: Path
) -> Iterator[Rounds]:
    """Measure everything ``rounds`` times, in turns, and yield the results after each round. Raises RunFailed."""
    dice, losses = Random(seed), {side.first_step: reference(shape, side.first_step, folder) for side in sides}
    found: Rounds = {
        how: {side.name: [] for side in sides if how not in NOT_TUNED or not side.name.endswith(", 1 s")}
        for how in strikes
    }
    for number in range(rounds):
        for how, of_sides in found.items():
            for side in sides if number % 2 == 0 else reversed(sides):
                if side.name not in of_sides:
                    continue
                place = folder / f"{how} {side.name} {number}".replace(" ", "-")
                if how == FAULT_FREE:
                    one = fault_free(side, place)
                else:
                    one = asdict(strike(side, how, shape, place, dice, losses[side.first_step]))
                of_sides[side.name].append(one)
                print(f"round {number + 1}, {how}, {side.name}: {one}", file=sys.stderr, flush=True)
        yield found


def fault_free(side: Side, folder: Path) -> dict[str, float]:
    """Return seconds and processor seconds of a short step, with and without fault tolerance, trained in turns."""
    plain = [side.python, str(LOOPS / "start.py"), "plain.py"]
    jobs: dict[str, Job] = {"plain": (plain, None), "job": (side.command(SHORT.replicas), side.settings)}
    found = in_turns(jobs, SHORT, folder, PAIRS, WINDOW_S)
    of_plain, own = found["plain"], found["job"]
    return {
        "plain_s": of_plain.step_s,
        "step_s": own.step_s,
        "overhead_s": own.step_s - of_plain.step_s,
        "plain_cpu_s": of_plain.cpu_s,
        "cpu_s": own.cpu_s,
    }


def reference(shape: TrainedShape, first_step: int, folder: Path) -> list[list[float]]:
    """Return the losses without a failure, by step and replica. Raises RunFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"losses{first_step}.json"
    command = [sys.executable, str(LOOPS / "reference.py"), str(REFERENCE), str(first_step), str(path)]
    told = environment(AGAINST_TORCHFT=given(shape, folder), RANK="reference")
    try:
        done = subprocess.run(command, env=told, timeout=REFERENCE_S, stdin=subprocess.DEVNULL, capture_output=True)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"losses without a failure: not within {REFERENCE_S:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise RunFailed(f"{' '.join(command)} has failed\n{done.stderr.decode(errors='replace')}")
    return json.loads(path.read_text())


def deadline_s(folder: Path) -> float | None:
    """Return the seconds until a stopped worker is given up, as one of the plugin's jobs has printed, or None."""
    for path in sorted(folder.glob("stop-recycle*/events.jsonl")):
        for event in read_events(path):
            if event["event"] == "deadlines":
                return next(row["seconds"] for row in event["table"] if row["setting"] == "progress_timeout_s")
    return None


# --- what came out -------------------------------------------------------------------------------------


def medians(rounds: Sequence[Mapping]) -> dict[str, float | str | None]:
    """Return the median of each figure over the rounds that have it, and the counts of each outcome."""
    found: dict[str, float | str | None] = {}
    for name in rounds[0]:
        values = [value for each in rounds if (value := each[name]) is not None]
        if values and isinstance(values[0], str):
            found[name] = ", ".join(f"{value} ({values.count(value)})" for value in sorted({*values}))
        else:
            found[name] = median(values) if values else None
    return found


class Verdict(NamedTuple):
    """A promise, the measurement, and whether it keeps the promise; None if not measured."""

    what: str
    measured: float | None
    limit: float | None

    @property
    def met(self) -> bool | None:
        return None if self.measured is None or self.limit is None else self.measured <= self.limit


def verdicts(found: Rounds, stop_s: float | None) -> list[Verdict]:
    """Return the measurement for each promise against torchft's release. ``stop_s``: a deadline that a job printed."""

    def of(how: str, side: str, figure: str) -> float | None:
        rounds = found.get(how, {}).get(side)
        value = medians(rounds)[figure] if rounds else None
        return value if isinstance(value, float) else None

    def times(factor: float, value: float | None) -> float | None:
        return None if value is None else factor * value

    theirs = of(FAULT_FREE, RELEASE, "overhead_s")
    stall, step_s = of("kill", OURS, "stall_s"), of("stop", OURS, "step_s")
    stopped_s = None if stop_s is None or step_s is None else stop_s + step_s
    return [
        Verdict("SIGKILL: stall, s, at most 1/10 of torchft's", stall, times(0.1, of("kill", RELEASE, "stall_s"))),
        Verdict("SIGKILL: stall, s, below torchft's with a timeout of 1 s", stall, of("kill", TUNED, "stall_s")),
        Verdict("SIGSTOP: stall, s, at most the printed deadline and a step", of("stop", OURS, "stall_s"), stopped_s),
        Verdict(
            "fault-free overhead, s, at most a third of torchft's",
            of(FAULT_FREE, OURS, "overhead_s"),
            times(1 / 3, theirs) if theirs is None or theirs > 0 else None,  # the machine was too busy to tell
        ),
        Verdict(
            "a healthy peer's step while another joins, at most 1.1 times its usual step",
            of("kill", OURS, "joining"),
            1.1,
        ),
        Verdict("losses as without a failure", of("kill", OURS, "apart"), 5e-6),
    ]


def table(shape: TrainedShape, found: Rounds, stop_s: float | None) -> str:
    """Return all sides' medians, with the least and the most, in Markdown, and the verdicts."""
    rounds = max(len(each) for of_sides in found.values() for each in of_sides.values())
    lines = [
        f"measured: {shape.replicas} replicas of one stage, {shape.micro_batches} micro-batches each, "
        f"{shape.step_s:g} s of a step slept (emulated compute), {shape.megabytes} MB of weights and moments, Gloo; "
        f"without a fault {SHORT.replicas} replicas, {SHORT.step_s:g} s, {SHORT.megabytes} MB; medians of {rounds} "
        "rounds, in brackets the least and the most"
    ]
    for how, of_sides in found.items():
        there = {name: each for name, each in of_sides.items() if each}
        lines += [f"\n| {how} | {' | '.join(there)} |", "|---" * (1 + len(there)) + "|"]
        for figure in next(iter(there.values()))[0]:
            cells = [cell([each[figure] for each in rounds], figure) for rounds in there.values()]
            if any(cells):
                lines.append(f"| {figure} | {' | '.join(cells)} |")
    lines.append("")
    for verdict in verdicts(found, stop_s):
        met = {True: "met", False: "NOT MET", None: "not measured"}[verdict.met]
        if verdict.met is not None:
            met = f"{verdict.measured:.3g}, limit {verdict.limit:.3g}: {met}"
        lines.append(f"{verdict.what}: {met}")
    return "\n".join(lines)


def cell(values: Sequence[float | str | None], figure: str) -> str:
    """Return a cell with a figure of all rounds."""
    there: list = [value for value in values if value is not None]
    if not there:
        return ""
    middle = medians([{figure: value} for value in there])[figure]
    return middle if isinstance(middle, str) else f"{middle:.3g} [{min(there):.3g}, {max(there):.3g}]"
