"""The history of a run from its event log: steps, throughput, lost workers; for status, report and benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from recycle_plugin.core.vocabulary.describe import UNCONFIRMED
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.observability.absences import Absence, absences
from recycle_plugin.observability.event_fields import number
from recycle_plugin.observability.event_log import EventLog

WARM_UP = 3  # steps at the start of a run that medians leave out
CLOCKS_S = 60.0  # most difference between the clocks of events and of processes
KILLED = "killed: the coordinator's process on host {host}, {pid}, is gone, and has not said why"
RECENT = 10  # steps over which "now" is the median
NO_REASON = "ended, and the log does not say why"
GO_ON = ("committed", "lost")  # events behind which a load has taken steps back
KILLS = ("kill", "stop")  # kinds of faults that lose their worker


@dataclass(frozen=True)
class Failure:
    """A lost worker, the step that the loss interrupted, and when each part of the recovery happened.

    Times are seconds since the epoch as in the events, None if that did not happen. ``pid``: None if not in the log.
    ``absence``: how long the seat had no worker. ``fault``: the injected fault, if it was the cause. ``struck_at``:
    when the fault struck, else ``seen_at``. ``seen_at``: when the coordinator knew. ``resumed_at``: the survivors had
    agreed where to go on. ``committed_at``: the step with which they went on was committed.
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
        """Seconds from the failure to the commit of the interrupted step, NaN if it was not committed."""
        return (self.committed_at or nan) - self.struck_at


class Commits(NamedTuple):
    """The commits of steps that have not been taken back, keyed by step.

    ``at``: when each was committed, in seconds since the epoch. ``took``: seconds since the commit before it; missing
    for a step after a load, after a commit that is not in the log, or after the clock was set back.
    """

    at: dict[int, float]
    took: dict[int, float]

    @classmethod
    def of(cls, events: Iterable[dict]) -> Commits:
        """Return the commits after ``events``, without steps taken back by the load of an earlier checkpoint."""
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
        """Return the median seconds of the steps ``first`` to ``last``, NaN if none is known."""
        taken = [took for step, took in self.took.items() if first <= step <= last]
        return median(taken) if taken else nan


@dataclass(frozen=True)
class RunHistory:
    """The history of one start of a job, from its ``events`` in their order."""

    events: tuple[dict, ...]

    @classmethod
    def read(cls, folder: Path, whole: bool = True) -> RunHistory:
        """Read the history of the last job started in the run folder; ``whole`` and errors as in :class:`EventLog`."""
        return cls(EventLog(folder, whole).events())

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
        """{seat: the first rank that holds it at the start}"""
        return self.of("start")[0]["seats"]

    @cached_property
    def seat_of(self) -> dict[int, str]:
        """{rank: seat}, also of the further ranks of a seat."""
        others = self.of("start")[0].get("others", {})
        return {rank: seat for seat, first in self.seats.items() for rank in (first, *others.get(seat, ()))}

    @property
    def ranks_a_seat(self) -> int:
        return len(self.seat_of) // len(self.seats)

    @property
    def began(self) -> float:
        """When all workers were present, in seconds since the epoch."""
        return self.of("start")[0]["time"]

    @property
    def hosts(self) -> dict[str, str]:
        """{seat: host}, empty in logs without hosts."""
        return self.of("start")[0].get("seat_hosts", {})

    @property
    def shape(self) -> Topology:
        """The job's shape, with the last number of micro-batches if it has changed."""
        micro_batches = next(
            (event["micro_batches"] for event in reversed(self.of("batch"))), self.job["micro_batches"]
        )
        return Topology(
            self.job["replicas"], self.job["stages"], micro_batches, tuple(map(tuple, self.job.get("ties", ())))
        )

    @cached_property
    def commits(self) -> dict[int, float]:
        """{step: when it was committed, in seconds since the epoch}, without steps taken back by a later load."""
        return self._committed.at

    @cached_property
    def took(self) -> dict[int, float]:
        """{step: the seconds that it took} for steps in ``commits``, as far as known."""
        return self._committed.took

    @cached_property
    def _committed(self) -> Commits:
        """The commits; the load of a best model after the last step takes none back."""
        trains = max((place for place, event in enumerate(self.events) if event["event"] in GO_ON), default=-1)
        return Commits.of(self.events[: trains + 1])

    @cached_property
    def _before(self) -> Commits:
        """The commits up to when the first failure's survivors went on, or all if none did."""
        lost = next((place for place, event in enumerate(self.events) if event["event"] == "lost"), 0)
        later = (place for place, event in enumerate(self.events) if event["event"] == "resume" and place > lost)
        return Commits.of(self.events[: next(later, None)]) if self.failures else self._committed

    def shares(self, name: str) -> dict[int, float]:
        """Return {step: a figure of its commit event}, if the log has it as a number."""
        return {
            event["step"]: event[name]
            for event in self.of("committed")
            if event["step"] in self.commits and number(event.get(name))
        }

    @cached_property
    def curve(self) -> dict[int, float]:
        """{committed step: its loss as last announced}"""
        return {
            event["step"]: event["loss"]
            for event in self.of("loss")
            if event["step"] in self.commits and event["loss"] is not None
        }

    @cached_property
    def pids(self) -> dict[int, int]:
        """{rank: its first process}"""
        return {event["rank"]: event["pid"] for event in reversed(self.of("worker"))}

    @cached_property
    def _absences(self) -> dict[int, Absence]:
        """The absences of seats, by the position of their event. If the ranks of a seat are given up together, it is
        gone when the first is lost.
        """
        found: dict[int, Absence] = {}
        last: dict[Seat, Absence] = {}
        for place, one in absences(self.events).items():
            before = last.get(one.seat)
            if before is None or before.rank == one.rank or (before.back_at or inf) <= one.gone_at:
                found[place] = last[one.seat] = one
        return found

    @property
    def absences(self) -> tuple[Absence, ...]:
        """Times of seats without a worker, in the order of the losses and planned leaves."""
        return tuple(self._absences.values())

    @cached_property
    def gone(self) -> dict[str, Absence]:
        """{seat whose worker was lost or has left, and was not replaced: its absence}"""
        return {str(absence.seat): absence for absence in self.absences if not absence.is_over}

    @property
    def returns(self) -> tuple[Absence, ...]:
        return tuple(absence for absence in self.absences if absence.is_over)

    @property
    def unmanned(self) -> tuple[int, ...]:
        return self.view.empty_stages()

    @property
    def view(self) -> ClusterView:
        return self.shape.full().without(*map(Seat.parse, self.gone))

    @property
    def workers(self) -> tuple[int, int]:
        """How many workers are live, and how many the job has."""
        return len(self.view.live) * self.ranks_a_seat, len(self.shape.seats) * self.ranks_a_seat

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(self._failure(place) for place in self._absences if self.events[place]["event"] == "lost")

    def _failure(self, place: int) -> Failure:
        lost = self.events[place]
        after = lambda: map(self.events.__getitem__, range(place + 1, len(self.events)))  # no copy for each failure
        fault, struck_at = self._fault(lost)
        resumed = next((event for event in after() if event["event"] == "resume"), None)
        step = resumed["committed"] + 1 if resumed else max(Commits.of(self.events[:place]).at, default=0) + 1
        return Failure(
            Seat.parse(lost["seat"]),
            self._process(lost["rank"], place),
            lost["how"],
            self._absences[place],
            fault,
            step,
            struck_at,
            max(struck_at, lost["seen_at"]),
            resumed["time"] if resumed else None,
            _first_commit(after(), step) if resumed else None,
        )

    def _process(self, rank: int, place: int) -> int | None:
        """Return the last process of ``rank`` before the event at position ``place``, or None if the log has none."""
        known = (event["pid"] for at, event in reversed(self._workers) if at < place and event["rank"] == rank)
        return next(known, None)

    @cached_property
    def _workers(self) -> list[tuple[int, dict]]:
        return [(place, event) for place, event in enumerate(self.events) if event["event"] == "worker"]

    def _fault(self, lost: dict) -> tuple[Fault | None, float]:
        """Return the injected fault that explains this loss and when it struck, or None and when the loss was seen. A
        stopped process is found by its silence: if its connection broke or its process was ending, the stop was not
        the cause.
        """
        for event in reversed(self.of("fault")):
            kind = event["fault"].partition(" ")[0]
            # seen_at leaves out the time for which the coordinator's process was stopped
            near = event["struck_at"] <= lost["time"] and lost["seen_at"] - event["struck_at"] <= CLOCKS_S
            fits = kind in KILLS and not (kind == "stop" and lost["how"] in UNCONFIRMED)
            if event["seat"] == lost["seat"] and near and fits:
                try:
                    return Fault.parse(event["fault"]), event["struck_at"]
                except ValueError:  # written by another release
                    continue
        return None, lost["seen_at"]

    @property
    def went_on(self) -> bool:
        """Whether a step was committed after the last loss, even if the commit's own line is missing in the log."""
        kinds = [event["event"] for event in self.events]
        after = kinds[max((place for place, kind in enumerate(kinds) if kind == "lost"), default=0) :]
        regrouped = "resume" in after and "committed" in after[after.index("resume") :]
        return regrouped or self.reached >= max((failure.step for failure in self.failures), default=1)

    @property
    def reached(self) -> int:
        """The last step that any event shows to be committed, even without the commit's own line."""
        ends = (event["step"] for event in self.of("finished") if number(event.get("step")))
        resumed = (event["committed"] for event in self.of("resume"))
        return max([self.last, *ends, *resumed])

    @cached_property
    def last(self) -> int:
        return max(self.commits, default=0)

    @property
    def last_before(self) -> int:
        return self.failures[0].step - 1 if self.failures else self.last

    @cached_property
    def before_s(self) -> float:
        """Median seconds of a step before the first failure, NaN if that came too soon."""
        last = self.last_before
        first = max(min(self._before.at, default=1), self.batch_from(last)[0])
        return self._before.median_s(first + (WARM_UP if last >= first + WARM_UP else 1), last)

    def median_s(self, first: int, last: int) -> float:
        """Return the median seconds of the steps ``first`` to ``last``, NaN if none is known."""
        return self._committed.median_s(first, last)

    @property
    def now_s(self) -> float:
        """Median seconds of the last steps since the last failure and the last return, NaN if there are none."""
        begins = [
            self.last - RECENT + 1,
            self.batch_from(self.last)[0],
            *(failure.step + 1 for failure in self.failures),
            *(absence.back_step + 1 for absence in self.returns),
        ]
        return self.median_s(max(begins), self.last)

    @property
    def meanwhile(self) -> tuple[float, int]:
        """Median seconds of the steps without workers that have come back since, and the last of these steps.
        Interrupted steps don't count; the median is NaN if there are no others.
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

    @cached_property
    def predicted(self) -> float | None:
        """The planner's throughput with the live workers as a share of all workers', None before they have a plan."""
        if self.unmanned:
            return 0.0
        last: dict = next((event for event in reversed(self.events) if event["event"] in ("resume", "lost")), {})
        return last.get("throughput")

    @property
    def checkpoint(self) -> str | None:
        """The path of the last checkpoint, None if there is none."""
        return next((event["path"] for event in reversed(self.of("checkpoint"))), None)

    @cached_property
    def end(self) -> dict | None:
        """The event of the job's end, or None. A coordinator that ends because a standby may lead in its place counts
        as the end if no other event does.
        """
        ends = [event for event in self.events if event["event"] in ("end", "finished")]
        last = self.coordinator.get("host")
        ends += [event | {"event": "end"} for event in self.of("deposed") if event["host"] == last]
        return ends[0] if ends else None

    @property
    def coordinator(self) -> dict[str, Any]:
        """The coordinator's ``host``, ``pid``, process to ``stop``, and these pids' ``place``; {} in older logs."""
        return self._leading.get("coordinator", {})

    @property
    def _leading(self) -> dict:
        """The event by which the present coordinator began."""
        return [self.of("start")[0], *self.of("coordinator")][-1]

    @property
    def was_killed(self) -> bool:
        """Whether the job was killed, as far as can be seen from this host. True if the log has no end, its coordinator
        ran on this boot and in this pid namespace, and that process is gone.
        """
        if self.end is not None or self.coordinator.get("place") != place():
            return False
        try:
            # else the pid has been reused; who has taken over may have been started long after the job
            return psutil.Process(self.coordinator["pid"]).create_time() > self._leading["time"] + CLOCKS_S
        except psutil.NoSuchProcess:
            return True

    def rate(self, step_s: float, step: int) -> float:
        """Return samples a second at ``step_s`` seconds a step, for steps with as many samples as ``step``."""
        return self.samples(step) / step_s if step_s else nan

    def samples(self, step: int) -> int:
        """Return the samples trained in ``step``: less than a batch if replicas were missing."""
        return trained(self.batch_from(step)[1], self._commit_of.get(step, {}))

    @cached_property
    def _commit_of(self) -> dict[int, dict]:
        return {event["step"]: event for event in self.of("committed")}

    def batch_from(self, step: int) -> tuple[int, int]:
        """Return the first step since which the batch is as large as in ``step``, and its number of samples."""
        sizes = [(0, self.job["batch"]), *((event["step"], event["batch"]) for event in self.of("batch"))]
        return next(size for size in reversed(sizes) if size[0] <= step)


def trained(batch: int, committed: Mapping[str, Any]) -> int:
    """Return the samples of a step of ``batch``; its commit event names the contributors unless all contributed."""
    return batch * len(committed["contributed"]) // committed["replicas"] if "contributed" in committed else batch


def place() -> str:
    """Return a name for this boot and pid namespace: pids are valid within it only."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _first_commit(events: Iterable[dict], step: int) -> float | None:
    """Return when ``step`` was first committed, None if a checkpoint was loaded before that."""
    for event in events:
        if event["event"] == "loaded":
            return None
        if event["event"] == "committed" and event["step"] == step:
            return event["time"]
    return None
