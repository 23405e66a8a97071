"""Who is compared: this plugin, and two versions of torchft with two heartbeat timeouts; how each one's job is started.

The plugin's side is its replicas in plain torch, since torchft's are: the same script's loop around the same forward
and backward, a worker for each replica, no framework on either side.  Sharded replicas under DeepSpeed's engine would
bring DeepSpeed's own time into every figure.  It trains by both of its rules for the work of who is away: the others
take it ("constant"), or nobody does ("shrink"), as with torchft.

Each version of torchft has an environment of its own, which takes everything but torchft from this one.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from recycle_plugin.runs import JobRun, RunFailed, training_script

LOOPS = training_script().with_name("against_torchft")
RELEASE, NIGHTLY = "torchft==0.2.0", "torchft-nightly==2026.10.26"
INSTALL_S = 600.0  # how long it may take to install torchft
VERSIONS = "from importlib.metadata import version; print(version({!r}), version('torch'))"
SHRINK = {"unit": "replica", "batch": "shrink"}


@dataclass(frozen=True)
class Side:
    """One of those compared: the command that starts its job of so many replicas, with which ``settings`` of the
    plugin's, and the interpreter of its baseline.

    ``contributed``: from the run and what a newcomer's processes have logged to when its first contribution was
    committed, None before that.  ``batch``: from the run and its log to the least share of the whole batch that was in
    a step since a time.  ``coordinator``: the process that decides who is alive.
    """

    name: str
    command: Callable[[int], Sequence[str]]
    python: str
    contributed: Callable[[JobRun, Sequence[Mapping]], float | None]
    batch: Callable[[JobRun, Sequence[Mapping], float], float]
    coordinator: Callable[[JobRun, Sequence[Mapping]], int]
    settings: Mapping[str, object] | None = None
    first_step: int = 0  # the number that its loop gives the first step's data


def own_sides() -> list[Side]:
    """The plugin's."""
    own = (_launched, sys.executable, _contributed_here, batch_here, lambda run, log: run.launcher.pid)
    return [Side("recycle", *own, {}, 1), Side("recycle, shrink", *own, SHRINK, 1)]


def rivals() -> list[Side]:
    """torchft's, with the environments that they need.  Raises RunFailed."""
    sides = []
    for package, shown in ((RELEASE, "torchft 0.2.0"), (NIGHTLY, "torchft nightly")):
        python = rival_environment(LOOPS.parents[1] / f".venv-{package.replace('==', '-')}", package)
        for name, timeout_ms in ((shown, "5000"), (f"{shown}, 1 s", "1000")):  # its default timeout, and a short one
            command = [python, str(LOOPS / "start.py"), "with_torchft.py", timeout_ms]
            own = (partial(_same, command), python, _contributed_there, batch_there, _lighthouse)
            sides.append(Side(name, *own))
    return sides


def _launched(replicas: int) -> list[str]:
    launch = [sys.executable, "-m", "recycle_plugin.launch", "--workers", str(replicas)]
    return [*launch, str(LOOPS / "with_recycle.py")]


def _same(command: list[str], replicas: int) -> list[str]:
    """What starts it reads the number from its environment."""
    return command


def rival_environment(folder: Path, package: str) -> str:
    """The interpreter of the environment in ``folder``, which has ``package``, a requirement as pip takes it.

    It is made if there is none.  Raises RunFailed.
    """
    python, (name, _, wanted) = folder / "bin" / "python", package.partition("==")
    if not (folder / "bin" / "torchft_lighthouse").exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], "an environment for torchft")
        theirs, ours = sysconfig.get_path("purelib", vars={"base": str(folder)}), sysconfig.get_path("purelib")
        (Path(theirs) / "shared.pth").write_text(f"{ours}\n")
        _run([str(python), "-m", "pip", "install", "--quiet", package], package)
    versions = _run([str(python), "-c", VERSIONS.format(name)], "torchft's version").split()
    if versions != [wanted, version("torch")]:
        raise RunFailed(f"{folder} has {name} {versions[0]} and torch {versions[1]}: remove it, and it is made anew")
    return str(python)


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{what}: not within {INSTALL_S:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise RunFailed(f"{what}: {' '.join(command)} has failed\n{done.stdout}{done.stderr}")
    return done.stdout


# --- what each has left --------------------------------------------------------------------------------


def _contributed_here(run: JobRun, came: Sequence[Mapping]) -> float | None:
    """The commit of the step from which the newcomer has work."""
    events = run.events()
    steps = [event["step"] for event in events if event["event"] == "rejoined"]
    commits = [
        event["time"] for event in events if event["event"] == "committed" and steps and event["step"] >= steps[0]
    ]
    return min(commits, default=None)


def _contributed_there(run: JobRun, came: Sequence[Mapping]) -> float | None:
    """The end of the newcomer's first step in which it has taken part with more than zeros."""
    return next((line["time"] for line in came if line["event"] == "step" and line["whole"]), None)


def batch_here(run: JobRun, log: Sequence[Mapping], since: float) -> float:
    """A step that lacks a replica's contributions says so where it is committed."""
    commits = [event for event in run.events() if event["event"] == "committed" and event["time"] > since]
    return min((len(each["contributed"]) / each["replicas"] for each in commits if "contributed" in each), default=1.0)


def batch_there(run: JobRun, log: Sequence[Mapping], since: float) -> float:
    """Each step divides by those who take part in it."""
    replicas = len({line["rank"] for line in log if line["event"] == "step"})
    steps = [line for line in log if line["event"] == "step" and line["time"] > since]
    return min((line["members"] / replicas for line in steps), default=1.0)


def _lighthouse(run: JobRun, log: Sequence[Mapping]) -> int:
    return next(line["pid"] for line in log if line["event"] == "lighthouse")
