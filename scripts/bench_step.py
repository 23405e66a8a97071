#!/usr/bin/env python
"""The plugin's cost without failures, its schedule's gain, and the accuracy of its predictions.

* scripts/bench_step.py overhead: gpt_tiny, 2x2, real compute: step time, and memory, against the stock engine's;
  --bf16: both in bf16
* scripts/bench_step.py change --checkout DIR: the same job, five times, against the plugin that is
  installed in another checkout
* scripts/bench_step.py throughput: emulated F = I = W, PP=4 x DP=2, 8 micro-batches: throughput against stock 1F1B's
* scripts/bench_step.py prediction: emulated, PP=4 x DP=3, 6 micro-batches: before and after one loss, against the plan
* scripts/bench_step.py instructions: three small models, 2x2: processor time of the training thread, by instruction,
  against the stock engine's, and our calls in each (scripts/bench_instructions.py)

Targets: ratio of step times at most 1.05, after a change 1.02; throughput at least 1.15 times, holding no more
micro-batches than 1F1B does at its first stage; predictions within 5%.  Every part writes JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import psutil
from bench_instructions import instructions

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.experiments import turns
from recycle_plugin.lab.experiments.bench_scripts import (
    DEADLINE_S,
    calibration,
    one_loss,
    run_part,
    script,
    told,
)
from recycle_plugin.lab.experiments.measurements import WARM_UP
from recycle_plugin.lab.runs import RunOutcome, TrainingRun
from recycle_plugin.lab.simulator import predict

OVERHEAD, CHANGED, GAIN, ERROR = 1.05, 1.02, 1.15, 0.05
STARTED = 10  # both runs are past this step before they take turns
QUIET_CORES = 0.4  # cores that other programs may use in a turn that counts as quiet
PATIENCE_S = 15
FEWEST = 100  # step times that are enough for a verdict
STOCK_BF16 = (
    "{bf16: {enabled: true}, zero_optimization: {stage: 1}, data_types: {grad_accum_dtype: fp32}, "
    "communication_data_type: fp32}"
)
"""At stage 0 stock's sums are bf16."""
SLICE_S = 3.0  # turn of one run with the machine
WITHOUT = ["recycle.split_backward=false", "recycle.stagger_optimizer=false", "recycle.reroute=false"]


def main(arguments: list[str]) -> int:
    return run_part(PARTS, parser().parse_intermixed_args(arguments))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("part", choices=sorted(PARTS))
    made.add_argument(
        "--steps", type=int, default=None, help="steps of each run, not of instructions (default: 300, 300, 15 or 20)"
    )
    made.add_argument("--rounds", type=int, default=None, help="runs of each kind (default: 1, 5, 2, 1 or 6)")
    made.add_argument(
        "--checkout",
        type=Path,
        metavar="DIR",
        help="with change: the other checkout, with a .venv of its own (scripts/test makes it)",
    )
    made.add_argument("--layer-ms", type=float, default=None, help="F, I and W of an emulated layer (default: 30)")
    made.add_argument(
        "--bf16", action="store_true", help="with overhead: both engines in bf16, stock's with sums in fp32 too"
    )
    made.add_argument("--out", type=Path, default=Path("runs/bench_step"), metavar="DIR")
    made.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="further Hydra overrides for the plugin's runs; for stock's too, unless they are of recycle",
    )
    return made


# --- real compute: the plugin's own cost -------------------------------------------------------------------


class Turn(NamedTuple):
    """The steps that a run began and ended while it had the machine, and the cores that others used meanwhile."""

    first: int
    last: int
    others: float


class Kind(NamedTuple):
    """A run that is compared with this checkout's plugin."""

    overrides: list[str]
    plugin: bool = True
    checkout: Path | None = None


def overhead(found: argparse.Namespace) -> dict:
    """Run the same job with both engines, in turns of a few seconds with the machine."""
    own, job = job_of(found)
    precision = ([f"deepspeed={STOCK_BF16}"], ["deepspeed={bf16: {enabled: true}}"]) if found.bf16 else ([], [])
    kinds = {"stock": Kind(precision[0], plugin=False), "plugin": Kind([*precision[1], "recycle.enabled=true", *own])}
    steps: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number in range(found.rounds or 1):
        times, memory = side_by_side(found.out / f"overhead{number}", job, kinds)
        for kind in kinds:
            steps[kind] += times[kind]
    for kind, held in memory.items():
        print(f"{kind:>6}: {held / 2**20:.0f} MiB of memory, all workers and what started them")
    return compared(steps, OVERHEAD) | {"memory_bytes": memory}


def change(found: argparse.Namespace) -> dict:
    """Run both kinds side by side, several times; compare the median of the ratios of medians with the target."""
    if found.checkout is None or not (found.checkout / ".venv" / "bin" / "deepspeed").exists():
        raise SystemExit(
            "change: give --checkout a checkout of this project in which scripts/test or scripts/demo has installed "
            ".venv"
        )
    own, job = job_of(found)
    overrides = ["recycle.enabled=true", *own]
    kinds = {"before": Kind(overrides, checkout=found.checkout.resolve()), "plugin": Kind(overrides)}
    rounds = []
    for number in range(found.rounds or 5):
        rounds.append(compared(side_by_side(found.out / f"change{number}", job, kinds)[0], CHANGED))
    ratios = sorted(
        each[kind]["ratio"] for each in rounds for kind in ["quiet" if "quiet" in each else "any"] if kind in each
    )
    met = bool(ratios) and median(ratios) <= CHANGED
    print(
        f"ratios of {len(ratios)} rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; median "
        f"{median(ratios or [float('nan')]):.3f}, target at most {CHANGED}: {verdict(met)}"
    )
    return {"rounds": rounds, "ratios": ratios, "target": CHANGED, "met": met}


def job_of(found: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the overrides of the plugin, and those of both."""
    own = [each for each in found.overrides if each.lstrip("+").startswith("recycle")]
    return own, [
        "model=gpt_tiny",
        "topology=pp2_dp2",
        f"steps={found.steps or 300}",
        "report_every=1",
        *(each for each in found.overrides if each not in own),
    ]


def side_by_side(
    folder: Path, job: list[str], kinds: Mapping[str, Kind]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """Return for each kind its steps (seconds, cores that others used meanwhile), and the memory of all its processes,
    in bytes.
    """
    steps, memory, runs = {}, {}, {}
    with ExitStack() as stack:
        for kind, (overrides, plugin, checkout) in kinds.items():
            place = Path(f"{folder}-{kind}")
            runs[kind] = stack.enter_context(
                TrainingRun(place, 4, [*job, *overrides], plugin=plugin, checkout=checkout)
            )
            runs[kind].wait_for(lambda: printed(runs[kind]) >= STARTED, f"step {STARTED}", DEADLINE_S)
            turns.pause(runs[kind])
            memory[kind] = turns.memory_bytes(runs[kind])
        taken = take_turns(runs)
        for kind, run in runs.items():
            records = run.finish(DEADLINE_S).records.values()
            steps[kind] = [
                (s, turn.others) for turn in taken[kind] for r in records for s in r["step_s"][turn.first : turn.last]
            ]
    return steps, memory


def compared(steps: dict[str, list[tuple[float, float]]], target: float) -> dict:
    """Compare (seconds, cores that others used) of the steps of ``plugin`` and of another kind. The verdict is on the
    quiet steps, if there are any.
    """
    other = next(iter(steps))
    result: dict = {"target": target, "met": False}
    for name, limit in (("any", float("inf")), ("quiet", QUIET_CORES)):
        kept = {kind: [seconds for seconds, others in values if others <= limit] for kind, values in steps.items()}
        if min(map(len, kept.values())) < FEWEST:
            print(f"{name:>6}: too few steps with others using at most {limit} cores")
            continue
        ratio = median(kept["plugin"]) / median(kept[other])
        result |= {
            name: {kind: statistics(values) for kind, values in kept.items()} | {"ratio": ratio},
            "met": ratio <= target,
        }
        print(
            f"{name:>6}: {other} {spread(kept[other])}\n        plugin {spread(kept['plugin'])}\n        ratio of "
            f"medians {ratio:.3f}",
            flush=True,
        )
    print(f"target at most {target}: {verdict(result['met'])}")
    return result


def take_turns(runs: Mapping[str, TrainingRun]) -> dict[str, list[Turn]]:
    """Give the machine to one run at a time, until one has ended. All are paused at first."""
    deadline = time.monotonic() + DEADLINE_S
    taken: dict[str, list[Turn]] = {kind: [] for kind in runs}
    while time.monotonic() < deadline:
        for kind, run in runs.items():
            wait_for_quiet()
            step, began, busy, own = printed(run), time.monotonic(), busy_s(), turns.cpu_s(run)
            turns.go_on(run)
            time.sleep(SLICE_S)
            turns.pause(run)
            if run.launcher.poll() is not None or "has left" in run.output:
                break
            others = (busy_s() - busy - turns.cpu_s(run) + own) / (time.monotonic() - began)
            taken[kind].append(Turn(step + 1, max(step + 1, printed(run)), others))
        else:
            continue
        break
    for run in runs.values():
        turns.go_on(run)
    return taken


def printed(run: TrainingRun) -> int:
    """Return the last step whose loss the run has printed."""
    return max(map(int, re.findall(r"steps: (\d+) ", run.output)), default=0)


def wait_for_quiet() -> None:
    """Wait until other programs leave most of the machine alone, for at most so many seconds."""
    for _ in range(4 * PATIENCE_S):
        busy = busy_s()
        time.sleep(0.25)
        if busy_s() - busy < 0.25 * QUIET_CORES:
            return


def busy_s() -> float:
    """Return the busy seconds of this machine's cores, added up."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def settled(outcome: RunOutcome, skipped: int = WARM_UP) -> list[float]:
    """Return the step times of all ranks, without the first ones."""
    return [seconds for record in outcome.records.values() for seconds in record["step_s"][skipped:]]


# --- emulated stage times: the schedule's gain ---------------------------------------------------------------


def throughput(found: argparse.Namespace) -> dict:
    """Run stock 1F1B, the plugin with everything off (1F1B on our runtime), and the plugin, one after the other, in
    rounds.
    """
    shape, layer_ms = Topology(replicas=2, stages=4, micro_batches=8), found.layer_ms or 30.0
    job = [*emulated(shape, layer_ms), f"steps={found.steps or 15}"]
    kinds = {
        "stock": [],
        "1f1b": ["recycle.enabled=true", *WITHOUT],
        "plugin": ["recycle.enabled=true", f"recycle.activation_cap={shape.stages}", *found.overrides],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    held: dict[str, int] = {}
    for number in range(found.rounds or 2):
        for kind, more in kinds.items():
            with TrainingRun(
                found.out / f"throughput-{kind}{number}", len(shape.seats), [*job, *more], plugin=kind != "stock"
            ) as run:
                outcome = run.finish(DEADLINE_S)
            seconds[kind] += settled(outcome)
            held[kind] = max((event["held"] for event in outcome.of("peak")), default=shape.stages)
            print(f"{kind:>6}: step {spread(seconds[kind])}, held at most {held[kind]}", flush=True)
    gain = median(seconds["stock"]) / median(seconds["plugin"])
    met = gain >= GAIN and held["plugin"] <= shape.stages
    print(f"throughput {gain:.3f} times stock 1F1B's, target at least {GAIN}: {verdict(met)}")
    return {
        "layer_ms": layer_ms,
        "step_s": {kind: statistics(values) for kind, values in seconds.items()},
        "held": held,
        "gain": gain,
        "target": GAIN,
        "met": met,
    }


def emulated(shape: Topology, layer_ms: float) -> list[str]:
    """Return overrides for one layer a stage with F = I = W = ``layer_ms``."""
    return [
        "model=emulated",
        "optimizer=sgd",
        f"topology.stages={shape.stages}",
        f"topology.replicas={shape.replicas}",
        f"topology.micro_batches={shape.micro_batches}",
        "report_every=0",
        *(f"model.{name}_ms={layer_ms:g}" for name in ("forward", "input", "weight")),
    ]


# --- emulated stage times: predictions -----------------------------------------------------------------------


def prediction(found: argparse.Namespace) -> dict:
    """Calibrate on 2x2, predict 3x4 with and without a lost worker, write the prediction, and only then run it."""
    layer_ms, lost = found.layer_ms or 30.0, Seat(0, 1)
    square, shape, steps = (
        Topology(replicas=2, stages=2, micro_batches=4),
        Topology(replicas=3, stages=4, micro_batches=6),
        found.steps or 20,
    )
    constants = calibration(
        found.out / "calibration",
        len(square.seats),
        [*emulated(square, layer_ms), f"steps={steps}"],
        round(1000 * layer_ms),
    )
    costs = replace(
        CostModel.uniform(
            shape.stages, *(round(1000 * layer_ms),) * 3, constants.communication, constants.reduce, constants.step
        ),
        dispatch=constants.dispatch,
    )
    plans = {
        "fault_free": planner.plan(shape.full(), costs, Policy()),
        "degraded": planner.plan(shape.full().without(lost), costs, Policy()),
    }
    predicted = {name: predict(plan, costs).period_us / 1e6 for name, plan in plans.items()}
    path = found.out / "predicted.json"
    path.write_text(
        json.dumps(
            {
                "at": time.time(),
                "layer_ms": layer_ms,
                "constants": asdict(constants),
                "lost": str(lost),
                "step_s": predicted,
                "digests": {name: plan.digest for name, plan in plans.items()},
            },
            indent=1,
        )
    )
    print(
        f"constants of this machine, from 2x2 [us]: {asdict(constants)}\npredicted before the run, in {path}: "
        f"{predicted}",
        flush=True,
    )
    job = [*emulated(shape, layer_ms), told(found.out / "costs", costs), *found.overrides]
    measured, digests = one_loss(found.out / "prediction", len(shape.seats), job, lost, steps)
    errors = {name: median(measured[name]) / predicted[name] - 1 for name in predicted}
    for name in predicted:
        rate = shape.replicas * shape.micro_batches / median(measured[name])
        print(
            f"{name:>10}: predicted {predicted[name]:.4f} s, measured {spread(measured[name])}, {rate:.2f} "
            f"micro-batches/s, error {errors[name]:+.1%}"
        )
    same = {name: plans[name].digest == digests[name] for name in plans}
    met = all(abs(error) <= ERROR for error in errors.values()) and all(same.values())
    print(f"the plans that were predicted are those that ran: {same}; within {ERROR:.0%}: {verdict(met)}")
    return {
        "layer_ms": layer_ms,
        "constants": asdict(constants),
        "predicted_s": predicted,
        "measured_s": {n: statistics(v) for n, v in measured.items()},
        "errors": errors,
        "same_plan": same,
        "met": met,
    }


# --- the host's time -----------------------------------------------------------------------------------------


def host_time(found: argparse.Namespace) -> dict:
    """Make the table of scripts/bench_instructions.py; set ``recycle.name=value``, in JSON, in the plugin's section."""
    named = (each.removeprefix("recycle.").split("=", 1) for each in found.overrides)
    return instructions(found.out, {name: json.loads(value) for name, value in named}, found.rounds)


# --- words and numbers ---------------------------------------------------------------------------------------


def statistics(values: Sequence[float]) -> dict:
    low, middle, high = quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high], "least": min(values), "most": max(values), "steps": len(values)}


def spread(values: Sequence[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.4f} s (quartiles {low:.4f} to {high:.4f}, {len(values)} steps)"


def verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


PARTS: dict[str, Callable[[argparse.Namespace], dict]] = {
    "overhead": overhead,
    "change": change,
    "throughput": throughput,
    "prediction": prediction,
    "instructions": host_time,
}

if __name__ == "__main__":
    script(main)
