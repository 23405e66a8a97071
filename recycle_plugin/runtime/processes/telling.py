"""The output of the coordinator's process for people: console, run folder, metrics; and the file by which operators
reach it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.observability.console import Announcer
from recycle_plugin.observability.exporter import Exporter
from recycle_plugin.runtime.control.claims import Claims
from recycle_plugin.runtime.control.operator_access import OperatorAccess
from recycle_plugin.runtime.system import clock

LOG, LAST = "events.jsonl", 1 << 16
SLICE = 100  # earlier events that are counted at a time
START, WORKER = b'"event": "start"', b'"event": "worker"'  # in the lines of these events
Past = Iterator[tuple[Event, float] | None]


class Telling:
    """Reports on a job whose coordinator is at ``address``, and claims its folders. ``stop``: the process that ends the
    job at SIGTERM. ``told`` gets all events that the user gets. ``began``: when the job's first coordinator began, in
    seconds since 1970, if not now. ``run_dir()``: where the run folder is or would be.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: Secret,
        stop: int,
        told: Callable[[Event], None],
        began: float | None = None,
    ) -> None:
        self._told = told
        self._announcer = Announcer(stop, began)
        self._exporter = Exporter(lambda event: self.say(event, clock.now()))
        self._access = OperatorAccess(address, secret)
        self.claims = Claims(lambda text: self.say(Event("warning", text), clock.now()))
        self.run_dir: Callable[[], str] = lambda: ""
        self._past: Past | None = None  # earlier events that are still to be counted
        self._since: list[tuple[Event, float]] = []  # events that have come meanwhile

    @property
    def report_folder(self) -> Path | None:
        """The run folder to write a report of, None if no report is wanted."""
        return self._announcer.folder if self._announcer.wants_report else None

    def say(self, event: Event, now: float) -> None:
        """Report an event that happened at ``now``, in seconds since 1970."""
        self._announcer.say(event, now, self.run_dir())
        if event.kind == "start":
            self._let_operators_in(event, now)
        self._told(event)
        if self._past is None:
            self._exporter.take(event, now)
        else:
            self._since.append((event, now))

    def go_on(self, start: Event, now: float) -> None:
        """Go on, in the running event loop, after another process that has reported the job's ``start`` and later
        events. Metrics count those events while the job goes on, since a long log takes time.
        """
        folder = Path(start.details["job"]["run_dir"])
        self._announcer.go_on(start)
        if start.details["job"]["metrics"] is not None:
            self._past = _past(folder / LOG)
            self._count_on()
        self._let_operators_in(start, now)

    def _count_on(self) -> None:
        if self._past is None:
            return
        some = list(islice(self._past, SLICE))
        for event, at in filter(None, some):
            self._exporter.take(event, at)
        if len(some) == SLICE:
            asyncio.get_running_loop().call_soon(self._count_on)
            return
        self._past, since = None, self._since
        for event, at in since:
            self._exporter.take(event, at)

    def say_unless_said(self, event: Event, now: float) -> None:
        """Report an event unless another process has reported it before it died."""
        folder = self._announcer.folder
        if folder is None or not any((event.kind, event.text) == (each.kind, each.text) for each in _last(folder)):
            self.say(event, now)

    def _let_operators_in(self, start: Event, now: float) -> None:
        if refused := self._access.write(Path(start.details["job"]["run_dir"])):
            self._announcer.say(Event("warning", refused), now)

    def close(self) -> None:
        """Write the pending lines, and release the job's folders."""
        if (folder := self.report_folder) is not None:
            self.say(Event("report", f"{folder / 'report.html'} is being written"), clock.now())
        self._past = None
        self._access.remove()
        self._announcer.close()
        self._exporter.close()
        self.claims.release()


def _last(folder: Path) -> list[Event]:
    return [event for event, _ in filter(None, _past(folder / LOG, LAST))]


def _past(path: Path, last: int | None = None) -> Past:
    """Yield (event, time) of all of the last job that a log has now, or that its ``last`` bytes have; nothing if it
    can't be read. Yield None now and then, while that job's beginning is looked for.
    """
    try:
        log = path.open("rb")
    except OSError:
        return iter(())
    size = path.stat().st_size
    log.seek(max(0, size - last) if last is not None else 0)
    return _read(log, size - log.tell())


def _read(log: BinaryIO, left: int) -> Past:
    with log:
        end = log.tell() + left
        begin = workers = log.tell()  # of the last job; of the lines just read of workers, who report before the start
        for number, line in enumerate(_lines(log, end)):
            if START in line:
                begin = workers
            if WORKER not in line:
                workers = log.tell()
            if number % SLICE == 0:
                yield None
        log.seek(begin)
        for line in _lines(log, end):
            try:
                said = json.loads(line.decode(errors="replace"))
                yield Event(said.pop("event"), said.pop("text"), said), said.pop("time")
            except (ValueError, KeyError, AttributeError):  # the first and the last line may be cut off
                continue


def _lines(log: BinaryIO, end: int) -> Iterator[bytes]:
    while (left := end - log.tell()) > 0 and (line := log.readline(left)):
        yield line
