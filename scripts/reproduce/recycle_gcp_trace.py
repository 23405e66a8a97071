"""ReCycle's trace replay: our throughput per number of GPUs and over time, published curves beside it.

python scripts/reproduce/recycle_gcp_trace.py [micro_batches=[12]] [run_dir=...]

Writes steady.csv (per number of GPUs), trace.csv (averages of all policies), transitions.csv (all of ours)
and a picture. Fractions are of fault-free 1F1B (the paper's baseline) and of our own fault-free schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
from common import OURS, PUBLISHED, Column, Table

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
    Run,
    changes_of,
    published,
    replay,
)
from recycle_plugin.lab.simulator.peers.policy import label
from recycle_plugin.lab.simulator.peers.recycle import spread, techniques
from recycle_plugin.planner import warm

GOAL = 0.99
IMPLIED = "Oobleck, implied pause"
RUN_COLOURS = (common.COLOURS["ours"], common.COLOURS["Oobleck"])
OUT_OF_REACH = "out of reach for rerouting at this M"
MEMORY = "no schedule within this memory meets it"
STEADY = (
    Column("model"),
    Column("M"),
    Column("GPUs"),
    Column("lost per stage"),
    Column("ours/1F1B", OURS),
    Column("ours/own", OURS),
    Column("load bound", OURS),
    Column("bound", OURS),
    Column("of min(1,load)", OURS),
    Column("Oobleck", "simulated"),
    Column("ReCycle", PUBLISHED),
    Column("Oobleck", PUBLISHED),
    Column("Bamboo", PUBLISHED),
    Column("remark"),
)
AVERAGES = (
    Column("model"),
    Column("M"),
    Column("policy"),
    Column("average/1F1B", OURS),
    Column("without transitions", OURS),
    Column("paused s", OURS, 0),
    Column("redone s", OURS, 1),
    Column("goal", OURS),
    Column("average", PUBLISHED),
    Column("remark"),
)
TRANSITIONS = (
    Column("model"),
    Column("M"),
    Column("hour"),
    Column("GPUs"),
    Column("paused s", OURS, 2),
    Column("redone s", OURS, 2),
    Column("samples/s after", OURS),
    Column("what", OURS),
)


def main() -> None:
    config = common.settings("recycle_gcp_trace")
    warm()
    folder = Path(config.run_dir)
    steady = Table("Throughput per number of GPUs, losses spread as normalisation leaves them", STEADY)
    averages = Table("Averages over the trace", AVERAGES)
    transitions = Table("Every transition of ours", TRANSITIONS)
    runs: dict[tuple[str, int], list[Run]] = {}
    jobs: dict[tuple[str, int], PeerJob] = {}
    for model in config.models:
        for micro_batches in config.micro_batches:
            job = common.job_of(model, config.replicas, config.stages, micro_batches)
            jobs[model["name"], micro_batches] = job
            add_steady(steady, job, model, config)
            runs[model["name"], micro_batches] = add_averages(averages, transitions, job, model, config)
    notes = [
        *(jobs[model["name"], config.micro_batches[0]].profile.title for model in config.models),
        "M: micro-batches a step of each pipeline; at what M the published points were taken is not known",
        "bound: of any schedule of this routing and memory",
        "Oobleck (simulated): its best instantiation, without transitions",
        f"(published): {published.DIGITISED}; its big model's size is labelled 3.5B and 6.7B by the authors, ours is "
        f"{config.models[-1]['name']}",
    ]
    steady.write(folder / "steady", notes)
    pauses = (
        "Oobleck's pauses: its artifact's, and those that ReCycle's figure implies, each with the running step lost"
    )
    averages.write(folder / "trace", [*notes, pauses])
    transitions.write(folder / "transitions", quiet=True)
    memory_table(config).write(
        folder / "memory",
        [
            "of min(1, load bound), the least over 24 .. 15 GPUs",
            "cap in units of PP, or as much as 90% of a device hold; an empty cell doesn't fit 40 GB",
        ],
    )
    for model in config.models:
        draw(folder, model, config, steady, jobs, runs)
    print("\n".join(verdict(steady, averages)))


def add_steady(table: Table, job: PeerJob, model: Mapping[str, Any], config: SimpleNamespace) -> None:
    policy = common.techniques(job, config.cap_factor)
    own = Recycle(job, policy)
    oobleck = Oobleck.of_job(job, 0.0, min(published.GPUS), best=True)
    healthy = own.speed(own.start())
    for gpus in published.GPUS:
        view = spread(job, job.workers - gpus, policy)
        lost = "/".join(str(config.replicas - len(view.live_replicas(stage))) for stage in range(config.stages))
        plan = own.store.plan(view)
        speed = own.speed(view)
        ours, load = speed / job.fault_free, job.fault_free_us / common.load_bound_us(job, view)
        known = {
            system: published.fraction(system, model["published"], gpus) for system in ("ReCycle", "Oobleck", "Bamboo")
        }
        simulated, bound = oobleck.speed(gpus) / job.fault_free, job.fault_free_us / plan.bound_us
        table.add(
            job.name,
            job.topology.micro_batches,
            gpus,
            lost,
            ours,
            speed / healthy,
            load,
            bound,
            ours / min(1.0, load),
            simulated,
            *known.values(),
            remark(ours, load, bound, known, simulated),
        )


def remark(ours: float, load: float, bound: float, known: Mapping[str, float | None], simulated: float) -> str:
    """Say where ours falls short, and why."""
    points = {
        "published ReCycle": known["ReCycle"],
        "published Oobleck": known["Oobleck"],
        "simulated Oobleck": simulated,
    }
    ahead = [name for name, point in points.items() if point is not None and ours < point]
    beyond = [name for name in ahead if bound < points[name]]
    goal, said = GOAL * min(1.0, load), []
    if ours < goal:
        said.append(f"short of {GOAL:.0%} by {goal - ours:.3f}" + (f": {MEMORY}" if bound < goal else ""))
    said += [f"behind {name}" for name in ahead if name not in beyond]
    if beyond:
        said.append(f"{OUT_OF_REACH}: {', '.join(beyond)}")
    return "; ".join(said)


def policies(job: PeerJob, model: Mapping[str, Any], config: SimpleNamespace) -> list[Any]:
    cap, fewest = common.techniques(job, config.cap_factor), min(published.GPUS)
    pauses = (("Oobleck, its own pause", model["artifact_pause_s"]), (IMPLIED, model["implied_pause_s"]))
    oobleck = Oobleck.of_job(job, 0.0, fewest)
    best = Oobleck.of_job(job, 0.0, fewest, best=True)
    return [
        Recycle(job, cap, horizon_s=config.horizon_s),
        Recycle(job, cap, moves=False, name="ReCycle, ours, not normalised"),
        FaultScaled(job.fault_free, job.workers),
        *(Oobleck(oobleck.speeds, job.batch, pause, job.workers, name) for name, pause in pauses),
        Oobleck(best.speeds, job.batch, model["artifact_pause_s"], job.workers, "Oobleck, best choice, its own pause"),
        Bamboo.of_job(job),
        Bamboo.of_job(job, 0.32, "Bamboo, rate .32"),
        Bamboo.of_job(job, 0.25, "Bamboo, rate .25"),
        ElasticBatching(job),
        RestartFromCheckpoint(job),
        CheckFreq(job),
        ElasticHorovod(job),
    ]


def add_averages(
    table: Table, transitions: Table, job: PeerJob, model: Mapping[str, Any], config: SimpleNamespace
) -> list[Run]:
    changes, end_s = changes_of(published.TRACE, config.seed), 3600 * published.TRACE_ENDS_H
    found, goals = [], goals_by_gpus(job, config)
    ends = [*(hour for hour, _ in published.TRACE[1:]), published.TRACE_ENDS_H]
    goal = (
        sum((until - hour) * goals[gpus] for (hour, gpus), until in zip(published.TRACE, ends)) / published.TRACE_ENDS_H
    )
    for policy in policies(job, model, config):
        run = replay(policy, changes, job.workers, end_s)
        found.append(run)
        known = published.AVERAGES.get((policy.name.split(",")[0], model["published"]))
        ours, first = run.average / job.fault_free, policy.name == "ReCycle, ours"
        said = ""
        if first:
            capped = (
                sum(
                    min(one.samples / job.fault_free, goals[one.workers] * (one.end_s - one.start_s))
                    for one in run.segments
                )
                / end_s
            )
            said = "goal met" if ours >= GOAL * goal else f"short of {GOAL:.0%} of the goal by {GOAL * goal - ours:.3f}"
            said += f"; {capped / goal:.3f} of it where no segment counts for more than its own goal"
        if not first and ours > found[0].average / job.fault_free and "scaled" not in policy.name:
            said = "ahead of ours"
        said = said if run.average else "out of memory"
        comparable = first or policy.name in ("fault-scaled", "Bamboo", IMPLIED)
        shown = known / published.FAULT_FREE[model["published"]] if known and comparable else None
        table.add(
            job.name,
            job.topology.micro_batches,
            label(policy),
            ours,
            run.average_without_transitions / job.fault_free,
            run.paused_s,
            run.lost_s,
            goal if first else None,
            shown,
            said,
        )
    for segment in found[0].segments[1:]:
        before = found[0].segments[found[0].segments.index(segment) - 1]
        transitions.add(
            job.name,
            job.topology.micro_batches,
            f"{segment.start_s / 3600:.2f}",
            segment.workers,
            segment.paused_s,
            before.lost_s,
            segment.speed,
            segment.opening,
        )
    return found


def memory_table(config: SimpleNamespace) -> Table:
    """Return the worth of more room for activations."""
    names = [*(f"cap {factor:g}" for factor in config.caps), *(f"{size:g} GB" for size in config.devices_gb)]
    columns = [Column("model"), Column("M"), *(Column(name, OURS) for name in names)]
    table = Table("Memory is the currency: the worst part of the goal that a plan made at once reaches", columns)
    for model in config.models:
        for micro_batches in config.micro_batches:
            job = common.job_of(model, config.replicas, config.stages, micro_batches)
            larger = [replace(job, memory_limit=1e9 * size) for size in config.devices_gb]
            table.add(
                job.name,
                micro_batches,
                *(worst_of_goal(job, factor) for factor in config.caps),
                *(worst_of_goal(one, None) for one in larger),
            )
    return table


def worst_of_goal(job: PeerJob, factor: float | None) -> float | None:
    try:
        own = Recycle(job, techniques(job, factor))
    except ValueError:
        return None
    views = [spread(job, job.workers - gpus, own.techniques) for gpus in published.GPUS]
    return min(
        own.speed(view) / job.fault_free / min(1.0, job.fault_free_us / common.load_bound_us(job, view))
        for view in views
    )


def goals_by_gpus(job: PeerJob, config: SimpleNamespace) -> dict[int, float]:
    """min(1, load bound) by number of GPUs, losses spread evenly."""
    policy = common.techniques(job, config.cap_factor)
    return {
        gpus: min(1.0, job.fault_free_us / common.load_bound_us(job, spread(job, job.workers - gpus, policy)))
        for gpus in published.GPUS
    }


def draw(
    folder: Path, model: Mapping[str, Any], config: SimpleNamespace, steady: Table, jobs: Mapping, runs: Mapping
) -> None:
    name, drawn = model["name"], config.drawn if config.drawn in config.micro_batches else config.micro_batches[0]
    title = f"{name} on 24 GPUs, DP=6 x PP=4: ours (simulated, analytic costs) beside published curves"
    figure, axes = common.canvas(3, 1, 12.5, 3.6, title, heights=(1.25, 1.15, 0.55))
    draw_steady(axes[0][0], model, config, steady)
    draw_trace(axes[1][0], jobs[name, drawn], runs[name, drawn], model, drawn)
    draw_transitions(axes[2][0], runs[name, drawn])
    common.save(figure, folder / f"{name.replace(' ', '_').replace('.', '_')}.png")


def drawn_runs(runs: list[Run]) -> list[Run]:
    """Return ours, and Oobleck as in ReCycle's figure."""
    return [next(run for run in runs if run.policy == name) for name in ("ReCycle, ours", IMPLIED)]


def draw_steady(axes: Any, model: Mapping[str, Any], config: SimpleNamespace, steady: Table) -> None:
    title = (
        "steady throughput per number of GPUs; "
        "M: micro-batches a step of each pipeline (not known for the published curves)"
    )
    common.frame(axes, title, "GPUs", common.FRACTION)
    for micro_batches, shade in zip(config.micro_batches, common.SHADES):
        rows = [row for row in steady.rows if row[:2] == (model["name"], micro_batches)]
        gpus = [row[2] for row in rows]
        axes.plot(
            gpus, [row[4] for row in rows], color=shade, marker="o", markersize=4, label=f"ours, M={micro_batches}"
        )
        axes.plot(gpus, [min(row[6], 1.0) for row in rows], color=shade, linestyle=":", linewidth=1.4)
    axes.plot([], [], color=common.INK, linestyle=":", label="goal: min(1, load bound)")
    for system in ("ReCycle", "Oobleck", "Bamboo", "fault-scaled"):
        points = [(gpus, published.fraction(system, model["published"], gpus)) for gpus in published.GPUS]
        points = [point for point in points if point[1] is not None]
        if points:
            axes.plot(
                *zip(*points),
                color=common.COLOURS[system],
                marker="s",
                markersize=4,
                linestyle="--",
                label=f"{system}, published",
            )
    axes.invert_xaxis()
    axes.set_xticks(list(published.GPUS))
    axes.legend(fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_trace(axes: Any, job: PeerJob, runs: list[Run], model: Mapping[str, Any], micro_batches: int) -> None:
    healthy = published.FAULT_FREE[model["published"]]
    common.frame(
        axes, f"over the trace, ours at M={micro_batches}; averages hold every transition", "", common.FRACTION
    )
    for run, name, colour, alpha in zip(drawn_runs(runs), ("ours", "Oobleck, simulated"), RUN_COLOURS, (1.0, 0.45)):
        hours = [segment.start_s / 3600 for segment in run.segments] + [run.segments[-1].end_s / 3600]
        speeds = [segment.speed / job.fault_free for segment in run.segments]
        said = f"{name}\n  average {run.average / job.fault_free:.3f}"
        axes.step(
            hours, [*speeds, speeds[-1]], where="post", color=colour, linewidth=1.8, alpha=alpha, zorder=4, label=said
        )
    for system in ("ReCycle", "Oobleck", "Bamboo"):
        points = published.curve(system, model["published"])
        if points:
            average = published.AVERAGES[system, model["published"]] / healthy
            axes.plot(
                *zip(*[(hour, speed / healthy) for hour, speed in points]),
                color=common.COLOURS[system],
                linewidth=1.3,
                linestyle="--",
                label=f"{system}, published\n  average {average:.3f}",
                zorder=3,
            )
    axes.set_xlim(0, published.TRACE_ENDS_H)
    axes.set_ylim(0, None)
    axes.legend(fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_transitions(axes: Any, runs: list[Run]) -> None:
    """Draw the seconds of training that each change cost."""
    common.frame(axes, "what each transition costs: pause and work done again", "hours", "seconds")
    names = ("ours", "Oobleck, simulated,\n  pauses implied by\n  ReCycle's figure")
    for run, colour, name, shift in zip(drawn_runs(runs), RUN_COLOURS, names, (-0.008, 0.008)):
        cost = [segment.paused_s + before.lost_s for before, segment in zip(run.segments, run.segments[1:])]
        axes.bar(
            [segment.start_s / 3600 + shift for segment in run.segments[1:]],
            cost,
            width=0.016,
            color=colour,
            label=name,
        )
    axes.set_xlim(0, published.TRACE_ENDS_H)
    axes.set_yscale("log")
    axes.set_ylim(1, None)
    axes.legend(fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def verdict(steady: Table, averages: Table) -> list[str]:
    """Say in words where ours falls short and where a peer wins."""
    rows = steady.rows
    short = [row for row in rows if row[8] < GOAL]
    met = f"{len(rows) - len(short)} of {len(rows)} rows"
    lines = [f"goal per number of GPUs ({GOAL:.0%} of min(1, load bound)): met in {met}"]
    held = sum(MEMORY in row[-1] for row in rows)
    if held:
        lines.append(f"  in {held} of the others {MEMORY}")
    if short:
        worst = min(short, key=lambda row: row[8])
        lines.append(f"  furthest: {worst[0]}, M={worst[1]}, {worst[2]} GPUs: {worst[8]:.3f}")
    for place, system in ((10, "ReCycle"), (11, "Oobleck")):
        for model in dict.fromkeys(row[0] for row in rows):
            for micro_batches in dict.fromkeys(row[1] for row in rows):
                behind = [
                    str(row[2])
                    for row in rows
                    if row[:2] == (model, micro_batches) and row[place] is not None and row[4] < row[place]
                ]
                if behind:
                    lines.append(
                        f"  published {system} ahead of ours: {model}, M={micro_batches}, at {', '.join(behind)} GPUs"
                    )
    lines += [
        f"  {row[2]} ahead of ours over the trace: {row[0]}, M={row[1]}"
        for row in averages.rows
        if row[-1] == "ahead of ours"
    ]
    return lines


if __name__ == "__main__":
    main()
