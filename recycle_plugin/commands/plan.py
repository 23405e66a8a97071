"""``recycle plan``: draw and measure one plan."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from recycle_plugin.commands.given import SHAPE, JobArguments, add_job, job
from recycle_plugin.commands.megatron_flags import shape
from recycle_plugin.commands.parsers import command
from recycle_plugin.commands.progress import told
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Op
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.program import OP_SHIFT, OPS

DESCRIPTION = """\
Plan one step for the live workers of a job, draw it, and say how far it lies above its lower bound.

recycle plan --pp 4 --dp 3 --micro-batches 6 --lost 1.2 --cap 2.0 --costs F=1,I=1,W=1,comm=0,step=3
recycle plan --dp 3 --megatron --pipeline-model-parallel-size 4 --micro-batch-size 2 --no-gradient-accumulation-fusion
"""
DRAWN_SEATS, DRAWN_COLUMNS = 64, 160  # larger grids are not printed
COARSE = 60  # columns of a grid if costs are no ticks


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "plan", "plan one step for a shape and its lost workers", DESCRIPTION, run)
    add_job(made, required=False)
    made.add_argument(
        "--megatron",
        nargs=argparse.REMAINDER,
        metavar="FLAGS",
        help="in the place of --pp, --micro-batches and --tied, and behind all else: Megatron-LM's own flags, with "
        "--workers N of the launcher, or --dp D before",
    )
    made.add_argument(
        "--json",
        action="store_true",
        help="print figures as JSON instead of the grid; plan_ms: from membership to verified and hashed plan, in a "
        "warm process",
    )
    made.add_argument("--png", metavar="FILE", type=Path, help="write the schedule as a picture (.png, .svg, .pdf)")


def run(found: argparse.Namespace) -> int:
    """Plan, write the picture if asked, print the rest, and return the exit code. Raises ValueError for bad input."""
    if found.megatron is not None:
        if twice := [name for name in ("pp", "micro_batches", "tied") if getattr(found, name)]:
            raise ValueError(f"--{twice[0].replace('_', '-')} follows from Megatron-LM's flags: leave it out")
        found.pp, found.dp, found.micro_batches, found.tied = shape(found.megatron, found.dp)
    elif missing := [name for name, *_ in SHAPE if getattr(found, name[2:].replace("-", "_")) is None]:
        raise ValueError(f"{', '.join(missing)} missing: write --pp P --dp D --micro-batches M, or --megatron FLAGS")
    given = job(found)
    asked = given.view.topology
    what = f"{asked.stages} stages, {asked.replicas} replicas, {asked.micro_batches} micro-batches of each are planned"
    with told(lambda: what):
        planned, plan_ms = timed(given)
        figures = summary(given, planned, plan_ms)
        if found.png is not None:
            draw_png(given, planned, found.png)
    print(json.dumps(figures, indent=1) if found.json else report(given, planned, figures))
    return 0


def timed(given: JobArguments) -> tuple[Plan, float]:
    """Return the plan, and the milliseconds from membership to verified and hashed plan in a warm process."""
    from recycle_plugin import planner

    planner.warm()
    start = time.perf_counter()
    planned = given.plan()
    _ = planned.digest
    return planned, 1000 * (time.perf_counter() - start)


def summary(given: JobArguments, planned: Plan, plan_ms: float) -> dict:
    """Return the plan's figures as data, times in ``unit``.

    ``span``: with a staggered optimizer the longest window of a stage, first forward to last weight gradient; else the
    whole plan's. ``gap``: how far the period is above the bound, as a fraction of the bound.
    """
    span = planned.span_us if planned.policy.together else max(windows(planned, given.costs))
    return {
        "unit": given.unit,
        "costs": given.origin,
        "period": given.shown(planned.period_us),
        "span": given.shown(span),
        "lower_bound": given.shown(planned.bound_us),
        "gap": round(planned.gap, 6),
        "plan_ms": round(plan_ms, 3),
        "peak_micro_batches": peaks(planned),
        "cap": planned.policy.activation_cap,
        "lost": [str(seat) for seat in given.view.lost],
        "digest": planned.digest,
    }


def cap_text(policy: Policy) -> str:
    return policy.activation_cap if isinstance(policy.activation_cap, str) else f"{policy.activation_cap} micro-batches"


def windows(planned: Plan, costs: CostModel) -> list[int]:
    """Return for each stage the microseconds from the start of its first computation to the end of its last one."""
    import numpy as np

    first, last = [1 << 62] * planned.stages, [0] * planned.stages
    compute = np.array([op in COMPUTE for op in OPS])
    for seat, program in planned.programs.items():
        places = np.flatnonzero(compute[np.frombuffer(program.codes, np.int64) >> OP_SHIFT])
        if len(places):  # they are in the order of their starts
            starts, stage, end = planned.starts[seat], seat.stage, program[places[-1]].op
            first[stage] = min(first[stage], starts[places[0]])
            last[stage] = max(last[stage], starts[places[-1]] + costs.of(end, stage, seat))
    return [end - start for start, end in zip(first, last)]


def peaks(planned: Plan) -> list[int]:
    """Return for each stage the most micro-batches of which one worker holds activation or pending weight gradient."""
    import numpy as np

    change = np.array([{Op.F: 1, Op.W: -1, Op.B: -1}.get(op, 0) for op in OPS])
    most = [0] * planned.stages
    for seat, program in planned.programs.items():
        held = np.cumsum(change[np.frombuffer(program.codes, np.int64) >> OP_SHIFT])
        most[seat.stage] = max(most[seat.stage], int(held.max(initial=0)))
    return most


def report(given: JobArguments, planned: Plan, figures: dict) -> str:
    """Return the text to print: the grid, unless it is too large, and the plan's figures."""
    from recycle_plugin.planner.assemble import timeline
    from recycle_plugin.render import grid

    lines = [
        f"period {figures['period']} {figures['unit']}, span {figures['span']}, lower bound {figures['lower_bound']}: "
        f"{planned.gap:.1%} above it; planned in {figures['plan_ms']:.1f} ms",
        f"micro-batches held at most, by stage: {' '.join(map(str, figures['peak_micro_batches']))} (cap: "
        f"{cap_text(planned.policy)}); "
        f"digest {figures['digest']}",
    ]
    if given.unit != "ticks":
        lines.insert(0, f"costs: {given.origin}")
    tick = given.scale if given.unit == "ticks" else max(1, planned.span_us // COARSE)
    spans = timeline(planned, given.costs) if len(planned.programs) <= DRAWN_SEATS else []
    # the last optimizer step may end long after the plan's span
    if spans and max(span.end_us for span in spans) <= 2 * DRAWN_COLUMNS * tick:
        return "\n".join([grid.draw(spans, tick), *lines])
    return "\n".join([*lines, "too large to draw here: --png FILE draws it"])


def draw_png(given: JobArguments, planned: Plan, path: Path) -> None:
    from recycle_plugin.planner.assemble import timeline
    from recycle_plugin.render import gantt

    unit = (given.scale, "ticks") if given.unit == "ticks" else None
    lost = f", without {', '.join(map(str, given.view.lost))}" if given.view.lost else ""
    shape = given.view.topology
    ties = "".join(f", stages {'+'.join(map(str, tie))} share weights" for tie in shape.ties)
    title = (
        f"PP={shape.stages}, DP={shape.replicas}, {shape.micro_batches} micro-batches{ties}{lost}: "
        f"period {given.shown(planned.period_us)} {given.unit}"
    )
    gantt.draw(path, gantt.Panel(title, timeline(planned, given.costs), unit=unit))
