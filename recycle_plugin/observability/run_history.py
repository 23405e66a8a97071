"""The history of a run as its event log tells it: steps, throughput, who was lost and why.

For status, report, demo and benchmarks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

from recycle_plugin.core.messages.typed import Unreadable, read
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.describe import BROKEN
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology

T = TypeVar("T")
EVENTS = "events.jsonl"
WARM_UP = 3  # steps at the start of a run that no median counts
CLOCKS_S = 60.0  # how far apart the clocks of events and of processes may be
KILLED = "killed: the coordinator's process on host {host}, {pid}, is gone, and has not said why"
RENAMED = {
    "rest": "recovery_plan",
    "margin": "throughput_margin",
    "escalate": "throughput_floor",
    "waits": "wait_graph",
}
"""Kinds of events as logs of the last release have them, and as they are called now; read for one release."""
RECENT = 10  # steps that "now" is over


@dataclass(frozen=True)
class Failure:
    """One lost worker, the step that its loss interrupted, and when what happened.

    Times are seconds since the epoch, as the events have them, None where it did not come to that.  ``fault``: what was
    injected, if that was it.  ``struck_at``: when that struck, else as ``seen_at``; ``seen_at``: the coordinator knew;
    ``resumed_at``: the survivors had agreed where to go on; ``committed_at``: the step that they went on with was
    committed.
    """

    seat: Seat
    pid: int
    how: str
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


@dataclass(frozen=True)
class RunHistory:
    """The history of one start of a job, from its ``events`` in their order."""

    events: tuple[dict, ...]

    @classmethod
    def read(cls, folder: Path) -> RunHistory:
        """Read the history of the last job that was started in the run folder ``folder``.

        Raises ValueError, in one line, where there is none.
        """
        path = folder / EVENTS
        if not path.is_file():
            missing = "has no events.jsonl" if folder.is_dir() else "is no folder"
            raise ValueError(f"{folder} {missing}: name a run folder (recycle.run_dir; by default one under runs/)")
        events = list(read_events(path))
        starts = [number for number, event in enumerate(events) if event["event"] == "start"]
        if not starts:
            raise ValueError(f"{path} tells of no job: it has no start event")
        first = starts[-1]
        while first and events[first - 1]["event"] == "worker":  # they are there before the start
            first -= 1
        return cls(tuple(events[first:]))

    def of(self, kind: str) -> list[dict]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def job(self) -> dict[str, Any]:
        """The job's settings and shape, from its start event."""
        return self.of("start")[0]["job"]

    @property
    def seats(self) -> dict[str, int]:
        """The rank that started at each seat."""
        return self.of("start")[0]["seats"]

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

    @property
    def policy(self) -> Policy:
        """The policy that plans were made with.  Raises ValueError where the log has none that can be read."""
        return self._of_job(Policy, "policy")

    @property
    def costs(self) -> CostModel:
        """The costs that plans were made with.  Raises ValueError where the log has none that can be read."""
        return self._of_job(CostModel, "costs")

    def _of_job(self, kind: type[T], name: str) -> T:
        """Read a part of the job's settings; ValueError names what is wrong."""
        found = read(kind, self.job[name], f"job.{name}")
        if isinstance(found, Unreadable):
            raise ValueError(str(found))
        return found

    @cached_property
    def commits(self) -> dict[int, float]:
        """When each step was committed, in seconds since the epoch.

        Steps that a later load of an earlier checkpoint took back are no longer among them.
        """
        found: dict[int, float] = {}
        for event in self.events:
            if event["event"] == "committed":
                found[event["step"]] = event["time"]
            elif event["event"] == "loaded":
                found = {step: at for step, at in found.items() if step <= event["step"]}
        return found

    @cached_property
    def curve(self) -> dict[int, float]:
        """The loss of each committed step, as it was announced last."""
        return {event["step"]: event["loss"] for event in self.of("loss") if event["step"] in self.commits}

    @cached_property
    def pids(self) -> dict[int, int]:
        """The first process of each rank."""
        return {event["rank"]: event["pid"] for event in reversed(self.of("worker"))}

    @cached_property
    def gone(self) -> dict[str, str]:
        """Seats that are lost or have left before the end, and why."""
        confirmed = {event["rank"]: f"{event['how']}, says its supervisor" for event in self.of("confirmed")}
        lost = {event["seat"]: self._why(event, confirmed.get(event["rank"], "")) for event in self.of("lost")}
        early = {event["seat"]: event["why"] for event in self.of("leaving")}
        at = {rank: seat for seat, rank in self.seats.items()}
        left = {at[event["rank"]] for event in self.of("left")}
        return lost | {seat: why for seat, why in early.items() if seat in left}

    @staticmethod
    def _why(lost: dict, confirmed: str) -> str:
        """Why a worker is lost; a broken connection says less than what the supervisor has seen."""
        return "; ".join(filter(None, ("" if lost["how"] == BROKEN and confirmed else lost["how"], confirmed)))

    @property
    def unmanned(self) -> tuple[int, ...]:
        """Stages that nobody is left in."""
        return self.view.empty_stages()

    @property
    def view(self) -> ClusterView:
        """The cluster as it is at the end: who is left."""
        return self.shape.full().without(*map(Seat.parse, self.gone))

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        """All lost workers, in the order of their losses."""
        return tuple(self._failure(event) for event in self.of("lost"))

    def _failure(self, lost: dict) -> Failure:
        fault = next(
            (
                event
                for event in self.of("fault")
                if event["seat"] == lost["seat"] and event["struck_at"] <= lost["seen_at"]
            ),
            None,
        )
        resumed = next((event for event in self.of("resume") if event["time"] >= lost["time"]), None)
        before = [step for step, at in self.commits.items() if at <= lost["time"]]
        step = resumed["committed"] + 1 if resumed else max(before, default=0) + 1
        return Failure(
            Seat.parse(lost["seat"]),
            self.pids[lost["rank"]],
            lost["how"],
            Fault.parse(fault["fault"]) if fault else None,
            step,
            fault["struck_at"] if fault else lost["seen_at"],
            lost["seen_at"],
            resumed and resumed["time"],
            self.commits.get(step) if resumed else None,
        )

    @property
    def last(self) -> int:
        """The last committed step."""
        return max(self.commits, default=0)

    @property
    def last_before(self) -> int:
        """The last step that was committed before the first failure."""
        return self.failures[0].step - 1 if self.failures else self.last

    @property
    def before_s(self) -> float:
        """Median seconds of a step before the first failure; nan where that came too soon."""
        last = self.last_before
        first = max(min(self.commits, default=1), self.batch_from(last)[0])
        return step_times(self.commits, first + (WARM_UP if last >= first + WARM_UP else 1), last)

    @property
    def now_s(self) -> float:
        """Median seconds of the last steps, none of which was interrupted; nan where there are none since the last
        failure.
        """
        begins = [
            self.last - RECENT + 1,
            self.batch_from(self.last)[0],
            *(failure.step + 1 for failure in self.failures),
        ]
        return step_times(self.commits, max(begins), self.last)

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

    @property
    def end(self) -> dict | None:
        """The event that the job ended with, if it has."""
        return next((event for event in self.events if event["event"] in ("end", "finished")), None)

    @property
    def coordinator(self) -> dict[str, Any]:
        """The coordinator's process: its ``host`` and ``pid``, the process to ``stop`` it by, and the ``place`` of
        these numbers.

        Empty in logs that don't have it.
        """
        return self.of("start")[0].get("coordinator", {})

    @property
    def was_killed(self) -> bool:
        """Whether the job has no end, and its coordinator is known to be gone, since it would be on this host."""
        if self.end is not None or self.coordinator.get("place") != place():
            return False
        try:
            return (
                psutil.Process(self.coordinator["pid"]).create_time() > self.of("start")[0]["time"] + CLOCKS_S
            )  # another process has its number
        except psutil.NoSuchProcess:
            return True

    def rate(self, step_s: float, step: int) -> float:
        """Samples a second, from seconds a step, for steps as large as ``step``."""
        return self.batch_from(step)[1] / step_s if step_s else nan

    def batch_from(self, step: int) -> tuple[int, int]:
        """The first step of those as large as ``step``, and their number of samples."""
        sizes = [(0, self.job["batch"]), *((event["step"], event["batch"]) for event in self.of("batch"))]
        return next(size for size in reversed(sizes) if size[0] <= step)


def place() -> str:
    """The name of where processes have the numbers that this one sees: this boot and namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def read_events(path: Path) -> list[dict]:
    """All whole lines of an event log so far; none where there is none.  Events have today's names (:data:`RENAMED`).

    Raises ValueError for what is no event.
    """
    text = path.read_text() if path.exists() else ""
    events = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if line.endswith("\n"):
            try:
                event = json.loads(line)
                event["event"], event["time"] = RENAMED.get(event["event"], event["event"]), event["time"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path}, line {number} is no event: {line[:60].strip()}") from None
            events.append(event)
    return events


def step_times(commits: Mapping[int, float], first: int, last: int) -> float:
    """Median seconds between commits, over the steps ``first`` to ``last``; nan where there are none."""
    taken = [
        commits[step] - commits[step - 1] for step in range(first, last + 1) if step in commits and step - 1 in commits
    ]
    return median(taken) if taken else nan
