"""Total time of a training with a failure every K steps: replay from the log against plain checkpoint-restart and
CheckFreq-style checkpoints, each at its own best interval, with start-up in it and without.

python scripts/reproduce/swift_total_time.py [real=[]] [run_dir=...]

Simulated rows are of a model whose constants stand in configs/reproduce/swift_total_time.yaml; real rows are of real
jobs, ours and two under stock DeepSpeed (restarting_job.py), on this machine.  SWIFT's published gain is beside.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import NamedTuple

import common
from common import OURS, PUBLISHED, Column, Table
from restarting_job import VARIABLE

from recycle_plugin.experiments.bench_scripts import script
from recycle_plugin.experiments.runs import JobRun, RunFailed, TrainingRun, environment, free_port
from recycle_plugin.simulator.peers.published import SWIFT_GAIN

DEADLINE_S = 300.0  # of one start of a job
REPLAY, RESTART, CHECKFREQ = "replay from the log", "checkpoint-restart", "CheckFreq-style"
LOST = 1  # rank and stage of who is killed, each time


class Total(NamedTuple):
    """Seconds of a training from its first step to its last, and those of it that were start-up after failures."""

    seconds: float
    start_up_s: float


@dataclass(frozen=True)
class Method:
    """A way to recover, in seconds.  ``save_s``: what a checkpoint stops training for; ``persist_s``: until it is
    durable after that; ``start_s``: a start after a failure, ``load_s``: its checkpoint; ``redo_s``: a step that was
    lost; ``step_s``: a step in fault-free training.
    """

    name: str
    step_s: float
    redo_s: float
    save_s: float
    persist_s: float
    start_s: float
    load_s: float

    def total(self, steps: int, failures_every: int, every: int) -> Total:
        """The mean over all places of the first failure, so that no interval is good for one of them alone."""
        found = [self.total_from(steps, failures_every, every, first) for first in range(1, failures_every + 1)]
        return Total(*(fmean(each) for each in zip(*found)))

    def total_from(self, steps: int, failures_every: int, every: int, first: int) -> Total:
        """Of ``steps`` steps with failures before ``first`` and then every ``failures_every`` steps, and a checkpoint
        after each multiple of ``every``.  One is there at the beginning.
        """
        now, start_up = 0.0, 0.0
        written = [(0.0, 0)]  # when each checkpoint is durable, and of which step
        for step in range(1, steps + 1):
            if step >= first and (step - first) % failures_every == 0:
                durable = max(of for at, of in written if at <= now)
                start_up += self.start_s
                now += self.start_s + self.load_s + (step - 1 - durable) * self.redo_s
                written = [(at, of) for at, of in written if of <= durable]
            now += self.step_s
            if step % every == 0:
                now += self.save_s
                written.append((now + self.persist_s, step))
        return Total(now, start_up)

    def best_interval(self, steps: int, failures_every: int) -> int:
        """The interval with the least total time."""
        return min(range(1, steps + 1), key=lambda every: (self.total(steps, failures_every, every).seconds, every))


def methods(constants: dict[str, float]) -> tuple[Method, ...]:
    c = SimpleNamespace(**constants)
    logged = c.step_s * (1 + c.log_share)
    return (
        Method(REPLAY, logged, c.replay_s, c.copy_s, c.persist_s, c.start_one_s, c.load_s),
        Method(RESTART, c.step_s, c.step_s, c.save_s, 0.0, c.start_job_s, c.load_s),
        Method(CHECKFREQ, c.step_s, c.step_s, c.copy_s, c.persist_s, c.start_job_s, c.load_s),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    config = common.settings("swift_total_time", arguments)
    table = Table(
        f"Total time of {config.steps} steps with a failure every K steps, PP 4 x DP 1",
        [
            Column("K"),
            Column("M"),
            Column("method"),
            Column("kind"),
            Column("interval, steps", OURS),
            Column("total, s", OURS, 1),
            Column("without start-up, s", OURS, 1),
            Column("by replay's", OURS, 2),
            Column("by replay's, without start-up", OURS, 2),
            Column("SWIFT's gain, at most", PUBLISHED, 2),
        ],
    )
    for failures_every in config.failures_every:
        add(table, failures_every, "simulated", simulated(config, failures_every))
    for failures_every in config.real:
        add(table, failures_every, "real run", real(config, failures_every))
    notes = [
        "simulated: by a model, with constants that its configuration says were measured or assumed; the mean over all "
        "places of the first failure",
        "real run: jobs of emulated layers on this machine, from the first step to the last, a failure before each "
        "multiple of K",
        "intervals: each method's own best one by the model; a real job of ours chooses its own by what its "
        "checkpoints have cost, and its mean one stands here",
        "start-up: from a failure until the script of who was started has come to its first step",
        "published: total time of CheckFreq and Elastic Horovod by SWIFT's, of other models on other machines",
    ]
    folder = Path(config.run_dir)
    table.write(folder / "total_time", notes)
    draw(folder / "total_time.png", table, config)
    return 0


def simulated(config: SimpleNamespace, failures_every: int) -> dict[str, tuple[int, Total]]:
    """By method: its best interval, and its total time there."""
    found = {}
    for method in methods(config.constants):
        every = method.best_interval(config.steps, failures_every)
        found[method.name] = every, method.total(config.steps, failures_every, every)
    return found


def add(table: Table, failures_every: int, kind: str, found: dict[str, tuple[int, Total]]) -> None:
    ours = found[REPLAY][1]
    for name, (every, total) in found.items():
        left = total.seconds - total.start_up_s
        table.add(
            failures_every,
            8,
            name,
            kind,
            every,
            total.seconds,
            left,
            total.seconds / ours.seconds,
            left / (ours.seconds - ours.start_up_s),
            SWIFT_GAIN if name == CHECKFREQ else None,
        )


def draw(path: Path, table: Table, config: SimpleNamespace) -> None:
    title = f"Total time of {config.steps} steps, PP 4 x DP 1: pale parts are start-up; all figures ours"
    figure, axes = common.canvas(1, 1, 11.0, 4.4, title)
    common.frame(axes[0][0], "", "a failure every K steps", "seconds")
    colours = dict(zip((REPLAY, RESTART, CHECKFREQ), ("ours", "fault-scaled", "Bamboo")))
    for place, row in enumerate(table.rows):
        colour, total, left = common.COLOURS[colours[row[2]]], row[5], row[6]
        name = row[2] if row[2] not in [each[2] for each in table.rows[:place]] else None
        axes[0][0].bar(place + place // 3, left, color=colour, label=name)
        axes[0][0].bar(place + place // 3, total - left, bottom=left, color=colour, alpha=0.35)
    groups = [table.rows[first] for first in range(0, len(table.rows), 3)]
    axes[0][0].set_xticks([4 * place + 1 for place in range(len(groups))], [f"{row[0]}, {row[3]}" for row in groups])
    common.legend_below(figure, axes[0][0], 3)
    common.save(figure, path)


# --- real runs ---------------------------------------------------------------------------------------------


def real(config: SimpleNamespace, failures_every: int) -> dict[str, tuple[int, Total]]:
    """The same from real jobs, at the intervals that the model finds best.  Raises RunFailed."""
    folder = Path(config.run_dir) / f"real-{failures_every}"
    best = {name: every for name, (every, _) in simulated(config, failures_every).items()}
    return {
        REPLAY: replay(folder / "replay", config, failures_every, best[REPLAY]),
        RESTART: (best[RESTART], restarting(folder / "restart", config, failures_every, best[RESTART], False)),
        CHECKFREQ: (best[CHECKFREQ], restarting(folder / "checkfreq", config, failures_every, best[CHECKFREQ], True)),
    }


def job(config: SimpleNamespace) -> Sequence[str]:
    return (
        "model=emulated",
        "topology=pp4_dp1",
        "optimizer=adam",
        f"model.width={config.width}",
        *(f"model.{name}_ms={config.layer_ms}" for name in ("forward", "input", "weight")),
        f"steps={config.steps}",
        "report_every=0",
    )


def struck(config: SimpleNamespace, failures_every: int) -> list[int]:
    """The steps before which somebody is killed."""
    return list(range(failures_every, config.steps, failures_every))


def replay(folder: Path, config: SimpleNamespace, failures_every: int, every: int) -> tuple[int, Total]:
    """The total time of a job of ours, and how many steps were between its checkpoints, on average.  Their overhead is
    the one at which what the job usually measures of a checkpoint's cost makes that interval.
    """
    kills = [
        f'"kill 0.{LOST}{f"#{number}" if number else ""} before {LOST}F0.0@{step}"'
        for number, step in enumerate(struck(config, failures_every))
    ]
    overhead = min(0.5, config.measured_cost_s / (every * config.constants["step_s"]))
    more = (
        "recycle.enabled=true",
        "recycle.log={}",
        f"recycle.checkpoint={{overhead: {overhead:.6f}}}",
        f"recycle.faults=[{', '.join(kills)}]",
    )
    shutil.rmtree(folder, ignore_errors=True)
    with TrainingRun(folder, 4, [*job(config), *more]) as run:
        outcome = run.finish(DEADLINE_S)
    replays = [failure.absence for failure in outcome.failures]
    if len(replays) != len(kills) or not all(each.replayed_at and each.came_at for each in replays):
        raise RunFailed(f"{folder}: {len(kills)} stages were to be replayed, and {len(replays)} workers were lost")
    began = outcome.of("resume")[0]["time"]
    start_up = sum(each.came_at - failure.struck_at for each, failure in zip(replays, outcome.failures))
    made = round(config.steps / len(outcome.of("checkpoint")))
    return made, Total(outcome.commits[config.steps] - began, start_up)


def restarting(folder: Path, config: SimpleNamespace, failures_every: int, every: int, background: bool) -> Total:
    """The total time of restarting_job.py, which is started again at once after each failure.  Raises RunFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    kept = folder / "kept"
    kept.mkdir(parents=True)
    for number, kill_at in enumerate([*struck(config, failures_every), None]):
        todo = {"folder": str(kept.resolve()), "every": every, "background": background, "lost": LOST}
        script = Path(__file__).with_name("restarting_job.py")
        command = ["deepspeed", "--num_gpus", "4", "--master_port", str(free_port()), str(script), *job(config)]
        place = folder / f"start{number}"
        variables = environment(**{VARIABLE: json.dumps(todo | {"kill_at": kill_at})})
        with JobRun(place, [*command, f"run_dir={place.resolve()}"], variables) as run:
            run.wait_for(lambda: run.launcher.poll() is not None, "its end", DEADLINE_S, poll_s=0.1)
            if (run.launcher.returncode == 0) != (kill_at is None):
                raise RunFailed(f"{place} ended with {run.launcher.returncode}\n{run.output[-4000:]}")
    return total_of(kept, config.steps)


def total_of(kept: Path, steps: int) -> Total:
    """The total time from what the ranks have told."""
    told = [json.loads(line) for path in sorted(kept.glob("rank*.jsonl")) for line in path.read_text().splitlines()]
    times = {
        event: sorted(one["time"] for one in told if one["event"] == event) for event in ("ready", "loaded", "killed")
    }
    workers = len(list(kept.glob("rank*.jsonl")))
    ready = times["ready"][workers - 1 :: workers]  # the last rank of each start
    ended = max(one["time"] for one in told if one["event"] == "step" and one["step"] == steps)
    start_up = sum(again - killed for killed, again in zip(times["killed"], ready[1:], strict=True))
    return Total(ended - ready[0], start_up)


if __name__ == "__main__":
    script(main)
