#!/usr/bin/env python
"""The cost of a failure: workers of real jobs under the launcher are killed from outside at uniformly random times.

scripts/bench_recovery.py                                       # 2x2 and 4x2, steps of 0.3 s and 3 s, ten kills each
scripts/bench_recovery.py --topology 2x2 --step 0.3 --kills 4   # replicas x stages
scripts/bench_recovery.py --topology 3x4 --step 0.6 --singly    # each kill in a job of its own, with all workers there
scripts/bench_recovery.py --model gpt_tiny --topology 2x2       # real compute instead of sleeping layers
scripts/bench_recovery.py --cause leave --step 0.3              # planned leaves by "recycle leave"; sigterm: by it
scripts/bench_recovery.py --against torchft                     # whole replicas, beside torchft's: five strikes

Survivors keep their work, so only the lost worker's work is run again: for single kills at random instants, on average
half of its share of the step's compute, 12.5% with 2x2, 4.2% with 3x4. Shares of the step's compute: "again %" is run
again, "done %" the lost worker had done, and "restart %" a restart of the interrupted step would run again.

Targets: the median of the cost without the redone part of the step at most 0.3 s with 2x2, 0.5 s with 4x2; the time
that a planned leave adds to all of the others' steps together at most 0.3 s each time.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean, median

from recycle_plugin.commands.running_job import ask
from recycle_plugin.core.messages.from_operators import AskLeave
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.experiments.against_torchft.comparison import FAULT_FREE, compare, deadline_s, table, verdicts
from recycle_plugin.lab.experiments.against_torchft.picture import draw
from recycle_plugin.lab.experiments.against_torchft.sides import NIGHTLY, RELEASE, own_sides, rivals
from recycle_plugin.lab.experiments.against_torchft.strikes import STRIKES, TrainedShape
from recycle_plugin.lab.experiments.bench_scripts import script
from recycle_plugin.lab.experiments.measurements import (
    REPLACED,
    WARM_UP,
    Kill,
    LeaveCost,
    RecoveryCost,
    leave_costs,
    recovery_costs,
)
from recycle_plugin.lab.runs import RunFailed, TrainingRun
from recycle_plugin.observability.trace import read_traces

TARGET_S = {4: 0.3, 8: 0.5}  # by workers
LEAVE_TARGET_S = 0.3
MICRO_BATCHES = 4
SETTLED = 4  # intervals between commits for a median, before and after each kill
SHARES = (("redone_share", 8), ("finished_share", 7), ("restart_share", 9))
SHOWN = ("cost_s", "stall_s", "detection_s", "regroup_s", "plan_s", "redone_s", "rest_s", "before_s", "after_s")


def main(arguments: list[str]) -> int:
    found = parser().parse_intermixed_args(arguments)
    if found.against:
        return beside_torchft(found)
    results, missed = [], False
    for name in found.topology:
        replicas, _, stages = name.partition("x")
        shape = Topology(int(replicas), int(stages), MICRO_BATCHES)
        for step_s in found.step if found.model == "emulated" else [0.0]:
            folder = found.out / f"{name}-{step_s:g}s"
            costs = measure(shape, overrides(shape, found.model, step_s), found, random.Random(found.seed), folder)
            target = TARGET_S.get(len(shape.seats)) if found.cause == "kill" else LEAVE_TARGET_S
            results.append(
                {
                    "topology": name,
                    "cause": found.cause,
                    "model": found.model,
                    "step_s": step_s,
                    "seed": found.seed,
                    "target_s": target,
                    **summary(costs),
                }
            )
            print((kill_table if found.cause == "kill" else leave_table)(results[-1], costs), flush=True)
            judged = ("median", "stall_s") if found.cause == "kill" else ("most", "extra_s")
            missed |= target is not None and results[-1][judged[0]][judged[1]] > target
    (found.out / "recovery.json").write_text(json.dumps(results, indent=1))
    print(f"written to {found.out / 'recovery.json'}")
    return int(missed)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--topology", nargs="+", default=["2x2", "4x2"], metavar="RxS", help="replicas x stages")
    made.add_argument(
        "--step", nargs="+", type=float, default=[0.3, 3.0], metavar="S", help="seconds of a fault-free step, emulated"
    )
    made.add_argument("--model", default="emulated", choices=["emulated", "gpt_tiny"])
    made.add_argument("--cause", default="kill", choices=["kill", "leave", "sigterm"], help="how workers are lost")
    made.add_argument("--kills", type=int, default=10, help="kills, or leaves, for each topology and step time")
    made.add_argument("--singly", action="store_true", help="one kill for each job")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--against", choices=["torchft"], help="compare whole replicas with it, at the first --step")
    made.add_argument("--rounds", type=int, default=5, help="with --against: strikes of each kind at each side")
    made.add_argument(
        "--strikes", nargs="+", default=[FAULT_FREE, *STRIKES], choices=[FAULT_FREE, *STRIKES], help="with --against"
    )
    made.add_argument("--sides", nargs="+", metavar="NAME", help="with --against: names in its table; default: all")
    made.add_argument("--replicas", type=int, default=3, help="with --against")
    made.add_argument("--megabytes", type=int, default=48, help="with --against: of weights and moments")
    made.add_argument("--out", type=Path, default=Path("runs/bench_recovery"), metavar="DIR")
    return made


def beside_torchft(found: argparse.Namespace) -> int:
    """Measure faults of replicas, the plugin's and torchft's; write and print the results."""
    sides = [side for side in (*own_sides(), *rivals()) if not found.sides or side.name in found.sides]
    shape, folder = TrainedShape(found.replicas, 2, found.step[0], found.megabytes), found.out / "against_torchft"
    told = {"torchft": [RELEASE, NIGHTLY], "seed": found.seed, "shape": asdict(shape)}
    folder.mkdir(parents=True, exist_ok=True)
    path, picture = folder.with_suffix(".json"), folder.with_suffix(".png")
    for measured in compare(sides, found.strikes, shape, found.rounds, found.seed, folder):
        stop_s = deadline_s(folder)
        path.write_text(json.dumps(told | {"measured": measured, "deadline_s": stop_s}, indent=1))
        draw(measured, picture)
        print(table(shape, measured, stop_s), flush=True)
    print(f"written to {path} and {picture}")
    return int(any(verdict.met is False for verdict in verdicts(measured, stop_s)))


def measure(
    shape: Topology, job: list[str], found: argparse.Namespace, dice: random.Random, folder: Path
) -> list[RecoveryCost] | list[LeaveCost]:
    """Run jobs one after the other, each struck as often as it survives, or once, until there are enough losses."""
    costs: list = []
    while (left := found.kills - len(costs)) > 0:
        print(f"job for {found.cause} {len(costs) + 1} of {found.kills} ...", file=sys.stderr, flush=True)
        most = 1 if found.singly else left
        costs += lose_one_by_one(shape, job, most, dice, folder / f"job{len(costs)}", found.cause)
    return costs


def overrides(shape: Topology, model: str, step_s: float) -> list[str]:
    """Return overrides of a job that trains until it is ended.

    F = I = W, so that a step with its last stage's wait is about ``step_s``.
    """
    each_ms = 1000 * step_s / (3 * shape.micro_batches + shape.stages - 1)
    times = [f"model.{name}_ms={each_ms:g}" for name in ("forward", "input", "weight")]
    emulated = ["optimizer=sgd", *times] if model == "emulated" else []
    return [
        f"model={model}",
        *emulated,
        f"topology.stages={shape.stages}",
        f"topology.replicas={shape.replicas}",
        f"topology.micro_batches={shape.micro_batches}",
        "steps=100000",
        "report_every=0",
        "recycle.enabled=true",
        "recycle.rejoin=never",
        "recycle.trace=true",
    ]


def lose_one_by_one(
    shape: Topology, job: list[str], most: int, dice: random.Random, folder: Path, cause: str
) -> list[RecoveryCost] | list[LeaveCost]:
    """Run a job: lose a worker, let the job settle, lose another, as long as every stage keeps a worker."""
    live, kills = set(shape.seats), []
    with TrainingRun(folder, len(shape.seats), job) as run:
        settled = WARM_UP + SETTLED
        while len(kills) < most and (victims := survivable(shape, live)):
            run.wait_for(lambda: run.committed() >= settled, f"step {settled}", timeout_s=300)
            commits = sorted(event["time"] for event in run.events() if event["event"] == "committed")
            time.sleep(dice.uniform(0, 2 * (commits[-1] - commits[-2])))
            seat = dice.choice(victims)
            kills.append(Kill(seat, strike(run, seat, cause)))
            live.remove(seat)
            resume = run.wait_for(lambda: run.resumes()[len(kills) :], f"word that it goes on without seat {seat}")[0]
            settled = resume["committed"] + REPLACED + SETTLED
        run.wait_for(lambda: run.committed() >= settled, f"step {settled}", timeout_s=300)
        if cause != "kill":
            return leave_costs([(each.seat, each.at) for each in kills], run.events())
        return recovery_costs(kills, run.events(), read_traces(folder / "trace"))


def strike(run: TrainingRun, seat: Seat, cause: str) -> float:
    """Strike the worker of ``seat``; return the time just before, in seconds since the epoch."""
    if cause != "leave":
        return run.kill(run.rank_at(str(seat)), signal.SIGKILL if cause == "kill" else signal.SIGTERM)
    at, said = time.time(), ask(run.folder, AskLeave, str(seat))
    if not said.done:
        raise RunFailed(f"seat {seat} was asked to leave: {said.text}")
    return at


def survivable(shape: Topology, live: set[Seat]) -> list[Seat]:
    """Return the seats whose loss leaves their stage a worker."""
    return [seat for seat in sorted(live) if sum(other.stage == seat.stage for other in live) > 1]


def summary(costs: list[RecoveryCost] | list[LeaveCost]) -> dict:
    names = [field.name for field in fields(costs[0]) if field.name.endswith(("_s", "_share"))]
    series = {name: sorted(getattr(cost, name) for cost in costs) for name in names}
    return {
        "mean": {name: round(mean(values), 4) for name, values in series.items()},
        "median": {name: round(median(values), 4) for name, values in series.items()},
        "least": {name: round(values[0], 4) for name, values in series.items()},
        "most": {name: round(values[-1], 4) for name, values in series.items()},
        "kills": [asdict(cost) for cost in costs],
    }


def kill_table(result: dict, costs: list[RecoveryCost]) -> str:
    """A row per kill and the medians; milliseconds."""
    lines = [
        f"\n{result['topology']}, {result['model']}, step {result['median']['before_s']:.3f} s, {len(costs)} kills, "
        "milliseconds"
    ]
    lines.append(
        f"{'seat':>8} {'phase':>6} {'ahead':>6} "
        + " ".join(f"{name.removesuffix('_s'):>9}" for name in SHOWN)
        + "  again %  done % restart %"
    )

    def row(values: Mapping[str, float]) -> str:
        return " ".join(f"{1000 * values[name]:9.1f}" for name in SHOWN) + "".join(
            f" {100 * values[name]:{width}.1f}" for name, width in SHARES
        )

    for cost in costs:
        lines.append(f"{cost.seat:>8} {cost.phase:6.2f} {cost.ahead:6d} {row(asdict(cost))}")
    for name in ("mean", "median", "least", "most"):
        lines.append(f"{name:>8} {'':6} {'':6} {row(result[name])}")
    if result["target_s"] is not None:
        met = "met" if result["median"]["stall_s"] <= result["target_s"] else "NOT MET"
        lines.append(
            f"stall (cost without the redone part): median {result['median']['stall_s']:.3f} s, target "
            f"{result['target_s']:g} s: {met}"
        )
    return "\n".join(lines)


def leave_table(result: dict, costs: list[LeaveCost]) -> str:
    """A row per leave and the medians; milliseconds."""
    names = ("before_s", "after_s", "extra_s", "worst_s")
    lines = [
        f"\n{result['topology']}, {result['model']}, {len(costs)} planned leaves by {result['cause']}, milliseconds",
        f"{'seat':>8} " + " ".join(f"{name.removesuffix('_s'):>9}" for name in names),
    ]
    rows = [(cost.seat, asdict(cost)) for cost in costs]
    for name, values in [*rows, *((name, result[name]) for name in ("mean", "median", "least", "most"))]:
        lines.append(f"{name:>8} " + " ".join(f"{1000 * values[each]:9.1f}" for each in names))
    met = "met" if result["most"]["extra_s"] <= result["target_s"] else "NOT MET"
    lines.append(
        f"extra (what the others' steps took longer, all together): median {result['median']['extra_s']:.3f} s, most "
        f"{result['most']['extra_s']:.3f} s, target {result['target_s']:g} s: {met}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    script(main)
