"""``recycle simulate --fault``: a few steps with kills, instruction by instruction: drawn, traced, and what they cost."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from recycle_plugin.commands.given import Given
from recycle_plugin.core.executor import Span, run_again
from recycle_plugin.core.faults import Fault
from recycle_plugin.core.instruction import COMPUTE, Op

DRAWN_COLUMNS = 120


def run(found: argparse.Namespace, given: Given, machine: Any) -> int:
    from recycle_plugin import planner
    from recycle_plugin.simulator.job import Job

    faults = tuple(map(Fault.parse, found.fault))
    if found.steps < 1:
        raise ValueError(f"--steps {found.steps}: at least 1")
    try:
        ran = Job(given.view, given.costs, given.policy, machine, given.network).run(found.steps, faults)
    except planner.PlanError as error:
        raise ValueError(str(error)) from None
    struck = {seat for loss in ran.losses for seat in loss.seats}
    for fault in faults:
        if fault.seat not in struck:
            raise ValueError(f"--fault '{fault}' never strikes before the end of steps 0 to {found.steps - 1} of this plan")
    spans = [span for span in ran.spans if span.instruction.op in COMPUTE or span.instruction.op in (Op.REDUCE, Op.VALIDATE, Op.STEP)]
    if found.perfetto is not None:
        from recycle_plugin.render import perfetto

        perfetto.write(found.perfetto, ran.spans, given.view.topology.stages, moments(ran))
    if found.png is not None:
        draw_png(found, spans, ran)
    if found.json:
        losses = [asdict(loss) | {"seats": list(map(str, loss.seats))} for loss in ran.losses]
        print(json.dumps({"unit": "us", "commits": dict(sorted(ran.commits.items())), "losses": losses}, indent=1))
    else:
        print(report(spans, ran))
    return 0


def report(spans: list[Span], ran: Any) -> str:
    from recycle_plugin.render import grid

    tick = max(1, max(span.end_us for span in spans) // DRAWN_COLUMNS)
    lines = [grid.draw(spans, tick)] if len({span.seat for span in spans}) <= 64 else []
    lines.append(f"a column is {tick / 1000:g} ms; committed, in ms: " + ", ".join(f"step {step} {at / 1000:g}" for step, at in sorted(ran.commits.items())))
    for loss in ran.losses:
        lines.append(
            f"lost {', '.join(map(str, loss.seats))} at {loss.died_us / 1000:g} ms, known at {loss.detected_us / 1000:g}, went on at "
            f"{loss.resumed_us / 1000:g} behind step {loss.committed}; {loss.redone_us / 1000:g} ms run again, {loss.undone} workers took a step back"
        )
    return "\n".join(lines)


def moments(ran: Any) -> dict[str, int]:
    """What happened to the job, and when, for the trace."""
    found = {f"step {step} committed": at for step, at in ran.commits.items()}
    for loss in ran.losses:
        names = ", ".join(map(str, loss.seats))
        found |= {f"{names} died": loss.died_us, f"loss of {names} known": loss.detected_us, f"going on without {names}": loss.resumed_us}
    return found


def draw_png(found: argparse.Namespace, spans: list[Span], ran: Any) -> None:
    from recycle_plugin.render import gantt

    origin = ran.losses[0].died_us if ran.losses else None
    deaths = {seat: loss.died_us for loss in ran.losses for seat in loss.seats}
    pauses = tuple(gantt.Pause(f"{(loss.resumed_us - loss.died_us) / 1000:g} ms to notice and regroup", loss.died_us, loss.resumed_us) for loss in ran.losses)
    gantt.draw(found.png, gantt.Panel(f"simulated: {'; '.join(found.fault)}", spans, deaths, None, origin, run_again(spans), pauses))
