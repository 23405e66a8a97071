"""``recycle simulate``: hours of training under failures, or a few steps with kills, on a machine's constants."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import Any

from recycle_plugin.commands.given import JobArguments, add_job, job
from recycle_plugin.commands.parsers import command
from recycle_plugin.lab.commands import failure
from recycle_plugin.lab.planner.profile import Profile

DESCRIPTION = """\
Simulate hours of training under a failure trace: throughput over time, averages, and what every change cost.

recycle simulate --preset gpt3_6_7b-ckpt --pp 4 --dp 6 --micro-batches 12 --cap 2.0 --trace gcp
recycle simulate --costs F=20,I=20,W=20,step=5 --pp 4 --dp 3 --micro-batches 6 --mtbf 30m --back 2h --hours 6
recycle simulate --costs F=20,I=20,W=20,step=5 --pp 4 --dp 1 --micro-batches 6 --mtbf 30m --hours 6 --log 100

--costs are in milliseconds here.  Presets are analytic A100s: gpt3_medium, gpt3_3_35b, gpt3_6_7b, gpt_18_4b, gpt_39_1b,
gpt_76_1b, gpt_145_6b, each also with -ckpt for activation checkpointing.

recycle simulate --costs F=2,I=2,W=2,step=1 --pp 4 --dp 3 --micro-batches 6 --fault "kill 1.2 before 2I1.3@1" --steps 3

With --fault the steps are played instruction by instruction and drawn; --png writes a picture as real runs do.
"kill 1.2 before 2I1.3@1": the worker of replica 1, stage 2 dies before the input gradient of replica 1's micro-batch 3
in step 1; "kill 1.2 after 2STEP@1": after its optimizer's step.

A lost worker comes back unless --back says otherwise.  With --log the next worker that comes back replays a stage that
has lost its last worker, with the help of all others; without, that loss ends the simulation with one line.

A trace file has entries "hour workers", "hour lost 1.2,0.3" or "hour end", one a line or separated by |; gcp is the one
of ReCycle's evaluation (digitised).  If the trace does not name the lost workers, they are drawn at random (--seed).
"""
RESTARTED = "1s"  # until a supervisor starts the next process of a lost worker
_SPAN = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[smh])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "simulate", "simulate hours of training under failures", DESCRIPTION, run)
    add_job(made).add_argument("--preset", metavar="NAME", help="costs of a named model, an analytic A100: see above")
    failures = made.add_mutually_exclusive_group(required=True)
    failures.add_argument("--trace", metavar="FILE", help="failure trace: a file, or gcp")
    failures.add_argument("--mtbf", metavar="TIME", help="the time between two losses of a worker, such as 30m or 6h")
    failures.add_argument(
        "--fault", metavar="FAULT", action="append", help="kill a worker at a named instruction; may be repeated"
    )
    made.add_argument("--steps", type=int, default=3, help="with --fault: how many, counted from 0 (default: 3)")
    made.add_argument("--png", metavar="FILE", help="with --fault: write the steps as a picture")
    made.add_argument(
        "--restart",
        action="store_true",
        help="with --fault: also print what is run again if an interrupted step starts anew, and nothing of it is kept",
    )
    made.add_argument("--random", action="store_true", help="with --mtbf: exponential times instead of regular ones")
    made.add_argument("--hours", type=float, metavar="H", help="how long (default: the trace's end, or 6)")
    made.add_argument(
        "--back",
        metavar="TIME",
        help="with --mtbf: the time until a lost worker's process is started again, or never (default: 1s, as the "
        "plugin does if the host lives)",
    )
    made.add_argument(
        "--log",
        type=int,
        metavar="STEPS",
        help="with --trace and --mtbf: the job logs, and makes a checkpoint each time after so many steps (checkpoint."
        "every); any worker may then be drawn to be lost",
    )
    made.add_argument(
        "--machine",
        metavar="NAME",
        help="what changes cost: local (measured on the runtime), cluster (the same and 3 s for communicators, "
        "assumed), free (nothing); default: local with --costs, else cluster",
    )
    made.add_argument("--no-normalise", action="store_true", help="do not move workers to stages that lost more")
    made.add_argument("--seed", type=int, default=0, help="the seed that draws the lost workers (default: 0)")
    made.add_argument("--json", action="store_true", help="print everything as JSON")


def run(found: argparse.Namespace) -> int:
    """Simulate, print the result, and return the exit code. Raises ValueError for bad input."""
    from recycle_plugin import planner
    from recycle_plugin.lab.planner import analytic
    from recycle_plugin.lab.planner import machine_costs as machine

    profile = analytic.preset(found.preset) if found.preset else None
    given = given_job(found, profile)
    found.machine = found.machine or ("local" if given.unit == "ms" else "cluster")
    costs = machine.by_name(found.machine)
    if found.fault:
        return failure.run(found, given, costs)
    if found.log is not None and found.log < 1:
        raise ValueError(f"--log {found.log}: at least 1 step between two checkpoints")
    if found.png or found.restart:
        raise ValueError("--png and --restart go with --fault")
    if given.view.lost:
        raise ValueError("--lost: write losses into a trace, as in '0 lost 1.2'")
    changes, length_s = failures(found, len(given.view.live))
    try:
        result = simulate(given, profile, costs, changes, length_s, not found.no_normalise, found.seed, found.log)
    except planner.PlanError as error:
        raise ValueError(str(error)) from None
    result["machine"] = {"name": found.machine, **asdict(costs)}
    print(json.dumps(result, indent=1) if found.json else report(given, result))
    return 0


def given_job(found: argparse.Namespace, profile: Profile | None) -> JobArguments:
    """Return the job that the arguments, and the ``profile`` of --preset, describe. Raises ValueError for bad input."""
    taken = None if profile is None else (profile.costs(found.pp, found.dp), profile.title, profile.memory(found.pp))
    return job(found, milliseconds=True, taken=taken)


def failures(found: argparse.Namespace, workers: int) -> tuple[list, float]:
    """Return the changes of the membership that the arguments ask for, and the length of the job in seconds."""
    from recycle_plugin.lab.simulator import traces

    if found.hours is not None and not 0 < found.hours < float("inf"):
        raise ValueError(f"--hours {found.hours:g}: more than 0")
    length = found.hours * traces.HOUR_S if found.hours is not None else None
    if found.trace is not None:
        if found.random or found.back:
            raise ValueError("--random and --back go with --mtbf, not with a trace")
        changes, end = traces.read(found.trace, workers)
        if length is None and end is None:
            raise ValueError(f"trace {found.trace} does not say when it ends: add 'hour end' or --hours")
        return changes, length if length is not None else end
    length = 6 * traces.HOUR_S if length is None else length
    back = None if found.back == "never" else span(found.back or RESTARTED, "--back")
    return traces.regular(span(found.mtbf, "--mtbf"), length, back, found.seed if found.random else None), length


def span(text: str, name: str) -> float:
    """Return the seconds of a text such as ``30m``. Raises ValueError; ``name``: of the option."""
    match = _SPAN.fullmatch(text.strip())
    if match is None or float(match["number"]) == 0:
        raise ValueError(f"{name} {text}: write a time such as 90s, 30m or 6h")
    return float(match["number"]) * _SECONDS[match["unit"]]


def simulate(
    given: JobArguments,
    profile: Profile | None,
    costs: Any,
    changes: list,
    length_s: float,
    normalise: bool,
    seed: int,
    every: int | None,
) -> dict:
    """Simulate a job's hours and return everything to print: times in seconds, throughput in samples per second.
    ``every``: steps between the checkpoints of a job that logs, None without a log.
    """
    from recycle_plugin.core.vocabulary.plan import ONE_F_ONE_B, Policy
    from recycle_plugin.lab.simulator.history import SimulatedTrainer, StepPeriods
    from recycle_plugin.lab.simulator.replay_cost import SimulatedLog

    shape = given.view.topology
    copies = [costs.copy.transfer_us(each.state + each.gradient) for each in given.memory]
    log = None if every is None else SimulatedLog(every, given.costs, given.policy, given.memory, costs.copy)
    trainer = SimulatedTrainer(shape, given.costs, given.policy, costs, copies, normalise, seed, log)
    history = trainer.run(changes, length_s)
    stock = StepPeriods(given.costs, Policy(False, False, False, ONE_F_ONE_B)).of(given.view)
    samples = shape.replicas * shape.micro_batches * (1 if profile is None else profile.micro_batch)

    def rate(period_us: int) -> float:
        return 1e6 * samples / period_us

    segments = [
        {
            "hour": s.start_s / 3600,
            "until": s.end_s / 3600,
            "live": s.live,
            "lost_by_stage": s.lost_by_stage,
            "step_s": s.pace.period_us / 1e6,
            "samples_per_s": rate(s.pace.period_us),
            "of_1f1b": stock.period_us / s.pace.period_us,
            "of_own": history.full.period_us / s.pace.period_us,
            "bound_of_1f1b": stock.period_us / s.pace.bound_us,
            "steps": s.steps,
        }
        for s in history.segments
    ]
    transitions = [
        {
            **asdict(t),
            "hour": t.at_s / 3600,
            "lost": list(map(str, t.lost)),
            "joined": list(map(str, t.joined)),
            "cost_s": t.cost_s,
        }
        for t in history.transitions
    ]
    average = samples * history.steps_per_s
    return {
        "costs": given.origin,
        "topology": asdict(shape),
        "hours": length_s / 3600,
        "steps": history.steps,
        "memberships": history.memberships,
        "samples_per_s": average,
        "fault_free_samples_per_s": rate(history.full.period_us),
        "fault_free_1f1b_samples_per_s": rate(stock.period_us),
        "of_own": history.fraction,
        "of_1f1b": average / rate(stock.period_us),
        "transitions_s": history.lost_s,
        "transitions_share": history.lost_s / length_s,
        "segments": segments,
        "transitions": transitions,
    }


def report(given: JobArguments, result: dict) -> str:
    """Return a table with a line for each membership, averages, and the costs of the changes."""
    shape = given.view.topology
    lines = [
        f"costs: {result['costs']}",
        f"PP={shape.stages}, DP={shape.replicas}, {shape.micro_batches} micro-batches of each replica; "
        f"{result['hours']:g} hours; "
        f"machine {result['machine']['name']}: {result['machine']['source']}",
        f"{'hour':>6} {'workers':>8} {'lost by stage':>14} {'step s':>8} {'samples/s':>10} {'of own':>7} "
        f"{'of 1F1B':>8} {'bound':>6}  what the change before it cost",
    ]
    for number, segment in enumerate(result["segments"]):
        before = [
            t
            for t in result["transitions"]
            if (result["segments"][number - 1]["hour"] if number else -1) < t["hour"] <= segment["hour"]
        ]
        lines.append(
            f"{segment['hour']:6.2f} {segment['live']:>5}/{shape.stages * shape.replicas} "
            f"{' '.join(map(str, segment['lost_by_stage'])):>14} "
            f"{segment['step_s']:8.3f} {segment['samples_per_s']:10.2f} {segment['of_own']:7.3f} "
            f"{segment['of_1f1b']:8.3f} "
            f"{segment['bound_of_1f1b']:6.3f}  {'; '.join(map(_change, before))}"
        )
    lines += [
        f"average {result['samples_per_s']:.2f} samples/s, transitions included: {result['of_own']:.3f} of our "
        "fault-free "
        f"{result['fault_free_samples_per_s']:.2f}, {result['of_1f1b']:.3f} of fault-free 1F1B's "
        f"{result['fault_free_1f1b_samples_per_s']:.2f}",
        f"{len(result['transitions'])} transitions cost {result['transitions_s']:.1f} s, "
        f"{result['transitions_share']:.2%} of the time; {_shares(result)}",
    ]
    return "\n".join(lines)


COSTS = {
    "detection_s": "detection",
    "stop_s": "stopping",
    "regroup_s": "regrouping",
    "copy_s": "copies",
    "restart_s": "waiting for a next process",
    "replay_s": "replays",
    "redone_s": "run again",
    "fill_s": "filling the pipeline",
}


def _change(transition: dict) -> str:
    words = [f"lost {' '.join(transition['lost'])}"] if transition["lost"] else []
    words += [f"back {' '.join(transition['joined'])}"] if transition["joined"] else []
    words += [f"moved {', '.join(transition['moves'])}"] if transition["moves"] else []
    return f"{', '.join(words)}: {transition['cost_s']:.2f} s"


def _shares(result: dict) -> str:
    totals = {word: sum(transition[name] for transition in result["transitions"]) for name, word in COSTS.items()}
    return ", ".join(f"{word} {total:.1f} s" for word, total in totals.items())
