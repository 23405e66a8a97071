"""Throughput and accuracy without a failure: with our log, with plain checkpoints and with CheckFreq-style ones.

python scripts/reproduce/swift_failure_free.py [windows=10] [run_dir=...]

Five jobs on the same model, data and batch take turns with the machine: while one trains, the others are stopped. Each
is compared, window by window, with the same engine's job that keeps nothing. ``windows=0``: only the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple

import common
import swift_jobs
from common import OURS, Column, Table
from swift_jobs import WORKERS, Told

from recycle_plugin.lab.experiments import turns
from recycle_plugin.lab.experiments.bench_scripts import script
from recycle_plugin.lab.experiments.turns import Window, interval, step_s, take_turns
from recycle_plugin.lab.runs import JobRun, RunFailed, TrainingRun
from recycle_plugin.observability.run_history import RunHistory

STARTED = 5  # all jobs are past this step before they take turns
DEADLINE_S = 300.0
TOLERANCE = 5e-6  # of losses, as the demo's
PLAIN_STOCK, PLAIN_OURS = "nothing, stock DeepSpeed", "nothing, ours"
LOG, RESTART, CHECKFREQ = "log, ours", "checkpoints, stock DeepSpeed", "CheckFreq-style, stock DeepSpeed"
BESIDE = {
    PLAIN_STOCK: PLAIN_STOCK,
    RESTART: PLAIN_STOCK,
    CHECKFREQ: PLAIN_STOCK,
    PLAIN_OURS: PLAIN_OURS,
    LOG: PLAIN_OURS,
}
NAMED = {name: name.replace(", ", "-").replace(" ", "_") for name in BESIDE}  # folders
PATIENT = ("recycle.heartbeat_timeout_s=90", "recycle.progress_timeout_s=100")  # a stopped job's clocks run on


class Steps(NamedTuple):
    """The end of each step of a job, in seconds since the epoch, and its loss."""

    ends: Mapping[int, float]
    losses: Mapping[int, float]

    @classmethod
    def told(cls, folder: Path) -> Steps:
        """Return the steps of a job under stock DeepSpeed: a step is done when all ranks have done it."""
        told = Told.read(folder)
        ranks = {step: told.of("step", step) for step in told.losses}
        return cls(
            {step: each[-1]["time"] for step, each in ranks.items() if len(each) == WORKERS},
            told.losses,
        )

    @classmethod
    def ours(cls, run: JobRun) -> Steps:
        history = RunHistory(tuple(run.events()))
        return cls(history.commits, history.curve)


def main(arguments: Sequence[str] | None = None) -> int:
    config = common.settings("swift_failure_free", arguments)
    table = Table(
        "Training without a failure, PP 2 x DP 2",
        [
            Column("what is kept"),
            Column("M"),
            Column("kind"),
            Column("step, s", OURS),
            Column("samples/s", OURS, 1),
            Column("throughput by that with nothing", OURS),
            Column("95% interval", OURS),
            Column("steps compared", OURS),
            Column("last loss of them", OURS, 6),
            Column("largest difference of losses", OURS),
        ],
    )
    simulated(table, config)
    if config.windows:
        windows, steps = measured(config)
        judged(table, windows, steps)
    notes = [
        "real run: emulated layers, four processes on this machine, in windows that alternate; each ratio is the "
        "median of pairs of windows, beside the same engine's job that keeps nothing",
        f"checkpoints of the peers: every {config.every} steps; ours: background ones, at an overhead of "
        f"{config.overhead:g}, and the log beside them",
        "losses: against those of stock DeepSpeed that keeps nothing, over all steps that all jobs have done",
        "simulated: a step of stock's schedule, and what a checkpoint stops it for (configs/reproduce/swift_job.yaml)",
    ]
    folder = Path(config.run_dir)
    table.write(folder / "failure_free", notes)
    draw(folder / "failure_free.png", table)
    return 0


def simulated(table: Table, config: SimpleNamespace) -> None:
    """Return the peers by the model: a step of 1F1B, two stages and four micro-batches, and a checkpoint's stop."""
    constants, step = config.constants, 3 * (4 + 2 - 1) * config.stage_ms / 1000
    for name, stop_s in ((PLAIN_STOCK, 0.0), (RESTART, constants["save_s"]), (CHECKFREQ, constants["copy_s"])):
        each = step + stop_s / config.every
        table.add(name, 4, "simulated", each, 8 / each, step / each, None, None, None, None)


# --- real runs ---------------------------------------------------------------------------------------------


def measured(config: SimpleNamespace) -> tuple[Mapping[str, Sequence[Window]], Mapping[str, Steps]]:
    """Return each job's times with the machine, and its steps. Raises RunFailed."""
    folder, job = Path(config.run_dir), swift_jobs.job(config, "pp2_dp2")
    runs: dict[str, JobRun] = {}
    kept: dict[str, Path] = {}
    with ExitStack() as stack:
        for name, every in ((PLAIN_STOCK, 0), (RESTART, config.every), (CHECKFREQ, config.every)):
            place = folder / NAMED[name]
            kept[name] = swift_jobs.emptied(place)
            todo = {"folder": str(kept[name]), "every": every, "background": name == CHECKFREQ, "kill_at": None}
            runs[name] = stack.enter_context(swift_jobs.stock(place, job, todo))
            path = kept[name] / "rank0.jsonl"
            at_work(runs[name], lambda: path.exists() and bool(Told.read(path.parent).of("step", STARTED)))
        for name, more in (
            (PLAIN_OURS, ()),
            (LOG, ("recycle.log={}", f"recycle.checkpoint={{overhead: {config.overhead}}}")),
        ):
            place = swift_jobs.emptied(folder / NAMED[name]).parent
            started = TrainingRun(place, WORKERS, [*job, "recycle.enabled=true", *PATIENT, *more])
            runs[name] = run = stack.enter_context(started)
            at_work(run, lambda: run.committed() >= STARTED)
        windows = take_turns(runs, config.windows, config.window_s)
        steps = {name: Steps.told(path) for name, path in kept.items()}
        steps |= {name: Steps.ours(run) for name, run in runs.items() if name not in kept}
        broken = [event["text"] for event in runs[LOG].events() if event["event"] == "log_broken"]
    if broken:
        raise RunFailed(f"the log could not follow: {broken[0]}")
    return windows, steps


def at_work(run: JobRun, trains: Callable[[], bool]) -> None:
    """Stop ``run`` once it trains."""
    run.wait_for(trains, f"step {STARTED}", DEADLINE_S, poll_s=0.2)
    turns.pause(run)


def judged(table: Table, windows: Mapping[str, Sequence[Window]], steps: Mapping[str, Steps]) -> None:
    """Return a row for each job. Raises RunFailed if losses differ, TooShort if a window has no step."""
    took = {
        name: [step_s(window, sorted(steps[name].ends.values())) for window in each] for name, each in windows.items()
    }
    both = set.intersection(*(set(each.losses) for each in steps.values()))
    reference = steps[PLAIN_STOCK].losses
    for name, beside in BESIDE.items():
        ratios = [without / own for own, without in zip(took[name], took[beside])]
        low, high = interval(ratios)
        apart = max(abs(steps[name].losses[step] - reference[step]) for step in both)
        if not apart <= TOLERANCE:
            raise RunFailed(f"{name}: the losses are {apart:.1e} apart from those of {PLAIN_STOCK}")
        each = median(took[name])
        table.add(
            name,
            4,
            "real run",
            each,
            8 / each,
            median(ratios),
            f"{low:.3f} to {high:.3f}",
            len(both),
            steps[name].losses[max(both)],
            f"{apart:.1e}",
        )


def draw(path: Path, table: Table) -> None:
    title = "Throughput without a failure, by that of the same engine with nothing kept; all figures ours"
    figure, axes = common.canvas(1, 1, 11.5, 3.6, title)
    common.frame(axes[0][0], "", "", "throughput by that with nothing")
    for place, row in enumerate(table.rows):
        colour = common.COLOURS["ours" if "ours" in row[0] else "fault-scaled"]
        axes[0][0].bar(place, row[5], color=colour, alpha=1.0 if row[2] == "real run" else 0.45)
        axes[0][0].text(place, row[5], f"{row[5]:.3f}", ha="center", va="bottom", fontsize=9)
    axes[0][0].set_xticks(range(len(table.rows)), [f"{row[0].replace(', ', chr(10))}\n{row[2]}" for row in table.rows])
    axes[0][0].set_ylim(0, 1.15)
    common.save(figure, path)


if __name__ == "__main__":
    script(main)
