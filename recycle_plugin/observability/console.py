"""Show the events of a job: lines on the console for people, and JSON lines in the run's folder.

A job does not end because one of them can't be written (observability/telemetry.py). If workers can't write files,
perhaps on a disk that they share, only the first failure is shown, and then when all files are written again.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.observability.run_history import place
from recycle_plugin.observability.telemetry import UNWRITTEN, WRITTEN, Droppable, LineFile, console

if TYPE_CHECKING:
    from rich.text import Text

STYLES = {
    "lost": "bold red",
    "error": "bold red",
    "deposed": "bold red",
    "end": "bold red",
    "warning": "yellow",
    "late": "yellow",
    UNWRITTEN: "yellow",
    WRITTEN: "green",
    "fault": "magenta",
    "not_restarted": "yellow",
    "slow_replica": "yellow",
    "resume": "bold green",
    "rejoined": "bold green",
    "finished": "green",
}
STEPS = {"committed", "loss", "recovery_plan"}  # the log still tells how the job went if these are missing
QUIET = {
    "catching_up",
    "committed",
    "loss",
    "memory",
    "moved",
    "peak",
    "recovery_plan",
    "stage",
    "standby",
    "worker",
}  # in the log, without a line on the console

LOUD = {
    *STYLES,
    "checkpoint",
    "coordinator",
    "log_gone",
    "metrics",
    "notice",
    "rebalance",
    "recovery",
    "report",
    "start",
    "terminate",
    "turned_down",
}
"""The kinds of events that a quiet console shows."""
QUIET_STEP_S = 60.0  # at least so long between two steps on a quiet console


def event_line(event: Event, now: float) -> str:
    """Return the event as a line of the log, without its newline; ``now``: seconds since the epoch."""
    head = {"time": round(now, 6), "event": event.kind, "text": event.text}
    return json.dumps(head | event.details | head, default=str)  # details don't replace kind, text, time


def _printable(text: str) -> str:
    """Escape surrogates in ``text``: a file's name may have them, and no stream accepts them."""
    return text.encode(errors="backslashreplace").decode()


class Announcer:
    """Output of a job's events, to the console and to a log in the run's folder.

    Steps get a line each, or on a terminal one live line below the events. Logging begins once the run's folder is
    known (``folder``, None before). ``wants_report``: the settings ask for a report in it. ``stop``: the process that
    ends the job if it gets SIGTERM. ``began``: start of the job in seconds since the epoch, default now.
    """

    def __init__(self, stop: int, began: float | None = None) -> None:
        from rich.console import Console
        from rich.text import Text

        self._stop = stop
        self._text = Text
        self._console = Console(highlight=False, soft_wrap=True)
        self._console.on_broken_pipe = self._go_on_unread  # type: ignore[method-assign]
        self._live = self._console.status("waiting for workers") if self._console.is_terminal else None
        if self._live is not None:
            self._live.start()
        self._began = time.time() if began is None else began
        self._log: LineFile | None = None
        self._printing = Droppable(console(), "lines", self._say_of)
        self._unwritten: dict[str, int | None] = {}  # {path: rank of the worker that can't write it}
        self.folder: Path | None = None
        self.wants_report = False
        self._early: list[str] = []
        self._losses: dict[int, float] = {}
        self._quiet, self._shown_step = False, -inf
        self._last_commit = 0.0

    def say(self, event: Event, now: float, run_dir: str = "") -> None:
        """Show and log an event that happened at ``now``, in seconds since the epoch. ``run_dir``: the run's folder,
        used if the job ended before a start event named it.
        """
        if self._log is None and event.kind == "end" and "killed" in event.details:
            event = Event(event.kind, f"{event.text}. Run folder: {run_dir}", event.details)
            self._open(Path(run_dir))
        self._record(event, now)
        if event.kind == "loss":
            self._losses[event.details["step"]] = event.details["loss"]
        elif event.kind == "committed":
            self._progress(event, now)
        elif event.kind in (UNWRITTEN, WRITTEN):
            self._of_a_file(event, now)
        elif event.kind not in QUIET and (not self._quiet or event.kind in LOUD):
            self._line(event.kind, event.text, now)
            if event.kind == "error" and (trace := event.details.get("traceback")):
                self._show(self._text(_printable(trace.rstrip())))
        if event.kind in ("lost", "left"):
            self._unwritten = {
                path: rank for path, rank in self._unwritten.items() if rank is None or rank != event.details["rank"]
            }

    def go_on(self, start: Event) -> None:
        """Log to the folder that the job's ``start`` event names, with its console and report settings."""
        job = start.details["job"]
        self.wants_report = job["report"]
        self._quiet = job.get("console") == "quiet"
        self._open(Path(job["run_dir"]))

    def close(self) -> None:
        """Write the remaining lines, and close the log and the live line."""
        if self._live is not None:
            self._live.stop()
        if self._log is not None:
            self._log.close()
        try:
            sys.stdout.flush()
        except OSError:  # else the process tries again at its end, and fails
            self._go_on_unread()

    def _go_on_unread(self) -> None:
        """Discard all further lines, since their reader (pdsh, for instance) is gone. By default rich would end the
        process, which is no reason to end a job.
        """
        with open(os.devnull, "w") as nobody:
            os.dup2(nobody.fileno(), self._console.file.fileno())

    def _record(self, event: Event, now: float) -> None:
        here = (
            {"coordinator": {"host": socket.gethostname(), "pid": os.getpid(), "stop": self._stop, "place": place()}}
            if event.kind in ("start", "coordinator")
            else {}
        )
        line = event_line(replace(event, details=event.details | here), now)
        self._early.append(line)
        if event.kind == "start":
            self.go_on(event)
        if self._log is not None:
            lines, self._early = self._early, []
            self._log.add("\n".join(lines), keep=event.kind not in STEPS)

    def _say_of(self, kind: str, text: str, **details: object) -> None:
        self.say(Event(kind, text, details), time.time())

    def _of_a_file(self, event: Event, now: float) -> None:
        path, failing = event.details["path"], bool(self._unwritten)
        if event.kind == UNWRITTEN:
            self._unwritten[path] = event.details.get("rank")
            if not failing:
                self._line(event.kind, event.text, now)
            return
        self._unwritten.pop(path, None)
        if failing and not self._unwritten:
            self._line(event.kind, "all is written again, without what was dropped", now)

    def _open(self, folder: Path) -> None:
        self.folder = folder
        self._log = LineFile(self.folder / "events.jsonl", self._say_of)

    def _progress(self, event: Event, now: float) -> None:
        step = event.details["step"]
        loss = self._losses.pop(step, None)
        took = f", {now - self._last_commit:.3f} s" if self._last_commit else ""
        self._last_commit = now
        shown = f"loss {loss:.6f}, " if loss is not None else ""
        text = f"{step}: {shown}{event.details['workers']} workers{took}"
        if self._live is not None:
            self._live.update(f"step {text}")
        elif not self._quiet or now - self._shown_step >= QUIET_STEP_S:
            self._shown_step = now
            self._line("step", text, now)

    def _line(self, kind: str, text: str, now: float) -> None:
        stamp, line = f"[recycle {now - self._began:8.3f}] ", _printable(f"{kind}: {text}")
        self._show(self._text.assemble((stamp, "dim"), (line, STYLES.get(kind, ""))))

    def _show(self, text: Text) -> None:
        """Print lines, or drop them if they can't be printed."""
        self._printing.attempt(lambda: self._print(text))

    def _print(self, text: Text) -> None:
        if self._console.is_terminal:
            self._console.print(text)
            return
        try:
            print(text.plain, flush=True)
        except BrokenPipeError:
            self._go_on_unread()
