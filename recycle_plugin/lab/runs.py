"""Run a training job under the ``deepspeed`` launcher and read its results; for the demo and the benchmarks.

A run has a folder, a free port and a deadline, and leaves no process behind, however it ends::

    with TrainingRun(folder, workers=4, overrides=["topology=pp2_dp2", "steps=20"]) as run:
        run.wait_for(lambda: run.committed() >= 5, "step 5")
        run.kill(run.rank_at("0.1"))
        outcome = run.finish(timeout_s=120)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import psutil

from recycle_plugin.launch import free_port
from recycle_plugin.observability.event_log import EVENTS, read_events
from recycle_plugin.observability.run_history import RunHistory

T = TypeVar("T")
MARK = "RECYCLE_RUN"  # in the environment of every process of a run
POLL_S = 0.01
GRACE_S = 40.0  # for a launcher to end after SIGTERM: DeepSpeed's gives its workers 30 s
REPORT_S = 300.0  # for a report to be written
TAIL = 4000  # characters of a failed run's output in its error


class RunFailed(RuntimeError):
    """A run ended badly or not in time; the message ends with the last lines of its output."""


@dataclass(frozen=True)
class RunOutcome(RunHistory):
    """Results of an ended run: events, exit code, and a record of each rank that reached the end."""

    code: int
    records: dict[int, dict]  # by rank, as scripts/train_gpt.py writes them

    @property
    def losses(self) -> list[float]:
        return next(iter(self.records.values()))["losses"]

    @property
    def restarted(self) -> list[int]:
        """Ranks whose process at the end is not the one that they started with."""
        return [rank for rank, record in self.records.items() if record["pid"] != self.pids.get(rank, record["pid"])]


class JobRun:
    """A job of ``command``, started at once with the environment ``variables``; ``folder`` is its run folder. Leaving
    the ``with`` block kills its remaining processes on this host.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], variables: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self.folder = folder.resolve()
        self.mark = uuid.uuid4().hex
        self._output = self.folder / "output.txt"
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in (
            self.folder / EVENTS,
            *self.folder.glob("losses/rank*.json"),
            *self.folder.glob("trace/*.txt"),
        ):  # traces are appended to
            stale.unlink(missing_ok=True)
        with self._output.open("w") as output:
            self.launcher = subprocess.Popen(
                command,
                cwd=cwd,
                env={**variables, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean()

    # --- while it runs -----------------------------------------------------------------------------

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def events(self) -> list[dict]:
        """Return the events of all whole lines of the log so far."""
        return read_events(self.folder / EVENTS)

    def committed(self) -> int:
        return max((event["step"] for event in self.events() if event["event"] == "committed"), default=0)

    def resumes(self) -> list[dict]:
        """Return the events with which training began, and resumed after each change of the membership."""
        return [event for event in self.events() if event["event"] == "resume"]

    def rank_at(self, seat: str) -> int:
        """Return the rank that started at ``seat`` ("replica.stage")."""
        (start,) = [event for event in self.events() if event["event"] == "start"]
        return start["seats"][seat]

    def kill(self, rank: int, by: int = signal.SIGKILL) -> float:
        """Send a signal to the worker of ``rank``, and return the time just before, in seconds since the epoch."""
        pids = {event["rank"]: event["pid"] for event in self.events() if event["event"] == "worker"}
        at = time.time()
        os.kill(pids[rank], by)
        return at

    def wait_for(self, found: Callable[[], T], what: str, timeout_s: float = 120.0, poll_s: float = POLL_S) -> T:
        """Poll until ``found()`` is true, and return it. Raises RunFailed if the run or the deadline ends before."""
        deadline = time.monotonic() + timeout_s
        while not (value := found()):
            ended = self.launcher.poll() is not None
            if ended or time.monotonic() > deadline:
                if value := found():
                    break
                raise self.failed(f"{'ended without' if ended else f'did not get within {timeout_s:.0f} s to'} {what}")
            time.sleep(poll_s)
        return value

    def finish(self, timeout_s: float = 180.0) -> RunOutcome:
        """Wait for the end. Raises RunFailed after the deadline, or if the launcher's exit code is not 0."""
        try:
            code = self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end within {timeout_s:.0f} s") from None
        if code:
            raise self.failed(f"ended with exit code {code}: see below")
        records = [json.loads(path.read_text()) for path in sorted(self.folder.glob("losses/rank*.json"))]
        return RunOutcome(tuple(self.events()), code, {record["rank"]: record for record in records})

    def end(self, grace_s: float = GRACE_S) -> None:
        """Ask the launcher to end the run on all hosts, and return when it has ended, or after ``grace_s``."""
        if self.launcher.poll() is None:
            self.launcher.terminate()
            with suppress(subprocess.TimeoutExpired):  # leaving the block kills it
                self.launcher.wait(grace_s)

    def clean(self) -> None:
        """Kill the remaining processes of the run, found by their environment. Raises RunFailed if one is left after
        10 s.
        """
        if self.launcher.poll() is not None:
            await_reports(self.mark)
        deadline = time.monotonic() + 10
        while (left := processes_with(self.mark)) and time.monotonic() < deadline:
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(left, timeout=1)
        with suppress(subprocess.TimeoutExpired):
            self.launcher.wait(10)
        if left or self.launcher.poll() is None:
            pids = sorted({self.launcher.pid, *(each.pid for each in left)})
            raise self.failed(f"leaves processes that SIGKILL has not ended within 10 s: {pids}")

    def failed(self, how: str) -> RunFailed:
        """Return an error that says how this run failed, with the last lines of its output."""
        return RunFailed(f"the run in {self.folder} {how}\n{self.output[-TAIL:]}")


class TrainingRun(JobRun):
    """A run of ``script`` on ``workers`` local ranks with Hydra ``overrides``, under the ``deepspeed`` launcher.

    ``plugin`` False: without the plugin's launcher. ``checkout``: another one, whose .venv the run uses. ``variables``:
    added to the environment.
    """

    def __init__(
        self,
        folder: Path,
        workers: int,
        overrides: Sequence[str],
        plugin: bool = True,
        script: Path | None = None,
        checkout: Path | None = None,
        variables: Mapping[str, str] = {},
    ) -> None:
        module = ["--module", "recycle_plugin.launch"] if plugin else []
        command = ["deepspeed", "--num_gpus", str(workers), "--master_port", str(free_port()), *module]
        command += [str(script or training_script(checkout)), *overrides, f"run_dir={folder.resolve()}"]
        super().__init__(folder, command, environment(checkout, **variables), checkout)


@contextmanager
def terminable() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside this context, so that runs are cleaned up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def training_script(checkout: Path | None = None) -> Path:
    """Return the path of scripts/train_gpt.py in a checkout. Raises FileNotFoundError if there is none."""
    path = (checkout or Path(__file__).resolve().parents[2]) / "scripts" / "train_gpt.py"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run this from a checkout (pip install --editable)")
    return path


def environment(checkout: Path | None = None, **more: str) -> dict[str, str]:
    """Return a run's environment on CPU: one thread a worker, no warnings, ``deepspeed`` of this or that checkout."""
    commands = Path(sys.executable).parent if checkout is None else checkout / ".venv" / "bin"
    path = os.pathsep.join([str(commands), os.environ.get("PATH", "")])
    return (
        os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "PATH": path} | more
    )


def await_reports(mark: str) -> None:
    """Wait until the reports are written that jobs with ``mark`` start at their end."""
    psutil.wait_procs(processes_with(mark, of="recycle_plugin.observability.report"), timeout=REPORT_S)


def processes_with(mark: str, of: str = "") -> list[psutil.Process]:
    """Return all processes of this machine with ``mark`` in their environment; ``of``: that run this module."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(MARK) == mark
                and (not of or of in process.cmdline())
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found
