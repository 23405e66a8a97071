"""Time of a recovery, by method: replay from the log, alone and with helpers, and rerouting to a live replica,
against checkpoint-restart, CheckFreq-style and Elastic-Horovod-style peers.

python scripts/reproduce/swift_recovery.py [real=[]] [run_dir=...]

One worker is killed once, in real jobs on the same model, data and batch, ours and the peers' under stock DeepSpeed
(restarting_job.py, elastic_job.py).  Losses are compared with those of a job without a failure. The simulated rows are
PP 4 x DP 1 by a model of the same job (swift_model.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import common
import swift_jobs
import swift_model
from common import OURS, PUBLISHED, Column, Table
from swift_jobs import NO_LOSS, Recovery
from swift_model import CHECKFREQ, ELASTIC, REPLAY, REPLAY_ALONE, REROUTE, RESTART

from recycle_plugin.lab.experiments.bench_scripts import script
from recycle_plugin.lab.runs import RunFailed, RunOutcome
from recycle_plugin.lab.simulator.peers.published import SWIFT_STORAGE
from recycle_plugin.lab.training.compose import compose

TOLERANCE = 5e-6  # of losses, as the demo's
METHODS = (REPLAY, REPLAY_ALONE, REROUTE, ELASTIC, RESTART, CHECKFREQ)
PARTS = ("notice", "start", "load", "redo", "finish")


def main(arguments: Sequence[str] | None = None) -> int:
    config = common.settings("swift_recovery", arguments)
    for name in (name for one in config.real for name in one["methods"]):
        if name not in METHODS:
            raise SystemExit(f"swift_recovery: real: {name} is no method; there is {', '.join(METHODS)}")
    table = Table(
        "What a recovery takes, one worker killed",
        [
            Column("job"),
            Column("M"),
            Column("method"),
            Column("kind"),
            *(Column(f"{part}, s", OURS, 2) for part in PARTS),
            Column("total, s", OURS, 2),
            Column("steps redone", OURS),
            Column("step, s", OURS, 3),
            Column("largest difference of losses", OURS),
            Column("load of the machine", OURS, 1),
            Column("SWIFT's, whole log, s", PUBLISHED),
        ],
    )
    published = " / ".join(f"{points[0][1]:g} ({name})" for name, points in SWIFT_STORAGE.items())
    for method in swift_model.methods(config.constants):
        found = method.recovery(config.redone)
        told = published if method.name == REPLAY else None
        table.add(
            "PP 4 x DP 1",
            8,
            method.name,
            "simulated",
            *found[:5],
            found.total_s,
            found.steps,
            method.step_s,
            None,
            None,
            told,
        )
    for one in config.real:
        real(table, config, one)
    notes = [
        "notice: from the kill until somebody knows; start: until all are at their first step again, or have regrouped",
        "load: of a checkpoint, or a commit from a peer; redo: of the steps behind it; finish: the interrupted step",
        "steps redone: by where each has its last checkpoint; ours chooses its interval by what checkpoints cost",
        "real run: emulated layers, four processes on this machine; the peers have stock DeepSpeed's schedule",
        "load of the machine: processes that run or wait to, over the last minute of a job; it has "
        f"{len(os.sched_getaffinity(0))} cores",
        "simulated: by a model whose constants stand in configs/reproduce/swift_job.yaml",
        "published: 128 GPUs, other models, steps and networks: for its order of size only",
    ]
    folder = Path(config.run_dir)
    table.write(folder / "recovery", notes)
    draw(folder / "recovery.png", table)
    return 0


def real(table: Table, config: SimpleNamespace, one: Mapping[str, object]) -> None:
    """Return a row for each method of a topology, and for the job without a loss that they are compared with."""
    topology, shape = str(one["topology"]), compose([f"topology={one['topology']}"]).topology
    reference: Mapping[int, float] = {}
    for name in (NO_LOSS, *one["methods"]):
        step_s, losses, recovery = measured(
            Path(config.run_dir) / topology / name.replace(" ", "_"), name, config, topology
        )
        reference = reference or losses
        apart = difference(losses, reference, config.steps)
        if not apart <= TOLERANCE:
            raise RunFailed(f"{topology}, {name}: the losses are {apart:.1e} apart from those without a loss")
        parts = [None] * 5 if recovery is None else recovery[:5]
        more = [None, None] if recovery is None else [recovery.total_s, recovery.steps]
        job = f"PP {shape.stages} x DP {shape.replicas}"
        table.add(
            job, shape.micro_batches, name, "real run", *parts, *more, step_s, f"{apart:.1e}", os.getloadavg()[0], None
        )


def measured(
    folder: Path, name: str, config: SimpleNamespace, topology: str
) -> tuple[float, Mapping[int, float], Recovery | None]:
    """Return a real job's seconds of a step, its losses, and its recovery, if a worker was lost. Raises
    RunFailed.
    """
    job, lost = swift_jobs.job(config, topology), ([config.kill_at], config.lost)
    rank = config.lost * compose([f"topology={topology}"]).topology.replicas  # stock: a stage's replicas are adjacent
    log = ["recycle.log={}", f"recycle.checkpoint={{overhead: {config.overhead}}}"]
    match name:
        case swift_model.REPLAY:
            return of_ours(swift_jobs.ours(folder, job, *lost, *log))
        case swift_model.REPLAY_ALONE:
            return of_ours(swift_jobs.ours(folder, job, *lost, log[1], "recycle.log={helpers: 0}"))
        case swift_model.REROUTE:
            return of_ours(swift_jobs.ours(folder, job, *lost, "recycle.rejoin=never"))
        case swift_model.ELASTIC:
            told = swift_jobs.elastic(folder, job, config.every, lost[0], rank)
        case swift_model.RESTART | swift_model.CHECKFREQ:
            told = swift_jobs.restarting(folder, job, config.every, name == CHECKFREQ, lost[0], rank)
        case _:
            told = swift_jobs.restarting(folder, job, 0, False)
            return told.step_s, told.losses, None
    return told.step_s, told.losses, told.recovery()


def of_ours(outcome: RunOutcome) -> tuple[float, Mapping[int, float], Recovery]:
    losses = dict(enumerate(outcome.losses, start=1))
    return outcome.before_s, losses, Recovery.of(outcome.failures[0])


def difference(losses: Mapping[int, float], reference: Mapping[int, float], steps: int) -> float:
    """Return the largest difference over all steps; NaN if a step is missing."""
    nan = float("nan")
    apart = [abs(losses.get(step, nan) - reference.get(step, nan)) for step in range(1, steps + 1)]
    return nan if any(each != each for each in apart) else max(apart)


def draw(path: Path, table: Table) -> None:
    """Draw the recoveries as bars, in parts, one below the other."""
    rows = [row for row in table.rows if row[9] is not None]
    title = "What a recovery takes, one worker killed; all figures ours"
    figure, axes = common.canvas(1, 1, 11.5, 1.2 + 0.42 * len(rows), title)
    common.frame(axes[0][0], "", "seconds from the kill until the interrupted step is done", "")
    colours = (common.COLOURS["Bamboo"], common.COLOURS["fault-scaled"], common.COLOURS["Oobleck"])
    for place, (part, colour) in enumerate(zip(PARTS, (*colours, common.COLOURS["ReCycle"], common.COLOURS["ours"]))):
        left = [sum(row[4 : 4 + place]) for row in rows]
        axes[0][0].barh(range(len(rows)), [row[4 + place] for row in rows], left=left, color=colour, label=part)
    axes[0][0].set_yticks(range(len(rows)), [f"{row[2]}, {row[0]}, {row[3]}" for row in rows])
    axes[0][0].invert_yaxis()
    common.legend_below(figure, axes[0][0], len(PARTS))
    common.save(figure, path)


if __name__ == "__main__":
    script(main)
