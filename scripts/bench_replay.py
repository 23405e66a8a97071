#!/usr/bin/env python
"""The gain of helpers: a stage of a real job loses its only worker, and is replayed with none to four helpers.

scripts/bench_replay.py                                  # 15 micro-batches, 12 steps to replay, with 0, 1 and 4 helpers
scripts/bench_replay.py --helpers 0 4 --micro-batches 8 --steps 20

Layers sleep (emulated compute), so workers on few cores keep the times of accelerators. A block is a
micro-batch. The bound of the replay is steps x ceil(blocks / (helpers + 1)) x a block's time, since the replaying
worker makes a share too. "share s" is the time of the gradients, with the wait for helpers; other columns exclude it.

Targets: shares at most 10% above the bound; with 4 helpers 2.5 times as fast as with one, if both are measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from recycle_plugin.lab.experiments.bench_scripts import DEADLINE_S, script
from recycle_plugin.lab.runs import RunFailed, TrainingRun

OPS = ("forward", "input", "weight")
PARTS = ("spawn", "load", "parameters", "reduce", "step")
ABOVE, FASTER = 1.1, 2.5
AFTER = 4  # steps that are trained after the stage is back


def main(arguments: list[str]) -> int:
    found = parser().parse_args(arguments)
    if min(found.micro_batches, found.steps, found.each_ms) < 1 or found.stages < 2 or min(found.helpers) < 0:
        parser().error("--micro-batches, --steps and --each-ms have to be 1 or more, --stages 2, --helpers 0")
    print(
        f"{found.stages} stages, {found.micro_batches} micro-batches of {3 * found.each_ms} ms\n"
        "helpers  steps  bound s  share s  ratio  " + "  ".join(f"{part:>8} s"[:10] for part in PARTS) + "      MB sent"
    )
    rows = []
    for helpers in found.helpers:
        rows.append(measured(helpers, found))
        print(shown(rows[-1]), flush=True)
    result = judged(rows)
    found.out.mkdir(parents=True, exist_ok=True)
    path = found.out / "replay.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"{result['faster']}written to {path}")
    return int(not result["met"])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--helpers", nargs="+", type=int, default=[0, 1, 4])
    made.add_argument("--stages", type=int, default=6)
    made.add_argument("--micro-batches", type=int, default=15)
    made.add_argument("--steps", type=int, default=12, help="steps that are committed when the worker is lost")
    made.add_argument("--each-ms", type=int, default=20, help="time of a forward, and of each half of a backward")
    made.add_argument("--out", type=Path, default=Path("runs/bench_replay"), metavar="DIR")
    return made


def overrides(found: argparse.Namespace, helpers: int) -> list[str]:
    """Return overrides for a job of one replica, with a checkpoint only before the first step."""
    return [
        "model=emulated",
        "optimizer=sgd",
        *(f"model.{op}_ms={found.each_ms}" for op in OPS),
        f"topology.stages={found.stages}",
        "topology.replicas=1",
        f"topology.micro_batches={found.micro_batches}",
        f"steps={found.steps + AFTER}",
        "report_every=0",
        "recycle.enabled=true",
        "recycle.rejoin=always",
        "++recycle.checkpoint.overhead=1e-6",
        f"++recycle.log.helpers={helpers}",
        f"recycle.faults=['kill 0.1 before 1F0.0@{found.steps + 1}']",
    ]


def measured(helpers: int, found: argparse.Namespace) -> dict:
    """Return the figures of one job. Raises RunFailed."""
    folder = found.out / f"helpers{helpers}"
    shutil.rmtree(folder, ignore_errors=True)  # a log continues no other log
    with TrainingRun(folder, found.stages, overrides(found, helpers)) as run:
        events = run.finish(DEADLINE_S).events
    said = [event for event in events if event["event"] == "helpers"]
    replayed = [event for event in events if event["event"] == "replayed"]
    if len(said) != 1 or len(replayed) != 1:
        raise RunFailed(f"{len(replayed)} stages were replayed, and not one: see {folder}")
    if said[0]["helpers"] != helpers:
        raise RunFailed(f"{said[0]['helpers']} workers have helped, and not {helpers}: {said[0]['text']}")
    seconds, steps = said[0]["seconds"], replayed[0]["steps"]
    bound = steps * -(-found.micro_batches // (helpers + 1)) * len(OPS) * found.each_ms / 1e3
    share = seconds["compute"] + seconds["wait"]
    return {
        "helpers": helpers,
        "steps": steps,
        "bound_s": round(bound, 4),
        "share_s": round(share, 4),
        "ratio": round(share / bound, 4),
        "parameters_bytes": said[0]["parameters_bytes"],
        **{f"{part}_s": seconds[part] for part in PARTS},
    }


def judged(rows: list[dict]) -> dict:
    """Return all figures, and whether the targets are met."""
    took = {row["helpers"]: (row["share_s"] + row["reduce_s"] + row["step_s"]) / row["steps"] for row in rows}
    faster = took[1] / took[4] if {1, 4} <= took.keys() else None
    met = all(row["ratio"] <= ABOVE for row in rows) and (faster is None or faster >= FASTER)
    text = "" if faster is None else f"a step with 4 helpers is {faster:.2f} times as fast as with one; "
    return {"rows": rows, "faster_with_4_than_1": faster, "faster": text, "met": met}


def shown(row: dict) -> str:
    parts = "  ".join(f"{row[f'{part}_s']:10.3f}" for part in PARTS)
    first = f"{row['helpers']:7}  {row['steps']:5}  {row['bound_s']:7.2f}  {row['share_s']:7.2f}  {row['ratio']:5.2f}"
    return f"{first}  {parts}  {row['parameters_bytes'] / 1e6:11.3f}"


if __name__ == "__main__":
    script(main)
