"""18.4B to 145.6B parameters on up to 1,536 GPUs with 1, 5 and 10% failed.

python scripts/reproduce/recycle_scale.py [micro_batches=[24]] [run_dir=...]

Every figure is ours.  Two kinds of failures: whole hosts, and single GPUs, each of which idles the tensor-parallel
group of 8 that shares its seat (later work names this as ReCycle's weakness).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import common
from common import OURS, Column, Table

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.lab.simulator.peers import PeerJob
from recycle_plugin.planner import plan, warm

COLUMNS = (
    Column("model"),
    Column("GPUs"),
    Column("PP x DP x TP"),
    Column("M"),
    Column("failed"),
    Column("seats lost"),
    Column("as it fell", OURS),
    Column("spread", OURS),
    Column("spread/own", OURS),
    Column("min(1,load)", OURS),
    Column("of it", OURS),
    Column("gap to bound", OURS),
    Column("fault-scaled GPUs", OURS),
    Column("plan ms", OURS, 0),
    Column("remark"),
)
GOAL = 0.99


def main() -> None:
    config = common.settings("recycle_scale")
    warm()
    table = Table("Large models, steady state, fractions of fault-free 1F1B", COLUMNS)
    for model in config.models:
        for micro_batches in config.micro_batches:
            job = common.job_of(model, model["replicas"], model["stages"], micro_batches)
            for unit in config.units:
                for part in config.failed:
                    add(table, job, unit, part, config)
    notes = [common.profile_of(model).title for model in config.models]
    notes += [
        "as it fell: random seats; spread: the same number spread over the stages as normalisation would, without the "
        "cost of its copies"
    ]
    notes += [
        "plan ms: from membership to verified plan on one core, spread; M: micro-batches a step of each pipeline; "
        "memory as the device has it"
    ]
    folder = Path(config.run_dir)
    short = [row for row in table.rows if row[10] is not None and row[10] < GOAL]
    notes += [f"short of {GOAL:.0%} of min(1, load bound) in {len(short)} of {len(table.rows)} rows"]
    table.write(folder / "scale", notes)
    draw(folder / "scale.png", table, config)


def add(table: Table, job: PeerJob, unit: str, part: float, config) -> None:
    shape, tensor = job.topology, job.profile.gpus_per_worker
    policy = common.techniques(job, config.cap_factor)
    lost = failed_seats(job, unit, part, config.seed)
    fell, even = shape.full().without(*lost), spread_evenly(job, len(lost))
    own = plan(shape.full(), job.costs, policy).period_us
    start = time.perf_counter()
    planned = plan(even, job.costs, policy)
    took = 1e3 * (time.perf_counter() - start)
    ours, goal = job.fault_free_us / planned.period_us, min(1.0, job.fault_free_us / common.load_bound_us(job, even))
    as_it_fell = None if fell.empty_stages() else job.fault_free_us / plan(fell, job.costs, policy).period_us
    failed = 1 - len(lost) / job.workers if unit == "host" else 1 - part
    said = [f"stage {fell.empty_stages()[0]} lost without normalisation"] if fell.empty_stages() else []
    said += ["below fault-scaled"] if ours < failed else []
    table.add(
        job.name,
        job.workers * tensor,
        f"{shape.stages} x {shape.replicas} x {tensor}",
        shape.micro_batches,
        f"{part:.0%} of {unit}s",
        len(lost),
        as_it_fell,
        ours,
        own / planned.period_us,
        goal,
        ours / goal,
        planned.gap,
        failed,
        took,
        "; ".join(said),
    )


def failed_seats(job: PeerJob, unit: str, part: float, seed: int) -> list[Seat]:
    draw = random.Random(f"{seed} {job.name} {unit} {part}")
    seats, tensor = job.topology.seats, job.profile.gpus_per_worker
    if unit == "host":
        return sorted(draw.sample(seats, max(1, round(part * len(seats)))))
    gpus = draw.sample(range(len(seats) * tensor), max(1, round(part * len(seats) * tensor)))
    return sorted({seats[gpu // tensor] for gpu in gpus})


def spread_evenly(job: PeerJob, losses: int) -> ClusterView:
    """Deal losses to stages so that the busiest is least busy, and to replicas in turn."""
    live = [job.topology.replicas] * job.topology.stages
    lost = []
    for _ in range(losses):
        stage = min(
            range(len(live)),
            key=lambda stage: (job.load_us[stage] / (live[stage] - 1) if live[stage] > 1 else float("inf"), stage),
        )
        live[stage] -= 1
        lost.append(Seat((live[stage] + stage) % job.topology.replicas, stage))
    return job.topology.full().without(*lost)


def draw(path: Path, table: Table, config) -> None:
    drawn = config.drawn if config.drawn in config.micro_batches else config.micro_batches[0]
    title = f"Large models, M={drawn}: fraction of fault-free 1F1B, steady state; all figures ours"
    figure, axes = common.canvas(1, len(config.units), 14.0, 4.6, title)
    colours = ("#8fb8dc", "#4b8fc9", "#0b3c66")
    for axis, unit in zip(axes[0], config.units):
        what = "whole hosts of 8 GPUs fail" if unit == "host" else "single GPUs fail, each idles its group of 8"
        common.frame(axis, what, "", common.FRACTION)
        names = list(dict.fromkeys((row[0], row[1]) for row in table.rows))
        for place, (part, colour) in enumerate(zip(config.failed, colours)):
            rows = [row for row in table.rows if row[3] == drawn and row[4] == f"{part:.0%} of {unit}s"]
            at = [number + 0.25 * (place - 1) for number in range(len(rows))]
            axis.bar(
                at,
                [row[7] for row in rows],
                width=0.23,
                color=colour,
                label=f"{part:.0%} failed, spread by normalisation",
            )
            for x, row in zip(at, rows):
                named = x == at[0] and not place
                goal, scaled, fell = (
                    ("goal: min(1, load bound)", "fault-scaled", "as it fell") if named else (None, None, None)
                )
                axis.plot([x - 0.11, x + 0.11], [row[9]] * 2, color="#c62828", linewidth=1.5, label=goal)
                axis.plot(
                    [x - 0.11, x + 0.11], [row[12]] * 2, color=common.INK, linewidth=1.2, linestyle=":", label=scaled
                )
                if row[6] is not None:
                    axis.plot([x], [row[6]], marker="o", markersize=4, color="#e07b39", linestyle="none", label=fell)
        axis.set_xticks(range(len(names)), [f"{name}\n{gpus} GPUs" for name, gpus in names])
        axis.set_ylim(0, None)
    common.legend_below(figure, axes[0][0], 6)
    common.save(figure, path)


if __name__ == "__main__":
    main()
