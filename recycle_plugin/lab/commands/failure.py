"""``recycle simulate --fault``: play a few steps with kills instruction by instruction, and print their costs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from recycle_plugin.commands.given import JobArguments
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.instruction import COMPUTE, STAGE_WIDE
from recycle_plugin.core.vocabulary.span import Span, run_again

DRAWN_COLUMNS = 120


def run(found: argparse.Namespace, given: JobArguments, machine: Any) -> int:
    """Play the steps, write and print what is asked for, and return the exit code. Raises ValueError."""
    from recycle_plugin import planner
    from recycle_plugin.lab.simulator.simulated_job import SimulatedJob

    if found.log is not None:
        raise ValueError("--log goes with --trace and --mtbf: --fault plays no replays")
    faults = tuple(map(Fault.parse, found.fault))
    if found.steps < 1:
        raise ValueError(f"--steps {found.steps}: at least 1")
    job = SimulatedJob(given.view, given.costs, given.policy, machine)
    try:
        ran = job.run(found.steps, faults)
        restarted = replace(job, keep=False).run(found.steps, faults) if found.restart else None
    except planner.PlanError as error:
        raise ValueError(str(error)) from None
    struck = {seat for loss in ran.losses for seat in loss.seats}
    for fault in faults:
        if fault.seat not in struck:
            raise ValueError(
                f"--fault '{fault}' never strikes before the end of steps 0 to {found.steps - 1} of this plan"
            )
    spans = [span for span in ran.spans if span.instruction.op in COMPUTE | STAGE_WIDE]
    if found.png is not None:
        draw_png(found, spans, ran)
    if found.json:
        print(
            json.dumps({"unit": "us", **record(ran), **({"restart": record(restarted)} if restarted else {})}, indent=1)
        )
    else:
        print("\n".join([report(spans, ran), *([comparison(ran, restarted)] if restarted else [])]))
    return 0


def record(ran: Any) -> dict:
    """Return a simulated run's commits and losses as data, times in microseconds."""
    losses = [
        asdict(loss) | {"seats": list(map(str, loss.seats)), "redone_share": redone_share(ran, loss)}
        for loss in ran.losses
    ]
    return {"commits": dict(sorted(ran.commits.items())), "losses": losses}


def redone_share(ran: Any, loss: Any) -> float:
    """Return the share of the interrupted step's compute time that is run again after ``loss``."""
    once = {
        span.instruction: span.end_us - span.start_us
        for span in ran.spans
        if span.instruction.op in COMPUTE and span.instruction.step == loss.committed + 1
    }
    return loss.redone_us / sum(once.values())


def comparison(ran: Any, restarted: Any) -> str:
    """Return a line that compares a recovery plan with a restart of the step."""
    shares = [f"{sum(redone_share(each, loss) for loss in each.losses):.1%}" for each in (ran, restarted)]
    ends = [f"{max(each.commits.values()) / 1000:g}" for each in (ran, restarted)]
    return (
        f"run again, of a step's compute: {shares[0]}; {shares[1]} where an interrupted step starts anew (step "
        f"restart); the last commit at {ends[0]} ms and {ends[1]} ms"
    )


def report(spans: list[Span], ran: Any) -> str:
    """Return the drawn grid, for at most 64 seats, and lines on the commits and on each loss."""
    from recycle_plugin.render import grid

    tick = max(1, max(span.end_us for span in spans) // DRAWN_COLUMNS)
    lines = [grid.draw(spans, tick)] if len({span.seat for span in spans}) <= 64 else []
    lines.append(
        f"a column is {tick / 1000:g} ms; committed, in ms: "
        + ", ".join(f"step {step} {at / 1000:g}" for step, at in sorted(ran.commits.items()))
    )
    for loss in ran.losses:
        lines.append(
            f"lost {', '.join(map(str, loss.seats))} at {loss.died_us / 1000:g} ms, known at "
            f"{loss.detected_us / 1000:g}, went on at "
            f"{loss.resumed_us / 1000:g} behind step {loss.committed}; {loss.redone_us / 1000:g} ms run again "
            f"({redone_share(ran, loss):.1%} of the step's compute), {loss.undone} workers took a step back"
        )
    return "\n".join(lines)


def draw_png(found: argparse.Namespace, spans: list[Span], ran: Any) -> None:
    """Draw the steps as a picture, to the file that the arguments name."""
    from recycle_plugin.render import gantt

    origin = ran.losses[0].died_us if ran.losses else None
    deaths = {seat: loss.died_us for loss in ran.losses for seat in loss.seats}
    pauses = tuple(
        gantt.Pause(
            f"{(loss.resumed_us - loss.died_us) / 1000:g} ms to notice and regroup", loss.died_us, loss.resumed_us
        )
        for loss in ran.losses
    )
    gantt.draw(
        found.png,
        gantt.Panel(f"simulated: {'; '.join(found.fault)}", spans, deaths, None, origin, run_again(spans), pauses),
    )
