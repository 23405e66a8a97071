"""A replica's loss and return beside torchft's: the same model, on the same cores, in turns.  For bench_recovery.py.

Each loop (scripts/against_torchft) trains whole replicas, of which one is killed and started again after a second.  It
comes beside the same model without fault tolerance, in the same environment.  torchft has an environment of its own,
which takes everything but torchft from this one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

from recycle_plugin.experiments.runs import JobRun, RunFailed, environment, training_script
from recycle_plugin.observability.run_history import read_events

VERSION = "0.2.0"
INSTALL_S = 600.0  # how long it may take to install torchft
DEADLINE_S = 180.0  # of each wait in a run
WARM_UP, SETTLED = 3, 10  # steps that no median counts, and steps that give one
VERSIONS = "from importlib.metadata import version; print(version('torchft'), version('torch'))"
HEARTBEATS = {"torchft": "5000", "torchft, 1 s": "1000"}  # its default timeout, and a short one
LOOPS = training_script().with_name("against_torchft")
Times = list[tuple[float, float]]  # of steps: when they began and ended, in seconds since the epoch


@dataclass(frozen=True)
class Shape:
    """What both train: a step is ``step_s`` of emulated compute in ``micro_batches``, and the exchange of a third of
    ``megabytes``, which are of weights and moments.
    """

    replicas: int
    micro_batches: int
    step_s: float
    megabytes: int


@dataclass(frozen=True)
class Side:
    """One of the two: how its job is started, the interpreter of its baseline, and a function from the run and what its
    processes have logged to when a newcomer's first contribution was committed, None before that.
    """

    name: str
    command: Sequence[str]
    python: str
    contributed: Callable[[JobRun, Sequence[Mapping]], float | None]


@dataclass(frozen=True)
class Return:
    """One loss and return.  Seconds: of a step of the baseline and of a step before the kill, both medians; from the
    kill, from the start of the newcomer's process, and from where that is ready to train, until a step with its
    contribution is committed.  A healthy peer's steps until the newcomer is ready, and from then on until it
    contributes, in units of the step before the kill: the median, None where there is none, and the longest.
    """

    plain_s: float
    step_s: float
    from_kill_s: float
    from_start_s: float
    from_ready_s: float
    away_median: float | None
    away_worst: float | None
    joining_median: float | None
    joining_worst: float | None


def compare(shape: Shape, rounds: int, seed: int, folder: Path) -> dict:
    """Measure both ``rounds`` times, in turns; what came out, by side.  Raises RunFailed."""
    rival, dice = rival_environment(LOOPS.parents[1] / ".venv-torchft"), Random(seed)
    here = [sys.executable, "-m", "recycle_plugin.launch", "--workers", str(shape.replicas)]
    sides = [
        Side("recycle", [*here, str(LOOPS / "with_recycle.py")], sys.executable, _recycle_contributed),
        *(
            Side(name, [rival, str(LOOPS / "start.py"), "with_torchft.py", timeout_ms], rival, _torchft_contributed)
            for name, timeout_ms in HEARTBEATS.items()
        ),
    ]
    found: dict[str, list[Return]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            place = folder / f"{side.name}{number}"
            plain_s = baseline(side, shape, place / "plain")
            found[side.name].append(measure(side, shape, place, plain_s, dice))
            print(f"round {number + 1}, {side.name}: {found[side.name][-1]}", file=sys.stderr, flush=True)
    return {name: {"median": _medians(returns), "rounds": [*map(asdict, returns)]} for name, returns in found.items()}


def rival_environment(folder: Path) -> str:
    """The interpreter of the environment in ``folder``, which has torchft; it is made if there is none.  Raises
    RunFailed.
    """
    python = folder / "bin" / "python"
    if not (folder / "bin" / "torchft_lighthouse").exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], "an environment for torchft")
        theirs, ours = sysconfig.get_path("purelib", vars={"base": str(folder)}), sysconfig.get_path("purelib")
        (Path(theirs) / "shared.pth").write_text(f"{ours}\n")
        _run([str(python), "-m", "pip", "install", "--quiet", f"torchft=={VERSION}"], f"torchft {VERSION}")
    versions = _run([str(python), "-c", VERSIONS], "torchft's version").split()
    if versions != [VERSION, version("torch")]:
        raise RunFailed(f"{folder} has torchft {versions[0]} and torch {versions[1]}: remove it, and it is made anew")
    return str(python)


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{what}: not within {INSTALL_S:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise RunFailed(f"{what}: {' '.join(command)} has failed\n{done.stdout}{done.stderr}")
    return done.stdout


# --- runs ----------------------------------------------------------------------------------------------


def baseline(side: Side, shape: Shape, folder: Path) -> float:
    """Seconds of a step of the model without fault tolerance, the median."""
    with _started([side.python, str(LOOPS / "start.py"), "plain.py"], shape, folder) as run:
        _await_steps(run, range(shape.replicas), 0.0, WARM_UP + SETTLED, "steps without fault tolerance")
        return median(ended - began for began, ended in _steps(_log(run), range(shape.replicas)))


def measure(side: Side, shape: Shape, folder: Path, plain_s: float, dice: Random) -> Return:
    """One job, in which the last replica is killed, and comes back."""
    lost, peers = shape.replicas - 1, range(shape.replicas - 1)
    with _started(side.command, shape, folder) as run:
        _await_steps(run, range(shape.replicas), 0.0, WARM_UP + SETTLED, "steps before the kill")
        time.sleep(dice.uniform(0.0, shape.step_s))
        (victim,) = {line["pid"] for line in _log(run) if line["rank"] == lost}
        killed_at = time.time()
        os.kill(victim, signal.SIGKILL)

        def came() -> list[dict]:
            return [line for line in _log(run) if line["rank"] == lost and line["pid"] != victim]

        run.wait_for(lambda: {"started", "ready"} <= {line["event"] for line in came()}, "a newcomer", DEADLINE_S)
        back_at = run.wait_for(lambda: side.contributed(run, came()), "the newcomer's contribution", DEADLINE_S)
        _await_steps(run, peers, back_at, 2, "steps after the return")
        log, times = _log(run), {line["event"]: line["time"] for line in reversed(came())}
    steps = _steps(log, peers)
    return put_together(steps, plain_s, killed_at, times["started"], times["ready"], back_at)


def put_together(
    steps: Times, plain_s: float, killed_at: float, started_at: float, ready_at: float, back_at: float
) -> Return:
    """The figures of one return, from the times of all healthy peers' steps and of the newcomer's."""
    usual = median(ended - began for began, ended in steps if ended < killed_at)
    away = [(ended - began) / usual for began, ended in steps if ended >= killed_at and began < ready_at]
    joining = [(ended - began) / usual for began, ended in steps if ready_at <= began < back_at]
    return Return(
        plain_s,
        usual,
        back_at - killed_at,
        back_at - started_at,
        back_at - ready_at,
        median(away) if away else None,
        max(away, default=None),
        median(joining) if joining else None,
        max(joining, default=None),
    )


def _started(command: Sequence[str], shape: Shape, folder: Path) -> JobRun:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [*folder.glob("log/*"), *folder.glob("store")]:
        stale.unlink()
    given = json.dumps({"folder": str(folder.resolve()), **asdict(shape)})
    return JobRun(folder, command, environment(AGAINST_TORCHFT=given), LOOPS)


def _log(run: JobRun) -> list[dict]:
    """What all processes have logged, each in its order."""
    return [line for path in sorted(run.folder.glob("log/*.jsonl")) for line in read_events(path)]


def _await_steps(run: JobRun, ranks: Sequence[int], since: float, count: int, what: str) -> None:
    def enough() -> bool:
        log = [line for line in _log(run) if line["event"] == "step" and line["time"] > since]
        return all(sum(line["rank"] == rank for line in log) >= count for rank in ranks)

    run.wait_for(enough, f"{count} {what}", DEADLINE_S)


def _steps(log: Sequence[Mapping], ranks: Sequence[int]) -> Times:
    """When the steps of these ranks began and ended, without the first ones."""
    times = [[line["time"] for line in log if line["event"] == "step" and line["rank"] == rank] for rank in ranks]
    return [pair for one in times for pair in pairwise(one[WARM_UP - 1 :])]


def _recycle_contributed(run: JobRun, came: Sequence[Mapping]) -> float | None:
    """The commit of the step from which the newcomer has work."""
    events = run.events()
    steps = [event["step"] for event in events if event["event"] == "rejoined"]
    commits = [
        event["time"] for event in events if event["event"] == "committed" and steps and event["step"] >= steps[0]
    ]
    return min(commits, default=None)


def _torchft_contributed(run: JobRun, came: Sequence[Mapping]) -> float | None:
    """The end of the newcomer's first step in which it has taken part with more than zeros."""
    return next((line["time"] for line in came if line["event"] == "step" and line["whole"]), None)


# --- what came out -------------------------------------------------------------------------------------


def _medians(returns: Sequence[Return]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in asdict(returns[0]):
        values = [value for each in returns if (value := getattr(each, name)) is not None]
        found[name] = median(values) if values else None
    return found


def table(shape: Shape, found: Mapping[str, Mapping]) -> str:
    """The medians of both, and of each figure the least and the most."""
    rounds = len(next(iter(found.values()))["rounds"])
    lines = [
        f"\nmeasured: {shape.replicas} replicas of one stage, {shape.micro_batches} micro-batches each, "
        f"{shape.step_s:g} s of a step slept (emulated compute), {shape.megabytes} MB of weights and moments, Gloo, "
        f"one killed and started again after 1 s; medians of {rounds} rounds, in brackets the least and the most",
        f"{'':>15}" + "".join(f"{name:>28}" for name in found),
    ]
    for figure in next(iter(found.values()))["median"]:
        cells = [_cell([each[figure] for each in side["rounds"]], side["median"][figure]) for side in found.values()]
        lines.append(f"{figure:>15}" + "".join(f"{cell:>28}" for cell in cells))
    share = (shape.replicas - 1) / shape.replicas
    lines.append(
        "away, joining: a healthy peer's steps until the newcomer is ready to train, and then until it contributes; "
        "1 is its step before the kill.  Meanwhile recycle's peers train all of each batch, torchft's "
        f"{share:.0%} of it.  torchft, 1 s: with a heartbeat timeout of 1 s in place of its default, 5 s.  "
        "recycle's launcher forks processes from one that has imported torch; torchft's import it."
    )
    return "\n".join(lines)


def _cell(values: Sequence[float | None], middle: float | None) -> str:
    there = [value for value in values if value is not None]
    return f"{middle:.2f} [{min(there):.2f}, {max(there):.2f}]" if middle is not None else "none"
