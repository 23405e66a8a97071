"""Total time of a training with a failure every K steps: replay from the log against plain checkpoint-restart and
CheckFreq-style checkpoints, each at its own best interval, with start-up in it and without.

python scripts/reproduce/swift_total_time.py [real=[]] [rounds=2] [run_dir=...]

Simulated rows come from a model (swift_model.py). Real rows come from jobs on this machine, ours and two under stock
DeepSpeed (restarting_job.py), in turn in each round. SWIFT's published gain is beside them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import common
import swift_jobs
from common import OURS, PUBLISHED, Column, Table
from swift_jobs import Told
from swift_model import CHECKFREQ, REPLAY, RESTART, Total, methods

from recycle_plugin.lab.experiments.bench_scripts import script
from recycle_plugin.lab.runs import RunFailed, RunOutcome
from recycle_plugin.lab.simulator.peers.published import SWIFT_GAIN

COMPARED = (REPLAY, RESTART, CHECKFREQ)
Row = tuple[float, Total]  # steps between checkpoints, and the total time with them


def main(arguments: Sequence[str] | None = None) -> int:
    config = common.settings("swift_total_time", arguments)
    table = Table(
        f"Total time of {config.steps} steps with a failure every K steps, PP 4 x DP 1",
        [
            Column("K"),
            Column("M"),
            Column("method"),
            Column("kind"),
            Column("interval, steps", OURS, 0),
            Column("total, s", OURS, 1),
            Column("without start-up, s", OURS, 1),
            Column("by replay's", OURS, 2),
            Column("by replay's, without start-up", OURS, 2),
            Column("SWIFT's gain, at most", PUBLISHED, 2),
        ],
    )
    for kind, changed in config.simulated.items():
        for failures_every in config.failures_every:
            add(table, failures_every, kind, simulated(config, failures_every, changed))
    for failures_every in config.real:
        add(table, failures_every, "real run", real(config, failures_every))
    notes = [
        "simulated: by a model whose constants stand in configs/reproduce/swift_job.yaml; the mean over all places of "
        "the first failure",
        "real run: jobs of emulated layers on this machine, from the first step to the last, a failure before each "
        f"multiple of K; rounds: {config.rounds}, medians; load of the machine at the end: {os.getloadavg()[2]:.1f}",
        "intervals: each method's own best one by the model; a real job of ours chooses its own by what its "
        "checkpoints have cost, and its mean one stands here",
        "start-up: from a failure until the script of who was started has come to its first step",
        "published: total time of CheckFreq and Elastic Horovod by SWIFT's, of other models on other machines",
    ]
    folder = Path(config.run_dir)
    table.write(folder / "total_time", notes)
    draw(folder / "total_time.png", table, config)
    return 0


def simulated(config: SimpleNamespace, failures_every: int, changed: Mapping[str, float]) -> dict[str, Row]:
    """Return each method's best interval, and its total time there, with these constants changed."""
    found = {}
    for method in methods({**config.constants, **changed}):
        if method.name in COMPARED:
            every = method.best_interval(config.steps, failures_every)
            found[method.name] = float(every), method.total(config.steps, failures_every, every)
    return found


def add(table: Table, failures_every: int, kind: str, found: dict[str, Row]) -> None:
    ours = found[REPLAY][1]
    for name, (every, total) in found.items():
        ratios = (total.seconds / ours.seconds, total.trained_s / ours.trained_s)
        gain = SWIFT_GAIN if name == CHECKFREQ else None
        table.add(failures_every, 8, name, kind, every, total.seconds, total.trained_s, *ratios, gain)


def draw(path: Path, table: Table, config: SimpleNamespace) -> None:
    title = f"Total time of {config.steps} steps, PP 4 x DP 1: pale parts are start-up; all figures ours"
    figure, axes = common.canvas(1, 1, 12.0, 4.4, title)
    common.frame(axes[0][0], "", "a failure every K steps", "seconds")
    of_each = len(COMPARED)
    colours = [common.COLOURS[name] for name in ("ours", "fault-scaled", "Bamboo")]
    for place, row in enumerate(table.rows):
        total, left, at = row[5], row[6], place + place // of_each
        colour = colours[place % of_each]
        axes[0][0].bar(at, left, color=colour, label=row[2] if place < of_each else None)
        axes[0][0].bar(at, total - left, bottom=left, color=colour, alpha=0.35)
    groups = table.rows[::of_each]
    places = [(of_each + 1) * place + (of_each - 1) / 2 for place in range(len(groups))]
    axes[0][0].set_xticks(places, [f"{row[0]}\n{row[3].replace(', ', chr(10))}" for row in groups])
    common.legend_below(figure, axes[0][0], of_each)
    common.save(figure, path)


# --- real runs ---------------------------------------------------------------------------------------------


def real(config: SimpleNamespace, failures_every: int) -> dict[str, Row]:
    """Return the same from real jobs, at the model's best intervals: medians of the rounds. Raises RunFailed."""
    folder, job = Path(config.run_dir) / f"real-{failures_every}", swift_jobs.job(config, "pp4_dp1")
    best = {name: round(every) for name, (every, _) in simulated(config, failures_every, {}).items()}
    kills, rounds = struck(config, failures_every), []
    for number in range(config.rounds):
        place = folder / f"round{number}"
        found = {REPLAY: replay(place / "replay", config, kills, best[REPLAY], job)}
        for name in (RESTART, CHECKFREQ):
            told = swift_jobs.restarting(place / name, job, best[name], name == CHECKFREQ, kills, config.lost)
            found[name] = float(best[name]), total_of(told, config.steps)
        print(f"K={failures_every}, round {number}: {found}", flush=True)
        rounds.append(found)
    return {
        name: (
            median(found[name][0] for found in rounds),
            Total(*(median(found[name][1][part] for found in rounds) for part in range(len(Total._fields)))),
        )
        for name in COMPARED
    }


def struck(config: SimpleNamespace, failures_every: int) -> list[int]:
    """Return the steps before which a worker is killed."""
    return list(range(failures_every, config.steps, failures_every))


def replay(folder: Path, config: SimpleNamespace, kills: Sequence[int], every: int, job: Sequence[str]) -> Row:
    """Return the mean interval of checkpoints of a job of ours, and its total time. Their overhead is set so that a
    checkpoint's usual cost gives the interval ``every``.
    """
    overhead = min(0.5, config.constants["own_copy_s"] / (every * config.constants["own_step_s"]))
    log = ("recycle.log={}", f"recycle.checkpoint={{overhead: {overhead:.6f}}}")
    outcome = swift_jobs.ours(folder, job, kills, config.lost, *log)
    return config.steps / len(outcome.of("checkpoint")), total_of_ours(outcome, config.steps)


def total_of_ours(outcome: RunOutcome, steps: int) -> Total:
    start_up = 0.0
    for failure in outcome.failures:
        if not failure.absence.replayed_at or not failure.absence.came_at:
            raise RunFailed(f"the stage of seat {failure.seat} was not replayed")
        start_up += failure.absence.came_at - failure.struck_at
    return Total(outcome.commits[steps] - outcome.of("resume")[0]["time"], start_up)


def total_of(told: Told, steps: int) -> Total:
    """Return the total time of a peer's job, from its ranks' events."""
    start_up = sum(again - killed["time"] for killed, again in zip(told.of("killed"), told.ready[1:], strict=True))
    return Total(max(each["time"] for each in told.of("step", steps)) - told.ready[0], start_up)


if __name__ == "__main__":
    script(main)
