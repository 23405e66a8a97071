"""The real jobs of SWIFT's figures: ours, and its peers under stock DeepSpeed; and their events of a recovery.

All train the same emulated layers on the same batches, four processes on this machine.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import elastic_job
import restarting_job
from stock_job import told

from recycle_plugin.lab.runs import JobRun, RunFailed, RunOutcome, TrainingRun, environment
from recycle_plugin.lab.training.compose import compose
from recycle_plugin.launch import free_port
from recycle_plugin.observability.run_history import WARM_UP, Failure

WORKERS = 4
NO_LOSS = "no loss"  # the method of a job without a loss
DEADLINE_S = 300.0  # of one start of a job
HERE = Path(__file__).resolve().parent


class Recovery(NamedTuple):
    """The seconds from a worker's death until the interrupted step is done, by parts.

    ``notice_s``: until the death is known; ``start_s``: until the last process is at its first step again, or all
    have regrouped; ``load_s``: until each has the state of a checkpoint or a commit; ``redo_s``: of the ``steps``
    behind that, trained again or replayed; ``finish_s``: of the interrupted step.
    """

    notice_s: float
    start_s: float
    load_s: float
    redo_s: float
    finish_s: float
    steps: int

    @property
    def total_s(self) -> float:
        return self.notice_s + self.start_s + self.load_s + self.redo_s + self.finish_s

    @classmethod
    def of(cls, failure: Failure) -> Recovery:
        """Return the recovery of a worker of ours. Raises RunFailed if the event log lacks a part of it."""
        back, struck, seen = failure.absence, failure.struck_at, failure.seen_at
        if not failure.resumed_at or not failure.committed_at:
            raise RunFailed(f"nobody has gone on after the loss of seat {failure.seat}")
        if not back.replayed_at:
            parts = (failure.resumed_at, failure.resumed_at, failure.resumed_at, failure.committed_at)
        elif back.came_at and back.restored_at:
            parts = (back.came_at, back.restored_at, back.replayed_at, failure.committed_at)
        else:
            raise RunFailed(f"the log does not tell how seat {failure.seat} came to its replay")
        return cls(
            seen - struck, *(after - before for before, after in zip((seen, *parts), parts)), back.replayed_steps
        )


@dataclass(frozen=True)
class Told:
    """The events of a peer's job, from all its processes, in the order of time."""

    events: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, folder: Path) -> Told:
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        return cls(tuple(sorted(map(json.loads, lines), key=lambda event: event["time"])))

    def of(self, event: str, step: int | None = None) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event and step in (None, each["step"])]

    @property
    def ready(self) -> list[float]:
        """The times at which the last rank was at its first step, for each start or round."""
        return [each["time"] for each in self.of("ready")][WORKERS - 1 :: WORKERS]

    @cached_property
    def losses(self) -> dict[int, float]:
        """The loss of each step, from its last training."""
        return {each["step"]: each["loss"] for each in self.of("step")}

    @property
    def step_s(self) -> float:
        """Median seconds from a rank's step to its next one."""
        ranks = {each["who"] for each in self.of("step")}
        ends = [[each["time"] for each in self.of("step") if each["who"] == rank] for rank in ranks]
        return median(after - before for times in ends for before, after in zip(times[WARM_UP:], times[WARM_UP + 1 :]))

    def seconds(self, event: str, since: str) -> float | None:
        """Return a rank's median seconds from ``since`` to ``event`` of the same step; None if there are none."""
        began = {(each["who"], each["step"]): each["time"] for each in self.of(since)}
        found = [each["time"] - began[each["who"], each["step"]] for each in self.of(event)]
        return median(found) if found else None

    def recovery(self) -> Recovery:
        """Return the recovery from the first loss."""
        (killed, *_), (seen, *_) = self.of("killed"), self.of("seen")
        ready, step = self.ready[1], killed["step"]
        loaded = self.of("loaded")[WORKERS : 2 * WORKERS]
        there, first = loaded[-1]["time"], loaded[-1]["step"]
        redone = max(each["time"] for each in self.of("step", step - 1)) if first < step - 1 else there
        done = max(each["time"] for each in self.of("step", step))
        times = (killed["time"], seen["time"], ready, there, redone, done)
        return Recovery(*(after - before for before, after in zip(times, times[1:])), step - 1 - first)


# --- jobs --------------------------------------------------------------------------------------------------


def job(config: SimpleNamespace, topology: str) -> list[str]:
    """Return overrides of all jobs. A stage has ``config.layers`` layers, which together take ``config.stage_ms``."""
    stages = compose([f"topology={topology}"]).topology.stages
    return [
        "model=emulated",
        f"topology={topology}",
        "optimizer=adam",
        "micro_batch_size=1",
        f"model.width={config.width}",
        f"model.layers={stages * config.layers}",
        *(f"model.{name}_ms={config.stage_ms / config.layers:g}" for name in ("forward", "input", "weight")),
        f"steps={config.steps}",
        "report_every=0",
    ]


def ours(folder: Path, overrides: Sequence[str], kills: Sequence[int], lost: int, *more: str) -> RunOutcome:
    """Run a job of ours. Its worker of stage ``lost`` is killed before each of the steps ``kills``, and has come back
    before the next.
    """
    faults = [
        f'"kill 0.{lost}{f"#{number}" if number else ""} before {lost}F0.0@{step}"' for number, step in enumerate(kills)
    ]
    shutil.rmtree(folder, ignore_errors=True)  # a log continues no other log
    told_to = [*overrides, "recycle.enabled=true", *more, f"recycle.faults=[{', '.join(faults)}]"]
    with TrainingRun(folder, WORKERS, told_to) as run:
        outcome = run.finish(DEADLINE_S)
    if len(outcome.failures) != len(kills):
        raise RunFailed(f"{folder}: {len(kills)} workers were to be lost, and {len(outcome.failures)} were")
    return outcome


def restarting(
    folder: Path, overrides: Sequence[str], every: int, background: bool, kills: Sequence[int] = (), lost: int = 1
) -> Told:
    """Run restarting_job.py, and start it again at once after each loss. Raises RunFailed."""
    kept = emptied(folder)
    for number, kill_at in enumerate([*kills, None]):
        todo = {"folder": str(kept), "every": every, "background": background, "lost": lost, "kill_at": kill_at}
        with stock(folder / f"start{number}", overrides, todo) as run:
            run.wait_for(lambda: run.launcher.poll() is not None, "its end", DEADLINE_S)
            if (run.launcher.returncode == 0) != (kill_at is None):
                raise RunFailed(f"{run.folder} ended with {run.launcher.returncode}\n{run.output[-4000:]}")
        if kill_at is not None:
            told(kept, "seen")
    return Told.read(kept)


def stock(folder: Path, overrides: Sequence[str], todo: Mapping[str, Any]) -> JobRun:
    """Start restarting_job.py once."""
    command = ["deepspeed", "--num_gpus", str(WORKERS), "--master_port", str(free_port())]
    command += [str(HERE / "restarting_job.py"), *overrides, f"run_dir={folder.resolve()}"]
    return JobRun(folder, command, environment(**{restarting_job.VARIABLE: json.dumps(todo)}))


def elastic(folder: Path, overrides: Sequence[str], every: int, kills: Sequence[int] = (), lost: int = 1) -> Told:
    """Run elastic_job.py, which starts its lost workers again itself. Raises RunFailed."""
    kept = emptied(folder)
    todo = {"folder": str(kept), "every": every, "kills": list(kills), "lost": lost}
    command = [sys.executable, str(HERE / "elastic_job.py"), *overrides, f"run_dir={folder.resolve()}"]
    with JobRun(folder, command, environment(**{elastic_job.VARIABLE: json.dumps(todo)})) as run:
        run.finish(DEADLINE_S)
    return Told.read(kept)


def emptied(folder: Path) -> Path:
    """Make the folder of a peer's events and checkpoints, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    kept = folder.resolve() / "kept"
    kept.mkdir(parents=True)
    return kept
