"""The gain of rerouting, split backward, staggered optimizer and normalisation, each on top of the last.

python scripts/reproduce/recycle_ablation.py [micro_batches=[12]] [run_dir=...]

Every figure is ours (the paper's table is not available to us): fractions of fault-free 1F1B at the same M, steady
state.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import common
from common import OURS, Column, Table

from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.lab.simulator.peers import PeerJob
from recycle_plugin.lab.simulator.peers.normalise import normalise
from recycle_plugin.planner import PlanError, plan, warm

STEPS = ("reroute", "+ split", "+ stagger", "+ normalise")


def main() -> None:
    config = common.settings("recycle_ablation")
    warm()
    columns = [
        Column("model"),
        Column("PP x DP"),
        Column("M"),
        Column("lost"),
        *(Column(step, OURS) for step in STEPS),
        Column("min(1,load)", OURS),
        Column("fault-scaled", OURS),
        Column("stage lost"),
        Column("remark"),
    ]
    table = Table(f"Each technique on top of the last, mean of {config.patterns} random patterns", columns)
    for model in config.models:
        for micro_batches in config.micro_batches:
            job = common.job_of(model, model["replicas"], model["stages"], micro_batches)
            for losses in config.losses:
                add(table, job, losses, config)
    notes = [common.profile_of(model).title for model in config.models]
    notes += [
        "fractions of fault-free 1F1B at the same M; M: micro-batches a step of each pipeline",
        "memory as the device has it, the same for all four; min(1,load): after normalisation",
        "stage lost: patterns in which a stage has nobody left: only a checkpoint or a log helps (not in the means)",
    ]
    folder = Path(config.run_dir)
    table.write(folder / "ablation", notes)
    draw(folder / "ablation.png", table, config)


def add(table: Table, job: PeerJob, losses: int, config: SimpleNamespace) -> None:
    rows = []
    for pattern in range(config.patterns):
        draw = random.Random(f"{config.seed} {job.workers} {losses} {pattern}")
        view = job.topology.full().without(*draw.sample(job.topology.seats, losses))
        if not view.empty_stages():
            rows.append(measure(job, view, config))
    shape = job.topology
    lost = config.patterns - len(rows)
    means = tuple(map(mean, zip(*rows))) if rows else (None,) * (len(STEPS) + 1)
    said = ""
    if rows and means[3] < 0.99 * means[4]:
        said = f"short of 99% by {0.99 * means[4] - means[3]:.3f}"
    table.add(
        job.name,
        f"{shape.stages} x {shape.replicas}",
        shape.micro_batches,
        losses,
        *means,
        1 - losses / job.workers,
        lost,
        said,
    )


def measure(job: PeerJob, view: ClusterView, config: SimpleNamespace) -> tuple[float, ...]:
    full = common.techniques(job, config.cap_factor)
    reroute = replace(full, split_backward=False, stagger_optimizer=False)
    periods = [
        plan(view, job.costs, policy).period_us for policy in (reroute, replace(full, stagger_optimizer=False), full)
    ]
    after = normalised(job, view, full, config, periods[-1])
    goal = min(1.0, job.fault_free_us / common.load_bound_us(job, after))
    return (
        *(job.fault_free_us / period for period in periods),
        job.fault_free_us / plan(after, job.costs, full).period_us,
        goal,
    )


def normalised(job: PeerJob, view: ClusterView, policy: Policy, config: SimpleNamespace, period_us: int) -> ClusterView:
    copies = [round(size / job.profile.across.bytes_per_us) for size in job.state_bytes]
    try:
        return normalise(view, job.costs, policy, copies, max(1, int(1e6 * config.horizon_s / period_us))).view
    except PlanError:
        return view


def draw(path: Path, table: Table, config: SimpleNamespace) -> None:
    drawn = config.drawn if config.drawn in config.micro_batches else config.micro_batches[0]
    title = f"Each technique on top of the last, 32 workers, M={drawn}; steady state, all figures ours"
    figure, axes = common.canvas(1, len(config.models), 15.0, 4.4, title)
    colours = ("#c9d6e2", "#8fb8dc", "#4b8fc9", "#0b3c66")
    for axis, model in zip(axes[0], config.models):
        common.frame(
            axis,
            f"{model['name']}, PP={model['stages']} x DP={model['replicas']}",
            "workers lost, at random",
            common.FRACTION,
        )
        rows = [row for row in table.rows if (row[0], row[2]) == (model["name"], drawn) and row[4] is not None]
        for place, (step, colour) in enumerate(zip(STEPS, colours)):
            at = [number + 0.2 * (place - 1.5) for number in range(len(rows))]
            axis.bar(at, [row[4 + place] for row in rows], width=0.19, color=colour, label=step)
        for number, row in enumerate(rows):
            goal, scaled = ("goal: min(1, load bound)", "fault-scaled") if not number else (None, None)
            axis.plot([number - 0.42, number + 0.42], [row[8]] * 2, color="#c62828", linewidth=1.4, label=goal)
            axis.plot(
                [number - 0.42, number + 0.42],
                [row[9]] * 2,
                color=common.INK,
                linewidth=1.2,
                linestyle=":",
                label=scaled,
            )
        axis.set_xticks(range(len(rows)), [str(row[3]) for row in rows])
        axis.set_ylim(0, None)
    common.legend_below(figure, axes[0][0], 6)
    common.save(figure, path)


if __name__ == "__main__":
    main()
