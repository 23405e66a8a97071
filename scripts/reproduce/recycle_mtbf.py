"""Average throughput if one worker is lost at a fixed interval: ours and all peers, GPT-3 Medium, 3.35B and 6.7B on 32
workers.

python scripts/reproduce/recycle_mtbf.py [micro_batches=[12]] [run_dir=...]

Every figure is ours; the paper's table is not available to us. Fractions of fault-free 1F1B at the same M.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
from common import OURS, Column, Table

from recycle_plugin.lab.simulator.peers import (
    Bamboo,
    CheckFreq,
    ElasticBatching,
    ElasticHorovod,
    FaultScaled,
    Oobleck,
    PeerJob,
    Recycle,
    RestartFromCheckpoint,
    label,
    regular_losses,
    replay,
)
from recycle_plugin.planner import warm

OWN = "ReCycle, ours"


def main() -> None:
    config = common.settings("recycle_mtbf")
    warm()
    frequencies = [Column(every["name"], OURS) for every in config.every]
    columns = [Column("model"), Column("PP x DP"), Column("M"), Column("policy"), *frequencies, Column("remark")]
    table = Table(
        f"Fraction of fault-free 1F1B, {config.losses} losses at a fixed interval, no return; every transition "
        "included",
        columns,
    )
    for model in config.models:
        for micro_batches in config.micro_batches:
            job = common.job_of(model, model["replicas"], model["stages"], micro_batches)
            add(table, job, model, config)
    notes = [common.profile_of(model).title for model in config.models]
    notes += [f"{every['name']}: of the {every['of']}" for every in config.every]
    notes += [
        "M: micro-batches a step of each pipeline; no published figure stands here: ReCycle's table is not available "
        "to us"
    ]
    notes += [
        "Oobleck loses its running step and pauses by its artifact's cost model; best: ranked by real step time "
        "instead of its own estimate"
    ]
    folder = Path(config.run_dir)
    table.write(folder / "mtbf", [*notes, *summary(table)])
    draw(folder / "mtbf.png", table, config)


def policies(
    job: PeerJob,
    model: Mapping[str, Any],
    config: SimpleNamespace,
    every_s: float,
    oobleck: Mapping[bool, Mapping[int, float]],
) -> list[Any]:
    cap = common.techniques(job, config.cap_factor)
    pause = model["artifact_pause_s"]
    return [
        Recycle(job, cap, horizon_s=every_s),
        Recycle(job, cap, moves=False, name="ReCycle, ours, not normalised"),
        FaultScaled(job.fault_free, job.workers),
        Oobleck(oobleck[False], job.batch, pause, job.workers),
        Oobleck(oobleck[True], job.batch, pause, job.workers, "Oobleck, best"),
        Bamboo.of_job(job),
        ElasticBatching(job),
        RestartFromCheckpoint(job),
        CheckFreq(job),
        ElasticHorovod(job),
    ]


def add(table: Table, job: PeerJob, model: Mapping[str, Any], config: SimpleNamespace) -> None:
    fewest = job.workers - config.losses
    speeds = {best: Oobleck.of_job(job, 0.0, fewest, best=best).speeds for best in (False, True)}
    found: dict[str, list[float]] = {}
    for every in config.every:
        changes = regular_losses(every["seconds"], config.losses, config.seed)
        for policy in policies(job, model, config, every["seconds"], speeds):
            run = replay(policy, changes, job.workers, every["seconds"] * config.losses)
            found.setdefault(label(policy), []).append(run.average / job.fault_free)
    for name, row in found.items():
        ahead = [every["name"] for every, value, ours in zip(config.every, row, found[OWN]) if value > ours]
        said = f"ahead of ours at {', '.join(ahead)}" if ahead and name != OWN else ""
        said = "out of memory" if not any(row) else said
        table.add(
            job.name, f"{job.topology.stages} x {job.topology.replicas}", job.topology.micro_batches, name, *row, said
        )


def summary(table: Table) -> list[str]:
    ahead = [
        f"{row[3]} ahead of ours: {row[0]}, M={row[2]}"
        for row in table.rows
        if row[-1].startswith("ahead") and row[3] != "fault-scaled"
    ]
    return ahead or ["no peer is ahead of ours anywhere"]


def draw(path: Path, table: Table, config: SimpleNamespace) -> None:
    drawn = config.drawn if config.drawn in config.micro_batches else config.micro_batches[0]
    title = (
        f"One worker of 32 lost at a fixed interval, {config.losses} losses, none returns; M={drawn}; all figures ours"
    )
    figure, axes = common.canvas(1, len(config.models), 15.0, 4.6, title)
    styles = {
        OWN: (common.COLOURS["ours"], "-", "o"),
        "fault-scaled": (common.COLOURS["fault-scaled"], "--", None),
        "Oobleck": ("#a5d6b5", "-", "s"),
        "Oobleck, best": (common.COLOURS["Oobleck"], "-", "s"),
        "Bamboo (unvalidated)": (common.COLOURS["Bamboo"], "-", "^"),
        "elastic batching (unvalidated)": ("#c0a16b", "-", None),
        "CheckFreq (unvalidated)": ("#c62828", "-", "v"),
        "Elastic Horovod (unvalidated)": ("#ef8a80", "-", None),
        "restart from checkpoint (unvalidated)": ("#6d4c41", "-", None),
    }
    places = range(len(config.every))
    for axis, model in zip(axes[0], config.models):
        common.frame(
            axis, f"{model['name']}, PP={model['stages']} x DP={model['replicas']}", "one loss every", common.FRACTION
        )
        for row in table.rows:
            if (row[0], row[2]) == (model["name"], drawn) and row[3] in styles:
                colour, line, marker = styles[row[3]]
                width = 2.2 if row[3] == OWN else 1.4
                axis.plot(
                    places,
                    row[4:-1],
                    color=colour,
                    linestyle=line,
                    marker=marker,
                    markersize=4,
                    linewidth=width,
                    label=row[3],
                )
        axis.set_xticks(list(places), [every["name"] for every in config.every])
        axis.set_ylim(0, None)
    common.legend_below(figure, axes[0][0], 5)
    common.save(figure, path)


if __name__ == "__main__":
    main()
