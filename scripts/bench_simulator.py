#!/usr/bin/env python
"""How well the simulator predicts the runtime, and how fast it is.

scripts/bench_simulator.py accuracy        # real processes with emulated stage times; targets: mean error 3%, max 6%
scripts/bench_simulator.py accuracy --only 4x3-equal --steps 15
scripts/bench_simulator.py scale           # 1,536 workers x 64 micro-batches x 1 step; hours of training under a trace

accuracy: one calibration on 2x2 gives one set of machine constants for all topologies.  The predictions for all of
them, fault-free and after one loss, are written to --out before the first measured run starts.  Unequal stages have
unequal numbers of emulated layers; unequal F, I and W are stated per layer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.machine_constants import LOCAL
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.experiments.bench_scripts import calibration, one_loss, run_part, script, told
from recycle_plugin.lab.experiments.measurements import Constants
from recycle_plugin.lab.planner import analytic
from recycle_plugin.lab.simulator import predict, simulate, traces
from recycle_plugin.lab.simulator.history import SimulatedTrainer

MEAN, MOST = 0.03, 0.06


@dataclass(frozen=True)
class Case:
    """A topology; ``layers`` over its stages, each with F, I and W of so many times --layer-ms; ``lost``: who is
    killed.
    """

    name: str
    replicas: int
    stages: int
    micro_batches: int
    layers: int
    shares: tuple[float, float, float]
    lost: Seat

    @property
    def shape(self) -> Topology:
        return Topology(self.replicas, self.stages, self.micro_batches)

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers per stage, as DeepSpeed's uniform partition deals them: the first stages get what is left over."""
        each, left = divmod(self.layers, self.stages)
        return tuple(each + (stage < left) for stage in range(self.stages))


EQUAL, UNEQUAL = (1.0, 1.0, 1.0), (1.0, 1.1, 0.9)
CASES = (
    Case("2x2-equal", 2, 2, 4, 2, EQUAL, Seat(0, 1)),
    Case("4x2-equal", 4, 2, 4, 2, EQUAL, Seat(2, 0)),
    Case("2x3-unequal", 2, 3, 6, 4, UNEQUAL, Seat(1, 0)),
    Case("3x3-unequal", 3, 3, 6, 3, UNEQUAL, Seat(1, 2)),
    Case("2x4-equal", 2, 4, 8, 4, EQUAL, Seat(0, 2)),
    Case("3x4-equal", 3, 4, 6, 4, EQUAL, Seat(1, 2)),
    Case("2x4-unequal", 2, 4, 6, 6, UNEQUAL, Seat(1, 1)),
    Case("3x2-unequal", 3, 2, 6, 3, EQUAL, Seat(0, 0)),
)
"""Names are replicas x stages."""


def main(arguments: list[str]) -> int:
    return run_part(PARTS, parser().parse_intermixed_args(arguments))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("part", choices=sorted(PARTS))
    made.add_argument("--only", nargs="+", choices=[case.name for case in CASES], default=None, metavar="NAME")
    made.add_argument("--steps", type=int, default=8, help="measured steps before and after the loss (default: 8)")
    made.add_argument(
        "--layer-ms",
        type=float,
        default=80.0,
        help="F of an emulated layer (default: 80; the shorter, the more a busy machine shows)",
    )
    made.add_argument(
        "--constants", type=Path, help="machine constants of an earlier predicted.json instead of a calibration"
    )
    made.add_argument("--predict-only", action="store_true", help="stop before the measured runs")
    made.add_argument("--replicas", type=int, default=48, help="scale: replicas of 32 stages (default: 48)")
    made.add_argument("--out", type=Path, default=Path("runs/bench_simulator"), metavar="DIR")
    return made


# --- accuracy --------------------------------------------------------------------------------------------


def accuracy(found: argparse.Namespace) -> dict:
    cases = [case for case in CASES if found.only is None or case.name in found.only]
    constants = earlier(found.constants) if found.constants else calibrated(found)
    print(
        f"machine constants, from 2x2 [us]: {asdict(constants)}; load average {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores",
        flush=True,
    )
    plans = {case.name: both_plans(case, found.layer_ms, constants) for case in cases}
    predicted = {
        case.name: {
            which: predict(plan, costs_of(case, found.layer_ms, constants)).period_us / 1e6
            for which, plan in plans[case.name].items()
        }
        for case in cases
    }
    path = found.out / "predicted.json"
    path.write_text(
        json.dumps(
            {"at": time.time(), "layer_ms": found.layer_ms, "constants": asdict(constants), "step_s": predicted},
            indent=1,
        )
    )
    print(f"predicted, before any measured run, in {path}", flush=True)
    rows: list[dict] = []
    for case in cases if not found.predict_only else ():
        load = os.getloadavg()[0]
        measured, digests = one_loss(
            found.out / case.name,
            len(case.shape.seats),
            overrides(case, found.layer_ms, constants, found.out / "costs" / case.name),
            case.lost,
            found.steps,
        )
        for which, seconds in measured.items():
            error = median(seconds) / predicted[case.name][which] - 1
            same = digests[which] == plans[case.name][which].digest
            rows.append(
                {
                    "case": case.name,
                    "which": which,
                    "predicted_s": predicted[case.name][which],
                    "measured_s": median(seconds),
                    "least_s": min(seconds),
                    "most_s": max(seconds),
                    "error": error,
                    "same_plan": same,
                    "load": load,
                }
            )
            print(line(rows[-1]), flush=True)
    return verdict(rows, constants)


def verdict(rows: list[dict], constants: Constants) -> dict:
    errors = [abs(row["error"]) for row in rows] or [0.0]
    met = bool(rows) and mean(errors) <= MEAN and max(errors) <= MOST and all(row["same_plan"] for row in rows)
    print(
        f"\n{'case':>12} {'':>10} {'predicted':>10} {'measured':>10} {'least':>8} {'most':>8} {'error':>7} {'load':>5}"
    )
    print("\n".join(map(line, rows)))
    print(
        f"mean error {mean(errors):.1%} (target {MEAN:.0%}), max {max(errors):.1%} (target {MOST:.0%}), "
        f"{len(rows)} measurements: {'met' if met else 'NOT MET'}"
    )
    return {
        "constants": asdict(constants),
        "rows": rows,
        "mean_error": mean(errors),
        "max_error": max(errors),
        "met": met,
    }


def line(row: dict) -> str:
    other = "" if row["same_plan"] else "  ANOTHER PLAN RAN"
    return (
        f"{row['case']:>12} {row['which']:>10} {row['predicted_s']:10.4f} {row['measured_s']:10.4f} "
        f"{row['least_s']:8.4f} {row['most_s']:8.4f} "
        f"{row['error']:+7.1%} {row['load']:5.1f}{other}"
    )


def costs_of(case: Case, layer_ms: float, constants: Constants) -> CostModel:
    """What the planner is told: stated times of all layers of a stage, and the machine's constants."""
    rows = [tuple(round(1000 * layer_ms * share * count) for count in case.counts) for share in case.shares]
    stages = case.stages
    return CostModel(
        *rows, constants.communication, (constants.reduce,) * stages, (constants.step,) * stages, constants.dispatch
    )


def both_plans(case: Case, layer_ms: float, constants: Constants) -> dict[str, Plan]:
    costs = costs_of(case, layer_ms, constants)
    full = case.shape.full()
    return {
        "fault_free": planner.plan(full, costs, Policy()),
        "degraded": planner.plan(full.without(case.lost), costs, Policy()),
    }


def overrides(case: Case, layer_ms: float, constants: Constants | None, folder: Path) -> list[str]:
    """The training job, whose planner is told ``constants``, if they are known, in a file in ``folder``."""
    names = ("forward_ms", "input_ms", "weight_ms")
    return [
        "model=emulated", "optimizer=sgd", f"topology.stages={case.stages}", f"topology.replicas={case.replicas}",
        f"topology.micro_batches={case.micro_batches}", f"model.layers={case.layers}", "report_every=0",
        *(f"model.{name}={layer_ms * share:g}" for name, share in zip(names, case.shares)),
        told(folder, costs_of(case, layer_ms, constants or Constants(0, 0, 0, 0))),
    ]  # fmt: skip


def calibrated(found: argparse.Namespace) -> Constants:
    """From a run of equal layers on 2x2 workers."""
    case = CASES[0]
    given = [*overrides(case, found.layer_ms, None, found.out / "costs" / "calibration"), f"steps={found.steps + 6}"]
    return calibration(found.out / "calibration", len(case.shape.seats), given, round(1000 * found.layer_ms))


def earlier(path: Path) -> Constants:
    return Constants(**json.loads(path.read_text())["constants"])


# --- scale -----------------------------------------------------------------------------------------------


def scale(found: argparse.Namespace) -> dict:
    """Seconds of processor time: the machine may be busy."""
    planner.warm()
    shape = Topology(found.replicas, 32, 64)
    costs = CostModel.uniform(32, 1000, 1100, 900, 50, 2000, 300)
    planned, plan_s = timed(lambda: planner.plan(shape.full(), costs, Policy()))
    spans, step_s = timed(lambda: simulate(planned, costs))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{len(shape.seats)} workers x 64 micro-batches x 1 step: {len(spans)} instructions in {step_s:.1f} s (plan "
        f"{plan_s:.2f} s), {memory:.2f} GB"
    )
    profile = analytic.preset("gpt3_6_7b-ckpt")
    changes, end = traces.read("gcp", 24)
    trainer = SimulatedTrainer(Topology(6, 4, 24), profile.costs(4, 6), Policy(activation_cap=8), LOCAL)
    history, trace_s = timed(lambda: trainer.run(changes, end))
    print(
        f"{end / 3600:.2f} hours of training, {len(history.transitions)} transitions, {history.steps} steps, "
        f"{history.memberships} memberships: {trace_s:.1f} s"
    )
    met = step_s < 60 and trace_s < 60
    return {
        "workers": len(shape.seats),
        "instructions": len(spans),
        "plan_s": plan_s,
        "simulate_s": step_s,
        "memory_gb": memory,
        "trace_hours": end / 3600,
        "memberships": history.memberships,
        "trace_s": trace_s,
        "met": met,
    }


def timed(work):
    start = time.process_time()
    return work(), time.process_time() - start


PARTS = {"accuracy": accuracy, "scale": scale}

if __name__ == "__main__":
    script(main)
