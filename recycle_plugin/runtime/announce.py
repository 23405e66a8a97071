"""Says what the job does: a line per event for people, the same as JSON lines in the run's folder."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from recycle_plugin.core.output import Event
from recycle_plugin.history import place

STYLES = {"lost": "bold red", "error": "bold red", "end": "bold red", "escalate": "bold red", "warning": "yellow", "late": "yellow", "fault": "magenta", "resume": "bold green", "finished": "green"}
QUIET = {"committed", "loss", "peak", "rest", "worker"}  # in the log, but no line of their own


def event_line(event: Event, now: float) -> str:
    """As the log has it, without its end."""
    return json.dumps({"time": round(now, 6), "event": event.kind, "text": event.text, **event.details}, default=str)


class Announcer:
    """Plain lines, a step each; on a terminal one live line for the steps instead, with the events above it.

    Logs once the run's folder is known: ``folder``, None before; ``wants_report``: there is to be a report in it.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.text import Text

        self._text = Text
        self._console = Console(highlight=False, soft_wrap=True)
        self._console.on_broken_pipe = self._go_on_unread
        self._live = self._console.status("waiting for workers") if self._console.is_terminal else None
        if self._live is not None:
            self._live.start()
        self._began = time.time()
        self._log: TextIO | None = None
        self.folder: Path | None = None
        self.wants_report = False
        self._early: list[str] = []
        self._losses: dict[int, float] = {}
        self._last_commit = 0.0

    def say(self, event: Event, now: float) -> None:
        """``now``: seconds since the epoch, when it happened."""
        self._record(event, now)
        if event.kind == "loss":
            self._losses[event.details["step"]] = event.details["loss"]
        elif event.kind == "committed":
            self._progress(event, now)
        elif event.kind not in QUIET:
            self._line(event.kind, event.text, now)
            if trace := event.details.get("traceback"):
                self._console.print(self._text(trace.rstrip()))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        if self._log is not None:
            self._log.close()

    def _go_on_unread(self) -> None:
        """Who has read the lines is gone, pdsh for instance: that is no reason to end a job, which rich would do."""
        with open(os.devnull, "w") as nobody:
            os.dup2(nobody.fileno(), self._console.file.fileno())

    def _record(self, event: Event, now: float) -> None:
        here = {"coordinator": {"host": socket.gethostname(), "pid": os.getpid(), "place": place()}} if event.kind == "start" else {}
        line = event_line(replace(event, details=event.details | here), now)
        self._early.append(line)
        if event.kind == "start":
            job = event.details["job"]
            self.folder, self.wants_report = Path(job["run_dir"]), job["report"]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._log = (self.folder / "events.jsonl").open("a", buffering=1)
        if self._log is not None:
            self._log.write("".join(f"{early}\n" for early in self._early))
            self._early.clear()

    def _progress(self, event: Event, now: float) -> None:
        step = event.details["step"]
        loss = self._losses.pop(step, None)
        took = f", {now - self._last_commit:.3f} s" if self._last_commit else ""
        self._last_commit = now
        shown = f"loss {loss:.6f}, " if loss is not None else ""
        text = f"{step}: {shown}{event.details['workers']} workers{took}"
        if self._live is not None:
            self._live.update(f"step {text}")
        else:
            self._line("step", text, now)

    def _line(self, kind: str, text: str, now: float) -> None:
        stamp = (f"[recycle {now - self._began:8.3f}] ", "dim")
        self._console.print(self._text.assemble(stamp, (f"{kind}: {text}", STYLES.get(kind, ""))))
