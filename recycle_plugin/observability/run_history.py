"""The history of a run as its event log tells it: steps, throughput, who was lost and why.

For status, report, demo and benchmarks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from recycle_plugin.core.vocabulary.describe import BROKEN
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.observability.absences import Absence, absences
from recycle_plugin.observability.event_fields import check, number

EVENTS = "events.jsonl"
WARM_UP = 3  # steps at the start of a run that no median counts
CLOCKS_S = 60.0  # how far apart the clocks of events and of processes may be
KILLED = "killed: the coordinator's process on host {host}, {pid}, is gone, and has not said why"
RECENT = 10  # steps that "now" is over
NO_REASON = "ended, and the log does not say why"
KILLS = ("kill", "stop")  # kinds of faults that lose their worker


@dataclass(frozen=True)
class Failure:
    """One lost worker, the step that its loss interrupted, and when what happened.

    Times are seconds since the epoch, as the events have them, None where it did not come to that.  ``pid``: None where
    the log does not have it.  ``absence``: how long the seat had nobody.  ``fault``: what was injected, if that was it.
    ``struck_at``: when that struck, else as ``seen_at``; ``seen_at``: the coordinator knew; ``resumed_at``: the
    survivors had agreed where to go on; ``committed_at``: the step that they went on with was committed.
    """

    seat: Seat
    pid: int | None
    how: str
    absence: Absence
    fault: Fault | None
    step: int
    struck_at: float
    seen_at: float
    resumed_at: float | None
    committed_at: float | None

    @property
    def stall_s(self) -> float:
        """Seconds from the failure to the commit of the interrupted step; NaN where it was not committed."""
        return (self.committed_at or nan) - self.struck_at


class Commits(NamedTuple):
    """The commits of the steps that stand, by their number.

    ``at``: when each was committed, in seconds since the epoch; ``took``: how many seconds it was from the one before.

    A step has no ``took`` where it follows a load, or one whose commit is not in the log, or a clock that was set back.
    """

    at: dict[int, float]
    took: dict[int, float]

    @classmethod
    def of(cls, events: Iterable[dict]) -> Commits:
        """Those that stand after ``events``; steps that a load of an earlier checkpoint took back do not."""
        at: dict[int, float] = {}
        took: dict[int, float] = {}
        previous: tuple[int, float] | None = None
        for event in events:
            if event["event"] == "committed":
                step, now = event["step"], event["time"]
                at[step] = now
                if previous and previous[0] == step - 1 and now > previous[1]:
                    took[step] = now - previous[1]
                previous = step, now
            elif event["event"] == "loaded":
                at, took = ({step: value for step, value in of.items() if step <= event["step"]} for of in (at, took))
                previous = None
        return cls(at, took)

    def median_s(self, first: int, last: int) -> float:
        """Median seconds of the steps ``first`` to ``last``; nan where none of them is known."""
        taken = [took for step, took in self.took.items() if first <= step <= last]
        return median(taken) if taken else nan


@dataclass(frozen=True)
class RunHistory:
    """The history of one start of a job, from its ``events`` in their order."""

    events: tuple[dict, ...]

    @classmethod
    def read(cls, folder: Path) -> RunHistory:
        """Read the history of the last job that was started in the run folder ``folder``; raises as
        :meth:`EventLog.history` does.
        """
        return EventLog(folder).history()

    @cached_property
    def _by_kind(self) -> dict[str, list[dict]]:
        found: dict[str, list[dict]] = {}
        for event in self.events:
            found.setdefault(event["event"], []).append(event)
        return found

    def of(self, kind: str) -> list[dict]:
        return self._by_kind.get(kind, [])

    @property
    def job(self) -> dict[str, Any]:
        """The job's settings and shape, from its start event."""
        return self.of("start")[0]["job"]

    @property
    def seats(self) -> dict[str, int]:
        """The rank that started at each seat."""
        return self.of("start")[0]["seats"]

    @cached_property
    def seat_of(self) -> dict[int, str]:
        """The seat of each rank, also of those that hold one with its first rank."""
        others = self.of("start")[0].get("others", {})
        return {rank: seat for seat, first in self.seats.items() for rank in (first, *others.get(seat, ()))}

    @property
    def ranks_a_seat(self) -> int:
        """How many processes hold each seat."""
        return len(self.seat_of) // len(self.seats)

    @property
    def began(self) -> float:
        """When all workers were there, in seconds since the epoch."""
        return self.of("start")[0]["time"]

    @property
    def hosts(self) -> dict[str, str]:
        """The host of each seat; empty in logs that don't have it."""
        return self.of("start")[0].get("seat_hosts", {})

    @property
    def shape(self) -> Topology:
        """The job's shape at the end, where the number of micro-batches has changed."""
        micro_batches = next(
            (event["micro_batches"] for event in reversed(self.of("batch"))), self.job["micro_batches"]
        )
        return Topology(
            self.job["replicas"], self.job["stages"], micro_batches, tuple(map(tuple, self.job.get("ties", ())))
        )

    @cached_property
    def commits(self) -> dict[int, float]:
        """When each step was committed, in seconds since the epoch.

        Steps that a later load of an earlier checkpoint took back are no longer among them.
        """
        return self._committed.at

    @cached_property
    def took(self) -> dict[int, float]:
        """How many seconds each of these steps took, where the log has that."""
        return self._committed.took

    @cached_property
    def _committed(self) -> Commits:
        return Commits.of(self.events)

    @cached_property
    def _before(self) -> Commits:
        """What was committed when the survivors of the first failure went on, or all where nobody did."""
        lost = next((place for place, event in enumerate(self.events) if event["event"] == "lost"), 0)
        later = (place for place, event in enumerate(self.events) if event["event"] == "resume" and place > lost)
        return Commits.of(self.events[: next(later, None)]) if self.failures else self._committed

    def shares(self, name: str) -> dict[int, float]:
        """A figure of each step, where the log has it as a number."""
        return {
            event["step"]: event[name]
            for event in self.of("committed")
            if event["step"] in self.commits and number(event.get(name))
        }

    @cached_property
    def curve(self) -> dict[int, float]:
        """The loss of each committed step, as it was announced last."""
        return {
            event["step"]: event["loss"]
            for event in self.of("loss")
            if event["step"] in self.commits and event["loss"] is not None
        }

    @cached_property
    def pids(self) -> dict[int, int]:
        """The first process of each rank."""
        return {event["rank"]: event["pid"] for event in reversed(self.of("worker"))}

    @cached_property
    def _absences(self) -> dict[int, Absence]:
        return absences(self.events)

    @property
    def absences(self) -> tuple[Absence, ...]:
        """When seats had nobody before the end, in the order of the losses and planned leaves."""
        return tuple(self._absences.values())

    @cached_property
    def gone(self) -> dict[str, str]:
        """Seats that are lost or have left before the end, and have nobody since, and why."""
        return {str(absence.seat): absence.why for absence in self.absences if not absence.is_over}

    @property
    def returns(self) -> tuple[Absence, ...]:
        return tuple(absence for absence in self.absences if absence.is_over)

    @property
    def unmanned(self) -> tuple[int, ...]:
        return self.view.empty_stages()

    @property
    def view(self) -> ClusterView:
        return self.shape.full().without(*map(Seat.parse, self.gone))

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(self._failure(place) for place, event in enumerate(self.events) if event["event"] == "lost")

    def _failure(self, place: int) -> Failure:
        lost, after = self.events[place], self.events[place + 1 :]
        fault, struck_at = self._fault(lost)
        resumed = next((event for event in after if event["event"] == "resume"), None)
        step = resumed["committed"] + 1 if resumed else max(Commits.of(self.events[:place]).at, default=0) + 1
        return Failure(
            Seat.parse(lost["seat"]),
            self._process(lost["rank"], place),
            lost["how"],
            self._absences[place],
            fault,
            step,
            struck_at,
            lost["seen_at"],
            resumed["time"] if resumed else None,
            _first_commit(after, step) if resumed else None,
        )

    def _process(self, rank: int, place: int) -> int | None:
        """The last process of ``rank`` before an event, as far as the log has it."""
        known = (event["pid"] for at, event in reversed(self._workers) if at < place and event["rank"] == rank)
        return next(known, None)

    @cached_property
    def _workers(self) -> list[tuple[int, dict]]:
        """The processes that the log has, each with its place there."""
        return [(place, event) for place, event in enumerate(self.events) if event["event"] == "worker"]

    def _fault(self, lost: dict) -> tuple[Fault | None, float]:
        """What was injected that explains this loss, if that was it, and when it struck; else when the loss was seen.

        A stopped process is found by its silence: where a connection broke, something else was the cause.
        """
        for event in reversed(self.of("fault")):
            kind = event["fault"].partition(" ")[0]
            near = 0 <= lost["seen_at"] - event["struck_at"] <= CLOCKS_S
            fits = kind in KILLS and not (kind == "stop" and lost["how"] == BROKEN)
            if event["seat"] == lost["seat"] and near and fits:
                try:
                    return Fault.parse(event["fault"]), event["struck_at"]
                except ValueError:  # a form of another release's
                    continue
        return None, lost["seen_at"]

    @property
    def went_on(self) -> bool:
        """Whether a step was committed after the last loss, be it that its own line is not in the log."""
        kinds = [event["event"] for event in self.events]
        after = kinds[max((place for place, kind in enumerate(kinds) if kind == "lost"), default=0) :]
        regrouped = "resume" in after and "committed" in after[after.index("resume") :]
        return regrouped or self.reached >= max((failure.step for failure in self.failures), default=1)

    @property
    def reached(self) -> int:
        """The last step that any event says was committed, its own line or not."""
        ends = (event["step"] for event in self.of("finished") if number(event.get("step")))
        resumed = (event["committed"] for event in self.of("resume"))
        return max([self.last, *ends, *resumed])

    @property
    def last(self) -> int:
        return max(self.commits, default=0)

    @property
    def last_before(self) -> int:
        return self.failures[0].step - 1 if self.failures else self.last

    @property
    def before_s(self) -> float:
        """Median seconds of a step before the first failure; nan where that came too soon."""
        last = self.last_before
        first = max(min(self._before.at, default=1), self.batch_from(last)[0])
        return self._before.median_s(first + (WARM_UP if last >= first + WARM_UP else 1), last)

    def median_s(self, first: int, last: int) -> float:
        """Median seconds of the steps ``first`` to ``last``; nan where none of them is known."""
        return self._committed.median_s(first, last)

    @property
    def now_s(self) -> float:
        """Median seconds of the last steps, none of which was interrupted; nan where there are none since the last
        failure, or since somebody came back.
        """
        begins = [
            self.last - RECENT + 1,
            self.batch_from(self.last)[0],
            *(failure.step + 1 for failure in self.failures),
            *(absence.back_step + 1 for absence in self.returns),
        ]
        return self.median_s(max(begins), self.last)

    @property
    def meanwhile(self) -> tuple[float, int]:
        """Median seconds of the steps without workers who have come back since, nan where there are none, and the last
        of them.  The interrupted ones don't count.
        """
        without: set[int] = set()
        for absence in self.returns:
            step, after = absence.back_step - 1, []
            while self.commits.get(step, 0.0) > absence.gone_at:
                after.append(step)
                step -= 1
            without.update(after[:-1])
        taken = {step: self.took[step] for step in without & self.took.keys()}
        return (median(taken.values()), max(taken)) if taken else (nan, 0)

    @property
    def predicted(self) -> float | None:
        """The planner's throughput with those that are left, where 1 is everybody's; None before they have a plan."""
        if self.unmanned:
            return 0.0
        planned = max((number for number, event in enumerate(self.events) if event["event"] == "resume"), default=-1)
        lost = max((number for number, event in enumerate(self.events) if event["event"] == "lost"), default=-1)
        return self.events[planned]["throughput"] if planned > lost else None

    @property
    def checkpoint(self) -> str | None:
        """The path of the last checkpoint, None if there is none."""
        return next((event["path"] for event in reversed(self.of("checkpoint"))), None)

    @cached_property
    def end(self) -> dict | None:
        """The event of the job's end, None before.  A coordinator that ends since the others may go on without it has
        ended the job if nobody has.
        """
        ends = [event for event in self.events if event["event"] in ("end", "finished")]
        last = self.coordinator.get("host")
        ends += [event | {"event": "end"} for event in self.of("deposed") if event["host"] == last]
        return ends[0] if ends else None

    @property
    def coordinator(self) -> dict[str, Any]:
        """The coordinator's process: its ``host`` and ``pid``, the process to ``stop`` it by, and the ``place`` of
        these numbers.

        Empty in logs that don't have it.
        """
        last = next((event for event in reversed(self.of("coordinator"))), self.of("start")[0])
        return last.get("coordinator", {})

    @property
    def was_killed(self) -> bool:
        """Whether the job was killed, as far as can be seen from here.

        The log has no end, its coordinator ran on this boot and in this pid namespace, and that process is gone.
        """
        if self.end is not None or self.coordinator.get("place") != place():
            return False
        try:
            # another process has its number
            return psutil.Process(self.coordinator["pid"]).create_time() > self.of("start")[0]["time"] + CLOCKS_S
        except psutil.NoSuchProcess:
            return True

    def rate(self, step_s: float, step: int) -> float:
        """Samples a second, from seconds a step, for steps that trained as many samples as ``step``."""
        return self.samples(step) / step_s if step_s else nan

    def samples(self, step: int) -> int:
        """The samples that ``step`` trained, which are fewer than a batch where replicas were missing."""
        return trained(self.batch_from(step)[1], self._commit_of.get(step, {}))

    @cached_property
    def _commit_of(self) -> dict[int, dict]:
        return {event["step"]: event for event in self.of("committed")}

    def batch_from(self, step: int) -> tuple[int, int]:
        """The first step of those as large as ``step``, and their number of samples."""
        sizes = [(0, self.job["batch"]), *((event["step"], event["batch"]) for event in self.of("batch"))]
        return next(size for size in reversed(sizes) if size[0] <= step)


def trained(batch: int, committed: Mapping[str, Any]) -> int:
    """The samples of a step, of ``batch``, by its commit's event, which names the replicas that have contributed if
    some have not.
    """
    return batch * len(committed["contributed"]) // committed["replicas"] if "contributed" in committed else batch


def place() -> str:
    """The name of where processes have the numbers that this one sees: this boot and namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


class EventLog:
    """The event log of the run folder ``folder``, which is read on as it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes = self._lines = 0  # read so far
        self._events: list[dict] = []  # of the last job; of all that the log has, before any has started
        self._start: dict | None = None

    def history(self) -> RunHistory:
        """The history until now of the last job that was started there.

        Raises ValueError, in one line that names the log, where there is none, and where one of the events that are
        told of lacks a field.
        """
        path = self._folder / EVENTS
        if not path.is_file():
            missing = "has no events.jsonl" if self._folder.is_dir() else "is no folder"
            raise ValueError(
                f"{self._folder} {missing}: name a run folder (recycle.run_dir; by default one under runs/)"
            )
        new = self._read(path)
        starts = [place for place, event in enumerate(self._events) if event["event"] == "start"]
        if not starts:
            raise ValueError(f"{path} tells of no job: it has no start event")
        if self._events[starts[-1]] is not self._start:
            self._start = self._events[starts[-1]]
            first = starts[-1]
            while first and self._events[first - 1]["event"] == "worker":  # they are there before the start
                first -= 1
            new = self._events = self._events[first:]
        try:
            check(new, self._start)
        except ValueError as wrong:
            raise ValueError(f"{path}: {wrong}") from None
        return RunHistory(tuple(self._events))

    def _read(self, path: Path) -> list[dict]:
        """The events that have come since the last look."""
        with path.open("rb") as file:
            file.seek(self._bytes)
            *lines, rest = file.read().split(b"\n")
            self._bytes = file.tell() - len(rest)
        new = _parsed(lines, path, self._lines)
        self._lines += len(lines)
        self._events += new
        return new


def last_event(path: Path) -> dict:
    """The last whole event of a log; an empty dict where there is none.  Raises ValueError for what is no event."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return next(iter(_parsed(lines[-1:], path, len(lines) - 1)), {})


def read_events(path: Path) -> list[dict]:
    """All whole lines of an event log so far; none where there is none.

    Raises ValueError for what is no event.
    """
    *lines, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    return _parsed(lines, path)


def _parsed(lines: list[bytes], path: Path, before: int = 0) -> list[dict]:
    """The events of the lines behind the first ``before`` of a log.  Raises ValueError for what is no event."""
    events = []
    for place, line in enumerate(lines, before + 1):
        try:
            event = json.loads(line.decode())
            _ = event["event"], event["time"]
        except (ValueError, TypeError, KeyError):
            shown = line.decode(errors="replace")[:60].strip()
            raise ValueError(f"{path}, line {place} is no event: {shown}") from None
        events.append(event)
    return events


def _first_commit(events: Iterable[dict], step: int) -> float | None:
    """When ``step`` was committed first, unless a checkpoint was loaded before that."""
    for event in events:
        if event["event"] == "loaded":
            return None
        if event["event"] == "committed" and event["step"] == step:
            return event["time"]
    return None
