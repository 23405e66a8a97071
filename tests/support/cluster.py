"""Runs a job under the real ``deepspeed`` launcher, kills what is to be killed, and leaves nothing behind.

Workers come from a fork server (tests/support/fork_server.py); the launcher and the supervisors are
started as a user starts them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "RECYCLE_TEST_RUN"
POLL_S = 0.02


def free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    """CPU only, one thread a worker, no compiled extensions shared with anybody else."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "PATH": path} | more


def processes_with(mark: str) -> list[psutil.Process]:
    """All processes of this machine that were started with ``MARK=mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


class ForkServer:
    """A warm fork server in its own process."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "fork.sock")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", self.path],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout.readline().strip() == b"ready"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Result:
    """What a finished run left."""

    code: int
    output: str
    events: list[dict]
    records: dict[int, dict]  # of the ranks that got to the end: losses, step_s, pid
    folder: Path
    pids: dict[int, int] = field(default_factory=dict)

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def losses(self) -> list[float]:
        """All survivors' losses, which have to be the same list."""
        (losses,) = {tuple(record["losses"]) for record in self.records.values()}
        return list(losses)

    @property
    def restarted(self) -> list[int]:
        """Ranks whose process at the end is not the one that they started with."""
        return [rank for rank, record in self.records.items() if record["pid"] != self.pids[rank]]

    def parameters(self, rank: int) -> dict:
        import torch

        return torch.load(self.folder / "parameters" / f"rank{rank}.pt")


class Run:
    """One job under the launcher.  ``finish`` waits for its end; ``clean`` ends whatever is left, and is called always."""

    def __init__(self, server: ForkServer | None, folder: Path, ranks: int, script: str, arguments: list[str], plugin: bool = True, **more: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self._output = folder / "output.txt"
        variables = {MARK: self.mark} | ({"RECYCLE_FORK_SERVER": server.path} if server else {}) | more
        module = ["--module", "recycle_plugin.launch"] if plugin else []
        command = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port()), *module, script, *arguments]
        with self._output.open("w") as output:
            self.launcher = subprocess.Popen(
                command, cwd=ROOT, env=environment(**variables), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def events(self) -> list[dict]:
        path = self.folder / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def pids(self) -> dict[int, int]:
        return {event["rank"]: event["pid"] for event in self.events() if event["event"] == "worker"}

    def wait_for(self, found: Callable[[], object], what: str, timeout_s: float = 60.0) -> object:
        """Poll until ``found()`` is true and return it; fails when the run ends or the deadline passes first."""
        deadline = time.monotonic() + timeout_s
        while not (value := found()):
            ended = self.launcher.poll() is not None
            if (ended or time.monotonic() > deadline) and not found():
                raise AssertionError(f"no {what} within {timeout_s:.0f} s, launcher {'ended' if ended else 'running'}\n{self.output[-6000:]}")
            time.sleep(POLL_S)
        return value

    def finish(self, timeout_s: float = 120.0) -> Result:
        try:
            code = self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {timeout_s:.0f} s\n{self.output[-6000:]}") from None
        records = {record["rank"]: record for record in map(json.loads, (p.read_text() for p in self.folder.glob("losses/rank*.json")))}
        return Result(code, self.output, self.events(), records, self.folder, self.pids())

    def clean(self) -> list[str]:
        """Kill what is left of the run; returns the commands of processes that should not have been there any more."""
        self._kill(self.launcher.pid) if self.launcher.poll() is None else None
        left = processes_with(self.mark)
        names = [" ".join(process.cmdline())[:200] for process in left if process.is_running()]
        for process in left:
            self._kill(process.pid)
        self.launcher.wait()
        psutil.wait_procs(left, timeout=10)
        return names

    @staticmethod
    def _kill(pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
