"""The logs of a simulated job, which outlive the processes that write them. What a worker keeps is on its disk a while
later, in order; what is not there yet dies with the process. Some records are damaged and never found again. A full
disk keeps nothing until the next checkpoint is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from recycle_plugin.core.messages.from_workers import LogBroken, Logged
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.worker.step_log import CommittedStep, CountsFrom
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.scenario import MILLISECOND

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine

WRITING_US = 3 * MILLISECOND  # until a record is on the disk
FULL = "its disk is full"


class Voided(NamedTuple):
    """What was kept of steps later than ``after`` is void if it is valid from before ``valid_from``."""

    after: int
    valid_from: int


class KeptValue(NamedTuple):
    """A value that was kept."""

    datum: Datum
    value: Any
    valid_from: int


class SimulatedLog:
    """The log of the process on ``machine`` (core.worker.step_log.DiskLog). ``broken``: first steps of
    reported gaps.
    """

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine, self._cluster = machine, machine.cluster
        self._under_way: list[Any] = []
        self._full = sorted(step for step, seat in self._cluster.scenario.log_full if seat == str(machine.seat))
        self._off = 0  # the step from which nothing is kept; 0: all is kept
        self._dropped = 0  # the last step of which something was not kept
        self.broken: set[int] = set()
        self.data: dict[Datum, list[tuple[int, Any]]] = {}  # each value with the generation that it is valid from
        self.records: dict[int, CommittedStep] = {}
        self.voids: list[Voided] = []

    @property
    def worker(self) -> Any:
        return self._machine.control_view.worker

    def keep(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Keep a value, later on the disk."""
        self._cluster.exercised[ProtocolRule.MADE_AGAIN] += datum in self._cluster.unlogged
        self._write(datum.step, KeptValue(datum, value, valid_from))

    def commit(self, record: CommittedStep) -> None:
        """Keep a commit record, later on the disk."""
        self._write(record.step, record)

    def void(self, after: int, valid_from: int) -> None:
        """Void what was kept of steps later than ``after``, later on the disk."""
        self._write(after + 1, Voided(after, valid_from))

    def mark(self, step: int) -> None:
        """Record that all of ``step`` was kept."""
        self._write(step, step)

    def _write(self, step: int, entry: Any) -> None:
        if not self._off and self._full and step >= self._full[0]:
            self._off = step
            self._full.pop(0)
            self.interrupted(step, FULL)
        if self._off and step >= self._off:
            self._dropped = max(self._dropped, step)
            return
        self._under_way.append(entry)
        self._cluster.later(WRITING_US + self._cluster.scenario.log_lag_us, self._written)

    def _written(self) -> None:
        if not self._machine.alive:
            self._cluster.unlogged |= {entry.datum for entry in self._under_way if isinstance(entry, KeptValue)}
            self._under_way.clear()
        elif self._under_way:
            self._take(self._under_way.pop(0))

    def _take(self, entry: Any) -> None:
        if isinstance(entry, int):
            self._machine.send(Logged(self._machine.rank, entry))
        elif isinstance(entry, Voided):
            self.voids.append(entry)
        elif self._cluster.log_damages.random() < self._cluster.scenario.log_damaged_share:
            self._cluster.damaged.add(_name(entry))
        elif isinstance(entry, CommittedStep):
            self.records[entry.step] = entry
        else:
            self.data.setdefault(entry.datum, []).append((entry.valid_from, entry.value))

    def checkpointed(self, step: int) -> None:
        """Drop what is kept up to ``step``; a full disk has room again. Report if later steps have gaps."""
        before = len(self.data)
        self.data = {datum: values for datum, values in self.data.items() if datum.step > step}
        self.records = {each: record for each, record in self.records.items() if each > step}
        self._cluster.exercised[ProtocolRule.LET_GO] += len(self.data) < before
        self._cluster.exercised[ProtocolRule.LOGS_AGAIN] += 0 < self._off <= step
        if self._off and step >= self._off:
            self._off = 0
            if self._dropped > step:
                self.interrupted(step + 1, FULL)

    def interrupted(self, step: int, why: str) -> None:
        """Report that no stage can be replayed over ``step``."""
        self.broken.add(step)
        self._machine.send(LogBroken(self._machine.rank, step, why))

    def resume(self) -> None:
        """Keep data again, as long as the disk has room."""
        self._off = self._dropped = 0

    def refuses(self) -> str:
        """Return why data is not kept, or ""."""
        return FULL if self._off else ""

    def taken(self) -> list[str]:
        """Drop everything: the disk is gone. Return what was on it, in words."""
        data = [KeptValue(datum, value, number) for datum, values in self.data.items() for number, value in values[:1]]
        found = [*map(_name, data), *map(_name, self.records.values())]
        self.data, self.records, self.voids = {}, {}, []
        return found

    def flush(self) -> None:
        """Put everything on the disk at once."""
        for entry in self._under_way:
            self._take(entry)
        self._under_way.clear()


def _name(entry: CommittedStep | KeptValue) -> str:
    """Return the name that a replay uses for this entry if it is missing."""
    if isinstance(entry, CommittedStep):
        return f"the record of step {entry.step}"
    datum = entry.datum
    return f"the sum over tied weights of step {datum.step}" if datum.kind == "tied" else str(datum)


class SimulatedLogs:
    """All logs of a job, as a replaying worker reads them (core.worker.step_log.ReplayLogs)."""

    def __init__(self, logs: list[SimulatedLog]) -> None:
        self._logs = logs

    def record(self, step: int) -> CommittedStep | None:
        """Return the record of a committed step, from any log; None if there is none."""
        return next((log.records[step] for log in self._logs if step in log.records), None)

    def get(self, datum: Datum) -> Any:
        """Return the valid value of a datum, from any log; None if there is none."""
        records = [log.records[datum.step] for log in self._logs if datum.step in log.records]
        voids, commits = (void for log in self._logs for void in log.voids), ((r.step, r.counts_from) for r in records)
        since = CountsFrom(voids, commits).of(datum.step)
        found = (value for log in self._logs for number, value in log.data.get(datum, ()) if number >= since)
        return next(found, None) if records else None

    def damaged(self, datum: Datum) -> bool:
        """Return False: unreadable data is not there."""
        return False

    def faults(self) -> str:
        """Return "": unreadable data is not there."""
        return ""

    def close(self) -> None:
        """Do nothing: nothing was fetched."""
