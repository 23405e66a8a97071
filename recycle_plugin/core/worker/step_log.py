"""What a worker writes to its log, and what is read of all logs, so that an empty stage can be replayed (SWIFT,
PPoPP'23, section 5; core/worker/replay.py).

A sender logs each boundary tensor that it makes, an end what it draws from a plain iterator, and every worker a record
of each committed step: its norm, and what counts. A step may have been begun with weights that were rejected. Data made
from them carries the generation from which its maker's data was valid, and the record says from which generation on
data counts. Data that is made twice has the same numbers, whoever makes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.log_meter import LogMeter
from recycle_plugin.core.worker.observer import Observer


@dataclass(frozen=True)
class CommittedStep:
    """The part of a committed ``step`` that its replay needs beside boundary tensors: the ``norm`` that it was applied
    with, None if no worker asked for it. Data of the step counts from generation ``counts_from`` on. ``valid_from``:
    the generation from which its writer's data is valid.
    """

    step: int
    norm: Any = None
    counts_from: int = 0
    valid_from: int = 0


class CountsFrom:
    """The generation from which data of each step has to be valid to count. ``voids``: (step after which, generation
    from which) data counts; ``commits``: committed steps, each with its generation. Costs a sort of both.
    """

    def __init__(self, voids: Iterable[tuple[int, int]], commits: Iterable[tuple[int, int]] = ()) -> None:
        points = sorted([*((after + 1, valid_from) for after, valid_from in voids), *commits])
        self._steps = [step for step, _ in points]
        self._since = list(accumulate((since for _, since in points), max))

    def of(self, step: int) -> int:
        """Return the generation for ``step``."""
        place = bisect_right(self._steps, step)
        return self._since[place - 1] if place else 0


class DiskLog(Protocol):
    """A worker's log; only :meth:`flush` waits for the disk. After a gap it is whole from the next checkpoint on."""

    def keep(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Write a value. ``valid_from``: the generation from which data of its maker is valid."""

    def commit(self, record: CommittedStep) -> None:
        """Write the record of a committed step."""

    def void(self, after: int, valid_from: int) -> None:
        """Take back data of steps after ``after`` that is valid from before generation ``valid_from``."""

    def mark(self, step: int) -> None:
        """Record that all that ``step`` needs of this worker was written; tell the coordinator once it is on disk."""

    def checkpointed(self, step: int) -> None:
        """Drop the log up to ``step``: a checkpoint of it is durable."""

    def interrupted(self, step: int, why: str) -> None:
        """Record that no step from ``step`` on can be replayed before the next checkpoint is durable."""

    def resume(self) -> None:
        """Accept data of all steps again, after some was refused."""

    def refuses(self) -> str:
        """Return in words why new data is not written; empty if it is."""

    def flush(self) -> None:
        """Return when all that was written can be read by others, also after this process's end."""


class ReplayLogs(Protocol):
    """The logs of all workers of a job, for one that replays its stage."""

    def record(self, step: int) -> CommittedStep | None:
        """Return the record of a committed step; None while nobody has written it."""

    def get(self, datum: Datum) -> Any:
        """Return the value of a datum of a committed step, of an attempt that counts; None while it is not written."""

    def damaged(self, datum: Datum) -> bool:
        """Return whether no copy of a datum can be read, or it is missing and part of its stage's log is lost."""

    def faults(self) -> str:
        """Return, in words, the parts that can't be read; empty if all can."""

    def close(self) -> None:
        """Drop data fetched from other hosts for reading."""


class StepLog(Observer):
    """One worker's writing to ``log``. ``boundaries``: those logged until :meth:`committed` names others;
    ``weigh(value)``: its bytes, for the ``meter``.
    """

    def __init__(
        self, log: DiskLog, boundaries: Collection[int], weigh: Callable[[Any], int] = lambda value: 0
    ) -> None:
        self._log, self.boundaries, self._weigh = log, frozenset(boundaries), weigh
        self._all = False  # log all boundaries, whatever ``boundaries`` says
        self.meter = LogMeter()
        self._kept: dict[Datum, int] = {}  # of uncommitted steps, with the generation it is valid from
        self._discarded: list[tuple[int, int]] = []  # after which steps, and from which generation on data counts
        self._applied: dict[int, Any] = {}  # norms, by the steps applied here with them
        self._records: dict[int, CommittedStep] = {}  # of the committed steps behind the checkpoint
        self._committed = self._checkpoint = 0

    def begin(self, step: int) -> None:
        """Begin to log after ``step``, whose state this worker has."""
        self._committed = self._checkpoint = step
        self._records.clear()
        self._kept.clear()
        self._discarded.clear()
        self._applied.clear()

    @contextmanager
    def replaying(self, step: int) -> Iterator[None]:
        """Return a context in which everything behind ``step`` is logged again, at all boundaries: also those between
        replayed stages. The records of its steps are written at once: nobody else may have any.
        """
        records = [each for each in self._records.values() if each.step > step]
        self.begin(step)
        self._log.resume()
        for each in records:
            self._log.commit(each)
        self._all = True
        try:
            yield
        finally:
            self._all = False

    def refuses(self) -> str:
        """Return in words why new data is not logged; empty if it is."""
        return self._log.refuses()

    def kept(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Log a boundary tensor, a drawn batch, or a sum over a tie, once."""
        if datum.step <= self._committed or self._kept.get(datum, -1) >= valid_from:
            return
        self._kept[datum], logged = valid_from, True
        if datum.kind in TRAVELS:
            down = datum.kind == "act"
            logged = self._all or (datum.stage if down else datum.stage - 1) in self.boundaries
            self.meter.crossed(down, self._weigh(value), logged)
        if logged:
            self._log.keep(datum, value, valid_from)

    def rejected(self, after: int, valid_from: int) -> None:
        """Record a rejection: data of the steps after ``after`` counts from generation ``valid_from`` on."""
        self._discarded.append((after, valid_from))
        self._log.void(after, valid_from)

    def applied(self, step: int, norm: Any) -> None:
        """Record the ``norm`` with which this worker has applied ``step``, which may yet be taken back."""
        self._applied[step] = norm
        self.meter.stepped()
        self._log.mark(step)

    def commit(self, step: int, valid_from: int, counts_from: int = 0) -> None:
        """Write the records of the steps up to ``step``, the last committed one, that were applied here.
        ``counts_from``: the generation from which their data counts, if this worker has replayed them and so knows of
        no rejections.
        """
        if step <= self._committed:
            return
        known = CountsFrom(self._discarded)
        for each in sorted(each for each in self._applied if each <= step):
            since = max(known.of(each), counts_from)
            self._records[each] = CommittedStep(each, self._applied.pop(each), since, valid_from)
            self._log.commit(self._records[each])
        self._committed = step
        self._kept = {datum: number for datum, number in self._kept.items() if datum.step > step}

    def checkpointed(self, step: int) -> None:
        """Drop the log up to ``step``, whose checkpoint is durable."""
        if step > self._checkpoint:
            self._checkpoint = step
            self._records = {each: record for each, record in self._records.items() if each > step}
            self._discarded = [each for each in self._discarded if each[0] >= step] or self._discarded[-1:]
            self._log.checkpointed(step)

    def committed(self, view: ControlView, valid_from: int) -> None:
        """Write records of new commits, drop data before a durable checkpoint, and take the boundaries to log."""
        self.commit(view.committed, valid_from)
        self.checkpointed(view.durable)
        self.boundaries = self.boundaries if view.logged is None else view.logged

    def ran(self, span: Span) -> None:
        """Measure the instructions that a replay would run again."""
        self.meter.ran(span)

    def broke_off(self, step: int, why: str) -> None:
        """Record that no log leads over ``step``, before the next checkpoint."""
        self._log.interrupted(step, why)

    def loaded(self, step: int) -> None:
        """Record that no step before ``step`` can be replayed any more, since its state was loaded; begin to log after
        it.
        """
        self.broke_off(step + 1, "a checkpoint was loaded while the job trained")
        self.begin(step)

    def parks(self) -> None:
        """Return when all that was logged can be read by others."""
        self._log.flush()
