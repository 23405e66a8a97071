"""Runs a job under a real launcher, DeepSpeed's or the plugin's own for one host, kills what is to be killed, and
leaves nothing behind.

Workers come from a fork server (tests/support/fork_server.py), and so does the launcher's process on this host:
``deepspeed.launcher.launch``, which starts the supervisors itself, or ``recycle_plugin.launch --workers``, which has
them all in it.  A *cold* run starts the command as a user does: ``deepspeed`` looks for hosts and then starts that same
process, and the plain launcher starts a fork server of its own.
"""

from __future__ import annotations

import base64
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

from recycle_plugin.lab.runs import MARK, await_reports, environment, processes_with
from recycle_plugin.launch import free_port
from recycle_plugin.runtime.processes.spawn import Request, ask

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02
NO_FORK = "--no-fork"
DEEPSPEED = "deepspeed.launcher.launch"  # its launcher's module on a host


class ForkServer:
    """A warm fork server in its own process; ``kind`` "deepspeed", "plain" without DeepSpeed and Megatron, or
    "megatron_lm"; ``more``: environment variables.
    """

    def __init__(self, folder: Path, kind: str = "deepspeed", **more: str) -> None:
        self.path = str(folder / "fork.sock")
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.support.fork_server", self.path, kind],
            cwd=ROOT,
            env=environment(**more),
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert (said := self._process.stdout.readline().strip()) == f"ready {self.path}", said

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def forked(self) -> set[int]:
        return {process.pid for process in psutil.Process(self._process.pid).children()}

    def sockets(self) -> list[str]:
        """TCP sockets that it has kept from a job: there should be none."""
        return [
            f"socket {each.laddr} of the fork server"
            for each in psutil.Process(self._process.pid).net_connections("tcp")
        ]


def started(command: list[str], variables: dict[str, str], output: TextIO) -> subprocess.Popen:
    return subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


class WarmLauncher:
    """``python -m module arguments`` in a fork of the server.  As much of Popen as :class:`Run` needs."""

    def __init__(
        self, server: ForkServer, module: str, arguments: list[str], variables: dict[str, str], output: TextIO
    ) -> None:
        request = Request(module, tuple(arguments), variables, str(ROOT))
        self._module = module
        self._connection = ask(server.path, request, [output.fileno(), output.fileno()])
        self._lines = self._connection.makefile("r")
        self.pid = int(self._lines.readline())
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self._module, timeout)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._connection], [], [], timeout)[0]:
            self._code = int(self._lines.readline())
            self._connection.close()
        return self._code


class Tasks:
    """As srun's with --no-kill: one process for each rank, of which nobody ends the others; the largest code, 128 + the
    signal for a killed one.
    """

    def __init__(self, tasks: list[WarmLauncher | subprocess.Popen]) -> None:
        self.tasks = tasks
        self.pid = tasks[0].pid

    def poll(self) -> int | None:
        codes = [task.poll() for task in self.tasks]
        return None if None in codes else max(code if code >= 0 else 128 - code for code in codes)

    def descendants(self) -> list[psutil.Process]:
        """Forked as the tasks are, so that they do not show their environment."""
        return [
            child
            for task in self.tasks
            if task.poll() is None
            for child in psutil.Process(task.pid).children(recursive=True)
        ]

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 0)
        for task in self.tasks:
            task.wait(timeout and max(0.0, deadline - time.monotonic()))
        return self.poll()


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
        (losses,) = {tuple(record["losses"]) for record in self.records.values()}
        return list(losses)

    @property
    def restarted(self) -> list[int]:
        """Ranks whose process at the end is not the one that they started with."""
        return [rank for rank, record in self.records.items() if record["pid"] != self.pids[rank]]

    def seat_of(self, rank: int) -> str:
        (start,) = self.of("start")
        return next(seat for seat, its_rank in start["seats"].items() if its_rank == rank)

    def rank_of(self, seat: str) -> int:
        (start,) = self.of("start")
        return start["seats"][seat]

    def stage_of(self, rank: int) -> int:
        return int(self.seat_of(rank).partition(".")[2])

    def parameters(self, rank: int) -> dict:
        """Final parameters by name; megatron-core's empty extra states are left out."""
        import torch

        saved = torch.load(self.folder / "parameters" / f"rank{rank}.pt", map_location="cpu")
        return {name: value for name, value in saved.items() if torch.is_tensor(value)}


def committed_twice(events: Iterable[dict]) -> list[int]:
    """The steps whose commit comes behind that of a later step, or of the same: more than one coordinator has decided.
    A job that starts, and a load, begin anew. A coordinator that is stopped as it tells a decision, and left, may tell
    the same again when it goes on, to the microsecond of the step.
    """
    told: dict[int, dict] = {}
    found = []
    for event in events:
        if event["event"] in ("start", "loaded"):
            told.clear()
        elif event["event"] == "committed":
            step, what = event["step"], {name: value for name, value in event.items() if name != "time"}
            found += [step] * (told.get(step) != what and any(other >= step for other in told))
            told[step] = what
    return found


COMPILERS = {"gcc", "cc1", "as", "collect2", "ld", "g++", "c++", "cc1plus"}
"""DeepSpeed tries what they can do while it is imported; where its worker is killed then, they end by themselves."""


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


class Run:
    """One job under the launcher.

    ``finish`` waits for its end; ``clean`` ends whatever is left, and is called always.

    ``launcher`` "deepspeed", "plain" for the plugin's own, NO_FORK for that without a fork server, "tasks" for srun's
    way on one host, or another one's command, behind which ``-m``, the module, the script and its arguments go.
    ``cold``: everything is started as a user starts it, from the command on, workers included.  ``plugin``: the module
    under which the launcher runs the script, None for the script alone, or that is the plugin's own.  ``more``:
    environment variables.  ``one_host``: whether it is the plugin's own.
    """

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        ranks: int,
        script: str,
        arguments: list[str],
        plugin: str | None = "recycle_plugin.launch",
        cold: bool = False,
        port: int | None = None,
        launcher: str | list[str] = "deepspeed",
        **more: str,
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.port = port or free_port()
        self.one_host = launcher in ("plain", NO_FORK)
        folder.mkdir(parents=True, exist_ok=True)
        self._server, self._options = server, [NO_FORK] * (launcher == NO_FORK)
        self._output = folder / "output.txt"
        self._events: list[dict] = []
        self._events_read = 0  # bytes
        variables = environment(**{MARK: self.mark} | ({} if cold else {"RECYCLE_FORK_SERVER": server.path}) | more)
        program = [script, *arguments]
        if launcher == "deepspeed":
            start, program = self._cold if cold else self._warm, [*(["--module", plugin] if plugin else []), *program]
        elif isinstance(launcher, list):
            start, program = self._cold_other, [*launcher, "-m", plugin, *program]
        elif launcher == "tasks":
            start, program = self._cold_tasks if cold else self._tasks, [plugin, *program]
        else:
            start, program = self._cold_plain if cold else self._warm_plain, [plugin, *program]
        with self._output.open("w") as output:
            self.launcher = start(ranks, program, variables, output)

    def _cold(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> subprocess.Popen:
        return started(
            ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(self.port), *program], variables, output
        )

    def _warm(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> WarmLauncher:
        hosts = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
        arguments = [f"--world_info={hosts}", "--master_addr=127.0.0.1", f"--master_port={self.port}", *program]
        return WarmLauncher(self._server, DEEPSPEED, arguments, variables, output)

    def _cold_other(
        self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO
    ) -> subprocess.Popen:
        return started(program, variables, output)

    def _cold_plain(
        self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO
    ) -> subprocess.Popen:
        module, *script = program
        job = [*self._options, *f"--workers {ranks} --port {self.port}".split(), *script]
        return started([sys.executable, "-u", "-m", module, *job], variables, output)

    def _warm_plain(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> WarmLauncher:
        module, *script = program
        return WarmLauncher(
            self._server, module, ["--workers", str(ranks), "--port", str(self.port), *script], variables, output
        )

    def _tasks(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> Tasks:
        module, *script = program
        places = self._places(ranks, variables)
        return Tasks([WarmLauncher(self._server, module, script, place, output) for place in places])

    def _cold_tasks(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> Tasks:
        command = [sys.executable, "-u", "-m", *program]
        return Tasks([started(command, place, output) for place in self._places(ranks, variables)])

    def _places(self, ranks: int, variables: dict[str, str]) -> list[dict[str, str]]:
        sizes = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        return [variables | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]

    @property
    def output(self) -> str:
        return self._output.read_text()

    def events(self) -> list[dict]:
        """Of which what was read before is not read again: a long job has many."""
        path = self.folder / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._events_read)
                lines = [line for line in file if line.endswith(b"\n")]
            self._events += map(json.loads, lines)
            self._events_read += sum(map(len, lines))
        return list(self._events)

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events() if event["event"] == kind]

    def hear(self, kind: str, count: int = 1) -> list[dict]:
        return self.wait_for(lambda: len(said := self.of(kind)) >= count and said, f"event {kind} ({count})")

    def pid_of(self, seat: str) -> int:
        (start,) = self.of("start")
        return self.pids()[start["seats"][seat]]

    def pids(self) -> dict[int, int]:
        return {event["rank"]: event["pid"] for event in self.events() if event["event"] == "worker"}

    def forked(self) -> set[int]:
        return self._server.forked() - {self.launcher.pid}

    def guards(self) -> list[int]:
        """The processes that outlive workers: the launcher's, and where it is DeepSpeed's those that it has started."""
        launcher = psutil.Process(self.launcher.pid)
        return [launcher.pid, *(child.pid for child in launcher.children(recursive=True))]

    def coordinator_pid(self) -> int:
        (pid,) = (
            pid
            for pid in self.guards()
            if self.port in {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if not each.raddr}
        )
        return pid

    def wait_for(self, found: Callable[[], object], what: str, timeout_s: float = 150.0) -> object:
        """Poll until ``found()`` is true and return it; fails when the run ends or the deadline passes first."""
        deadline = time.monotonic() + timeout_s
        while not (value := found()):
            ended = self.launcher.poll() is not None
            if (ended or time.monotonic() > deadline) and not found():
                raise AssertionError(
                    f"no {what} within {timeout_s:.0f} s, launcher "
                    f"{'ended' if ended else 'running'}\n{self.output[-6000:]}"
                )
            time.sleep(POLL_S)
        return value

    def finish(self, timeout_s: float = 200.0) -> Result:
        try:
            code = self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {timeout_s:.0f} s\n{self.output[-6000:]}") from None
        records = {
            record["rank"]: record
            for record in map(json.loads, (p.read_text() for p in self.folder.glob("losses/rank*.json")))
        }
        assert not (twice := committed_twice(self.events())), (
            f"steps {twice} are committed twice\n{self.output[-6000:]}"
        )
        return Result(code, self.output, self.events(), records, self.folder, self.pids())

    def ended_well(self) -> Result:
        result = self.finish()
        assert result.code == 0, result.output[-8000:]
        return result

    def clean(self) -> list[str]:
        """Kill what is left of the run; returns what should not have been there any more: processes, sockets, shared
        memory.
        """
        if self.launcher.poll() is not None:
            await_reports(self.mark)
        left = processes_with(self.mark) + (self.launcher.descendants() if isinstance(self.launcher, Tasks) else [])
        psutil.wait_procs([process for process in left if _name(process) in COMPILERS], timeout=10)
        found = [
            f"process {process.name()}: {' '.join(process.cmdline())[:200]}" for process in left if process.is_running()
        ]
        for pid in [process.pid for process in left] + [
            each.pid for each in getattr(self.launcher, "tasks", [self.launcher]) if each.poll() is None
        ]:
            self._kill(pid)
        self.launcher.wait(10)
        psutil.wait_procs(left, timeout=10)
        return found + self._server.sockets() + self._listening() + self._shared_memory()

    def _listening(self) -> list[str]:
        with socket.socket() as probe:
            return (
                [] if probe.connect_ex(("127.0.0.1", self.port)) else [f"somebody listens on master port {self.port}"]
            )

    def _shared_memory(self) -> list[str]:
        """Files named after one of the run's processes, as torch's are."""
        pids = set(map(str, self.pids().values()))
        return [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if pids & set(re.findall(r"\d+", name))]

    @staticmethod
    def _kill(pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
