"""The sides of the comparison and how their jobs start: this plugin, and two versions of torchft with two timeouts.

The plugin's side is its replicas in plain torch, like torchft's: the same loop around the same forward and backward,
one worker for each replica, no framework on either side. Sharded replicas under DeepSpeed's engine would add
DeepSpeed's own time to every figure. It trains by both of its rules for a lost replica's work: the others take it
("constant"), or it is left out ("shrink"), as with torchft.

Each version of torchft has its own environment, which takes everything but torchft from this one.
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

from recycle_plugin.lab.runs import JobRun, RunFailed, training_script

LOOPS = training_script().with_name("against_torchft")
RELEASE, NIGHTLY = "torchft==0.2.0", "torchft-nightly==2026.10.26"
INSTALL_S = 600.0  # to install torchft
VERSIONS = "from importlib.metadata import version; print(version({!r}), version('torch'))"
SHRINK = {"unit": "replica", "batch": "shrink"}


@dataclass(frozen=True)
class Side:
    """A side: the command that starts its job for a number of replicas, and the interpreter of its baseline.

    ``settings``: of the plugin. ``contributed``: from the run and the newcomer's log, returns when its first
    contribution was committed, or None. ``batch``: from the run, its log and a time, returns the least share of the
    whole batch in a step since then. ``coordinator``: returns the process that decides who is alive.
    """

    name: str
    command: Callable[[int], Sequence[str]]
    python: str
    contributed: Callable[[JobRun, Sequence[Mapping]], float | None]
    batch: Callable[[JobRun, Sequence[Mapping], float], float]
    coordinator: Callable[[JobRun, Sequence[Mapping]], int]
    settings: Mapping[str, object] | None = None
    first_step: int = 0  # the number of the first step's data in its loop


def own_sides() -> list[Side]:
    """Return the plugin's sides."""
    own = (_launched, sys.executable, _contributed_here, batch_here, lambda run, log: run.launcher.pid)
    return [Side("recycle", *own, {}, 1), Side("recycle, shrink", *own, SHRINK, 1)]


def rivals() -> list[Side]:
    """Return torchft's sides, after making their environments. Raises RunFailed."""
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
    """Return ``command``: it reads the number of replicas from its environment."""
    return command


def rival_environment(folder: Path, package: str) -> str:
    """Return the interpreter of the environment ``folder``, made if missing, with ``package``. Raises RunFailed."""
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
    """Return when the first step in which the newcomer has work was committed."""
    events = run.events()
    steps = [event["step"] for event in events if event["event"] == "rejoined"]
    commits = [
        event["time"] for event in events if event["event"] == "committed" and steps and event["step"] >= steps[0]
    ]
    return min(commits, default=None)


def _contributed_there(run: JobRun, came: Sequence[Mapping]) -> float | None:
    """Return the end of the newcomer's first step in which it contributed more than zeros."""
    return next((line["time"] for line in came if line["event"] == "step" and line["whole"]), None)


def batch_here(run: JobRun, log: Sequence[Mapping], since: float) -> float:
    """Return the least share of replicas that contributed to a step since ``since``, by the commits."""
    commits = [event for event in run.events() if event["event"] == "committed" and event["time"] > since]
    return min((len(each["contributed"]) / each["replicas"] for each in commits if "contributed" in each), default=1.0)


def batch_there(run: JobRun, log: Sequence[Mapping], since: float) -> float:
    """Return the least share of replicas in a step since ``since``; torchft divides a step by its members."""
    replicas = len({line["rank"] for line in log if line["event"] == "step"})
    steps = [line for line in log if line["event"] == "step" and line["time"] > since]
    return min((line["members"] / replicas for line in steps), default=1.0)


def _lighthouse(run: JobRun, log: Sequence[Mapping]) -> int:
    return next(line["pid"] for line in log if line["event"] == "lighthouse")
