"""What the coordinator's process tells people: on the console, in the run folder, by metrics; and how they reach it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.coordinator.output import Event
from recycle_plugin.observability.console import Announcer
from recycle_plugin.observability.exporter import Exporter
from recycle_plugin.runtime.control.claims import Claims
from recycle_plugin.runtime.control.operator_access import OperatorAccess
from recycle_plugin.runtime.system import clock

LOG, LAST = "events.jsonl", 1 << 16


class Telling:
    """Tells of a job whose coordinator is at ``address``, and claims its folders.

    ``stop`` is the process that ends the job at SIGTERM, and ``told`` gets all events, as the user does.  ``began`` is
    when the job's first coordinator did, in seconds since the epoch, if that was not now; ``run_dir`` where the run
    folder is, or would be.
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

    @property
    def report_folder(self) -> Path | None:
        """The folder of which a report is to be written, None where none is."""
        return self._announcer.folder if self._announcer.wants_report else None

    def say(self, event: Event, now: float) -> None:
        """Tell of an event that happened at ``now``, in seconds since the epoch."""
        self._announcer.say(event, now, self.run_dir())
        if event.kind == "start":
            self._let_operators_in(event, now)
        self._told(event)
        self._exporter.take(event, now)

    def go_on(self, start: Event, now: float) -> None:
        """Go on where another process has told of the job's ``start``, and of what has come since."""
        folder = Path(start.details["job"]["run_dir"])
        self._announcer.go_on(start)
        if start.details["job"]["metrics"] is not None:
            for event, at in _past(folder / LOG):
                self._exporter.take(event, at)
        self._let_operators_in(start, now)

    def say_unless_said(self, event: Event, now: float) -> None:
        """Tell of an event that another process may have told of before it died."""
        folder = self._announcer.folder
        if folder is None or not any((event.kind, event.text) == (each.kind, each.text) for each in _last(folder)):
            self.say(event, now)

    def _let_operators_in(self, start: Event, now: float) -> None:
        if refused := self._access.write(Path(start.details["job"]["run_dir"])):
            self._announcer.say(Event("warning", refused), now)

    def close(self) -> None:
        """Write what waits, and let go of the job's folders."""
        if (folder := self.report_folder) is not None:
            self.say(Event("report", f"{folder / 'report.html'} is being written"), clock.now())
        self._access.remove()
        self._announcer.close()
        self._exporter.close()
        self.claims.release()


def _last(folder: Path) -> list[Event]:
    """The last events of the log in a run folder."""
    return [event for event, _ in _past(folder / LOG, LAST)]


def _past(path: Path, last: int | None = None) -> Iterator[tuple[Event, float]]:
    """The events of a log, in its ``last`` bytes or all, each with when it happened; none where that can't be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - last) if last is not None else 0)
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            said = json.loads(line)
            yield Event(said.pop("event"), said.pop("text"), said), said.pop("time")
        except (ValueError, KeyError, AttributeError):  # the last one may be cut off
            continue
