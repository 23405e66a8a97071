"""One job of one side: training with replicas, the last of which, or the coordinator, is struck."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import psutil

from recycle_plugin.lab.experiments import turns
from recycle_plugin.lab.experiments.against_torchft.sides import LOOPS, Side
from recycle_plugin.lab.experiments.measurements import TooShort
from recycle_plugin.lab.experiments.turns import Window, take_turns
from recycle_plugin.lab.runs import JobRun, environment
from recycle_plugin.observability.event_log import read_events

DEADLINE_S = 180.0  # of each wait in a run
SAME_S = 0.05  # seconds between peers at the end of the same step, at most
LOOK_S = 0.1  # interval of looks at the logs, which have their own times
WARM_UP, SETTLED = 3, 10  # steps that no median counts, and steps that give a median
AFTER = 6  # steps that show that a struck job goes on
WATCHED_S = 150.0  # how long a job is watched that does nothing
STRIKES = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "coordinator": signal.SIGKILL}
GOES_ON, ENDS, STANDS = "goes on", "ends", "stands still"
Job = tuple[Sequence[str], Mapping | None]  # its command, and settings of the plugin
Times = list[tuple[float, float]]  # of steps: begin and end, in seconds since the epoch


@dataclass(frozen=True)
class TrainedShape:
    """The training of all sides: ``step_s`` of emulated compute in ``micro_batches``, and an exchange of gradients.
    ``megabytes``: of weights and moments; a third of it is exchanged in each step.
    """

    replicas: int
    micro_batches: int
    step_s: float
    megabytes: int


@dataclass(frozen=True)
class Struck:
    """Results of a strike, None if there is no such result.

    ``outcome``: of the training among the survivors. Times are in seconds. ``ended_s``: from the strike to their end.
    ``step_s``: median of a step before. ``stall_s``: how much longer a healthy peer's longest step since the strike
    was, without the return. ``batch``: the least share of the whole batch in a step. ``apart``: the largest relative
    difference of losses from a run without a failure.

    ``start_s``: from the start of the newcomer's process until it is ready to train. ``from_kill_s``, ``from_start_s``,
    ``join_s``: from the strike, that start, and readiness, until a step with its contribution is committed.
    ``joining``, ``joining_worst``: median and longest of a healthy peer's steps meanwhile, in units of its steps while
    the other is away and nobody waits, or else of its steps before.
    """

    outcome: str
    step_s: float
    ended_s: float | None = None
    stall_s: float | None = None
    batch: float | None = None
    apart: float | None = None
    start_s: float | None = None
    from_kill_s: float | None = None
    from_start_s: float | None = None
    join_s: float | None = None
    joining: float | None = None
    joining_worst: float | None = None


def strike(
    side: Side, how: str, shape: TrainedShape, folder: Path, dice: Random, reference: Sequence[Sequence[float]]
) -> Struck:
    """Run a job in which the last replica is struck by ``how``, of STRIKES, or the coordinator is. ``reference``:
    losses without a failure, by step and replica. Raises RunFailed if the job does not get that far.
    """
    peers = range(shape.replicas - 1)
    with started(side.command(shape.replicas), shape, folder, side.settings) as run:
        await_steps(run, range(shape.replicas), 0.0, WARM_UP + SETTLED, "steps before the strike")
        time.sleep(dice.uniform(0.0, shape.step_s))
        pids = {line["rank"]: line["pid"] for line in log_of(run) if line["event"] == "step"}
        victim = side.coordinator(run, log_of(run)) if how == "coordinator" else pids[shape.replicas - 1]
        at = time.time()
        os.kill(victim, STRIKES[how])
        outcome = await_outcome(run, [pids[rank] for rank in peers], peers, at)
        back = returned(run, side, shape, pids) if how == "kill" and outcome == GOES_ON else None
        log, batch = log_of(run), side.batch(run, log_of(run), at)
    steps = steps_of(log, peers)
    usual = median([ended - began for began, ended in steps if ended < at] or [shape.step_s])
    if outcome != GOES_ON:
        return Struck(outcome, usual, time.time() - at if outcome == ENDS else None)
    found = after(steps, usual, at, back)
    return replace(found, batch=batch, apart=apart(log, peers, at, side.first_step, reference))


def await_outcome(run: JobRun, pids: Sequence[int], peers: Sequence[int], at: float) -> str:
    """Return how the training of the healthy replicas' processes ``pids`` goes on after a strike."""
    deadline = time.monotonic() + WATCHED_S
    while time.monotonic() < deadline:
        steps = [line for line in log_of(run) if line["event"] == "step" and line["time"] > at]
        counts = [sum(line["rank"] == rank for line in steps) for rank in peers]
        if min(counts) >= AFTER:
            return GOES_ON
        if not any(map(_lives, pids)):
            return ENDS
        time.sleep(LOOK_S)
    return STANDS


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Back:
    """When a newcomer's process was started, was ready to train, and had a contribution committed, since the epoch."""

    started_at: float
    ready_at: float
    back_at: float


def returned(run: JobRun, side: Side, shape: TrainedShape, pids: Mapping[int, int]) -> Back:
    """Wait for the return of the last replica. Raises RunFailed."""
    lost = shape.replicas - 1

    def came() -> list[dict]:
        return [line for line in log_of(run) if line["rank"] == lost and line["pid"] != pids[lost]]

    run.wait_for(lambda: {"started", "ready"} <= {line["event"] for line in came()}, "a newcomer", DEADLINE_S, LOOK_S)
    what = "the newcomer's contribution"
    back_at = run.wait_for(lambda: side.contributed(run, came()), what, DEADLINE_S, LOOK_S)
    await_steps(run, range(lost), back_at, 2, "steps after the return")
    times = {line["event"]: line["time"] for line in reversed(came())}
    return Back(times["started"], times["ready"], back_at)


def after(steps: Times, usual: float, at: float, back: Back | None) -> Struck:
    """Return the figures of a job that goes on, from the times of all healthy peers' steps. Raises TooShort."""
    ready_at, back_at = (back.ready_at, back.back_at) if back else (float("inf"), float("inf"))
    stalled = [(ended - began, ended) for began, ended in steps if ended >= at and began < ready_at]
    if not stalled:
        raise TooShort("no step has ended behind the strike")
    longest_s, over = max(stalled)
    found = Struck(GOES_ON, usual, stall_s=longest_s - usual)
    if back is None:
        return found
    quiet = [
        (began, ended) for began, ended in steps if at <= began and ended <= ready_at and abs(ended - over) > SAME_S
    ]
    away = [ended - began for began, ended in quiet]
    unit = median(away) if away else usual
    joining = [(ended - began) / unit for began, ended in steps if ready_at <= began < back_at]
    return replace(
        found,
        start_s=ready_at - back.started_at,
        from_kill_s=back_at - at,
        from_start_s=back_at - back.started_at,
        join_s=back_at - ready_at,
        joining=median(joining) if joining else None,
        joining_worst=max(joining, default=None),
    )


def apart(
    log: Sequence[Mapping], peers: Sequence[int], at: float, first_step: int, reference: Sequence[Sequence[float]]
) -> float | None:
    """Return the largest relative difference from ``reference`` of the losses that healthy peers logged since a strike.

    A loop that counts its data from 0 logs its own replica's loss of the step before the one that it names. A loop that
    counts from 1 logs the mean over all replicas.
    """
    found = []
    for line in log:
        if line["event"] != "step" or line["rank"] not in peers or line["time"] <= at:
            continue
        if (place := line["step"] - 1) < len(reference):
            row = reference[place]
            expected = sum(row) / len(row) if first_step else row[line["rank"]]
            found.append(abs(line["loss"] - expected) / expected)
    return max(found, default=None)


class ShortStep(NamedTuple):
    """An undisturbed step: its seconds, and the processor seconds of all processes of the job."""

    step_s: float
    cpu_s: float


def in_turns(
    jobs: Mapping[str, Job], shape: TrainedShape, folder: Path, pairs: int, window_s: float
) -> dict[str, ShortStep]:
    """Return a step of each of these jobs, which have the machine in turns, as medians over ``pairs`` windows each."""
    with ExitStack() as stack:
        runs = {}
        for name, (command, settings) in jobs.items():
            runs[name] = run = stack.enter_context(started(command, shape, folder / name, settings))
            await_steps(run, range(shape.replicas), 0.0, WARM_UP, "steps before the first turn")
            turns.pause(run)
        windows = take_turns(runs, pairs, window_s)
        return {name: short_step(windows[name], log_of(run), shape) for name, run in runs.items()}


def short_step(windows: Sequence[Window], log: Sequence[Mapping], shape: TrainedShape) -> ShortStep:
    """Return medians over windows of the medians within each. Raises TooShort if a window has no step."""
    found = []
    for window in windows:
        inside = [line for line in log if line["event"] == "step" and window.began <= line["time"] <= window.ended]
        ends = [[line["time"] for line in inside if line["rank"] == rank] for rank in range(shape.replicas)]
        took = [later - earlier for each in ends for earlier, later in pairwise(each)]
        if not took:
            raise TooShort(f"a window of {window.ended - window.began:.1f} s has no whole step")
        found.append(ShortStep(median(took), window.cpu_s / (len(inside) / shape.replicas)))
    return ShortStep(*(median(values) for values in zip(*found)))


# --- a job and its log ---------------------------------------------------------------------------------


def started(command: Sequence[str], shape: TrainedShape, folder: Path, settings: Mapping | None = None) -> JobRun:
    """Start a job of ``command`` with ``folder`` as its run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [*folder.glob("log/*"), *folder.glob("store")]:
        stale.unlink()
    return JobRun(folder, command, environment(AGAINST_TORCHFT=given(shape, folder, settings)), LOOPS)


def given(shape: TrainedShape, folder: Path, settings: Mapping | None = None) -> str:
    """Return the arguments of the loops as JSON."""
    return json.dumps({"folder": str(folder.resolve()), **asdict(shape), "settings": dict(settings or {})})


def log_of(run: JobRun) -> list[dict]:
    """Return what all processes have logged, each in its order."""
    return [line for path in sorted(run.folder.glob("log/*.jsonl")) for line in read_events(path)]


def await_steps(run: JobRun, ranks: Sequence[int], since: float, count: int, what: str) -> None:
    """Return when each of ``ranks`` has done ``count`` steps since ``since``. Raises RunFailed."""

    def enough() -> bool:
        log = [line for line in log_of(run) if line["event"] == "step" and line["time"] > since]
        return all(sum(line["rank"] == rank for line in log) >= count for rank in ranks)

    run.wait_for(enough, f"{count} {what}", DEADLINE_S, LOOK_S)


def steps_of(log: Sequence[Mapping], ranks: Sequence[int]) -> Times:
    """Return when the steps of these ranks began and ended, without the first ones."""
    times = [[line["time"] for line in log if line["event"] == "step" and line["rank"] == rank] for rank in ranks]
    return [pair for one in times for pair in pairwise(one[WARM_UP - 1 :])]
