"""The logs of a simulated job, which outlive the processes that write them.

What a worker keeps is on its disk a while later, in its order; a process that dies takes with it what is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recycle_plugin.core.messages.protocol import LogBroken, Logged
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.worker.step_log import CountsFrom, StepRecord
from recycle_plugin.simulator.scenario import MILLISECOND

if TYPE_CHECKING:
    from recycle_plugin.simulator.simulated_worker import SimulatedMachine

WRITING_US = 3 * MILLISECOND  # until a record is on the disk


class SimulatedLog:
    """The log that the process on ``machine`` writes (core.worker.step_log.LogWriter)."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine, self._cluster = machine, machine.cluster
        self._under_way: list[Any] = []
        self.data: dict[Datum, list[tuple[int, Any]]] = {}  # with the generation that each is valid from
        self.records: dict[int, StepRecord] = {}
        self.voids: list[tuple[int, int]] = []

    def keep(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Keeps a value; on the disk it is later."""
        self._write((datum, valid_from, value))

    def commit(self, record: StepRecord) -> None:
        """Keeps a record; on the disk it is later."""
        self._write(record)

    def void(self, after: int, valid_from: int) -> None:
        """Takes back what was kept of the steps after ``after``; on the disk it is later."""
        self._write((after, valid_from))

    def mark(self, step: int) -> None:
        """Notes that all of ``step`` was kept."""
        self._write(step)

    def _write(self, entry: Any) -> None:
        self._under_way.append(entry)
        self._cluster.later(WRITING_US, self._written)

    def _written(self) -> None:
        if self._machine.alive and self._under_way:
            self._take(self._under_way.pop(0))

    def _take(self, entry: Any) -> None:
        if isinstance(entry, StepRecord):
            self.records[entry.step] = entry
        elif isinstance(entry, int):
            self._machine.send(Logged(self._machine.rank, entry))
        elif len(entry) == 2:
            self.voids.append(entry)
        else:
            datum, valid_from, value = entry
            self.data.setdefault(datum, []).append((valid_from, value))

    def checkpointed(self, step: int) -> None:
        """Drops what is kept up to ``step``."""
        self.data = {datum: values for datum, values in self.data.items() if datum.step > step}
        self.records = {each: record for each, record in self.records.items() if each > step}

    def interrupted(self, step: int, why: str) -> None:
        """Says that no stage can be replayed over ``step``."""
        self._machine.send(LogBroken(self._machine.rank, step, why))

    def flush(self) -> None:
        """Has all on the disk at once."""
        for entry in self._under_way:
            self._take(entry)
        self._under_way.clear()


class SimulatedLogs:
    """All logs of a job, as one that replays its stage reads them (core.worker.step_log.LogReader)."""

    def __init__(self, logs: list[SimulatedLog]) -> None:
        self._logs = logs

    def record(self, step: int) -> StepRecord | None:
        """The record of a committed step, whoever has written it."""
        return next((log.records[step] for log in self._logs if step in log.records), None)

    def get(self, datum: Datum) -> Any:
        """The value of a datum that counts, whoever has written it."""
        records = [log.records[datum.step] for log in self._logs if datum.step in log.records]
        voids, commits = (void for log in self._logs for void in log.voids), ((r.step, r.counts_from) for r in records)
        since = CountsFrom(voids, commits).of(datum.step)
        found = (value for log in self._logs for number, value in log.data.get(datum, ()) if number >= since)
        return next(found, None) if records else None

    def faults(self) -> str:
        """Nothing: what can't be read is not there."""
        return ""
