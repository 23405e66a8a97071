"""What a worker writes to its log, and what is read of everybody's, so that a stage that nobody has can be replayed
(SWIFT, PPoPP'23, section 5; core/worker/replay.py).

A sender keeps each boundary tensor that it makes, an end what it draws from a plain iterator, and every worker a record
of each committed step: with regard to which norm it was applied, and what counts.  A step may have been begun with
weights that were rejected: what was made of that carries the generation from which its maker's data was valid, and the
record says from which one on it counts.  What is made twice is the same numbers, whoever makes it.
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
    """What a replay of the committed ``step`` needs beside boundary tensors: the ``norm`` with regard to which it was
    applied, None where nobody asked for it; data of it counts that was valid from generation ``counts_from`` or a later
    one.  ``valid_from``: the generation from which its writer's data is valid.
    """

    step: int
    norm: Any = None
    counts_from: int = 0
    valid_from: int = 0


class CountsFrom:
    """The generation from which data of each step has to be valid to count.

    ``voids``: after which steps data counts only from which generation on; ``commits``: committed steps, each with the
    generation from which on data of it counts.  Costs a sort of both.
    """

    def __init__(self, voids: Iterable[tuple[int, int]], commits: Iterable[tuple[int, int]] = ()) -> None:
        points = sorted([*((after + 1, valid_from) for after, valid_from in voids), *commits])
        self._steps = [step for step, _ in points]
        self._since = list(accumulate((since for _, since in points), max))

    def of(self, step: int) -> int:
        """The one for ``step``."""
        place = bisect_right(self._steps, step)
        return self._since[place - 1] if place else 0


class DiskLog(Protocol):
    """A worker's log on its disk.  Nothing that is called here waits for the disk but :meth:`flush`; where that can't
    follow, the log says so, and is whole again from the next checkpoint on.
    """

    def keep(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Keeps a value, made where data is valid from the generation ``valid_from``."""

    def commit(self, record: CommittedStep) -> None:
        """Keeps the record of a committed step."""

    def void(self, after: int, valid_from: int) -> None:
        """Takes back what was kept of the steps after ``after`` and is valid from before generation ``valid_from``."""

    def mark(self, step: int) -> None:
        """Notes that all that ``step`` needs of this worker was kept; the coordinator is told once all of it is on the
        disk.
        """

    def checkpointed(self, step: int) -> None:
        """Drops what is kept up to ``step``: a checkpoint of it is durable."""

    def interrupted(self, step: int, why: str) -> None:
        """Notes that ``step`` can't be replayed, nor any later one, before the next checkpoint is durable."""

    def resume(self) -> None:
        """Keeps again what comes, of whatever step, though some was refused before."""

    def refuses(self) -> str:
        """Why what comes is not kept, in words; empty where it is."""

    def flush(self) -> None:
        """Returns when all that was kept can be read by others, also after this process's end."""


class ReplayLogs(Protocol):
    """The logs of all workers of a job, for one that replays its stage."""

    def record(self, step: int) -> CommittedStep | None:
        """The record of a committed step; None as long as nobody has written it."""

    def get(self, datum: Datum) -> Any:
        """The value of a datum of a committed step, of an attempt that counts; None as long as nobody has written
        it.
        """

    def damaged(self, datum: Datum) -> bool:
        """Whether a datum that was asked for is there, and no copy of it can be read; or is not, where something of
        what its stage has logged is lost.
        """

    def faults(self) -> str:
        """What there is and can't be read, in words; empty where all can."""

    def close(self) -> None:
        """Lets go of what was fetched to be read."""


class StepLog(Observer):
    """What one worker logs, on ``log``.  ``boundaries``: the stages behind which what crosses is logged, until
    :meth:`committed` says which; ``weigh(value)``: its bytes, for the ``meter``.
    """

    def __init__(
        self, log: DiskLog, boundaries: Collection[int], weigh: Callable[[Any], int] = lambda value: 0
    ) -> None:
        self._log, self.boundaries, self._weigh = log, frozenset(boundaries), weigh
        self._all = False  # boundaries are logged, whatever those are
        self.meter = LogMeter()
        self._kept: dict[Datum, int] = {}  # of steps that are not committed, with the generation it is valid from
        self._discarded: list[tuple[int, int]] = []  # after which steps, and from which generation on data counts
        self._applied: dict[int, Any] = {}  # norms, by the steps with regard to which they were applied here
        self._records: dict[int, CommittedStep] = {}  # of the committed steps behind the checkpoint
        self._committed = self._checkpoint = 0

    def begin(self, step: int) -> None:
        """Begins behind ``step``, whose state this worker has."""
        self._committed = self._checkpoint = step
        self._records.clear()
        self._kept.clear()
        self._discarded.clear()
        self._applied.clear()

    @contextmanager
    def replaying(self, step: int) -> Iterator[None]:
        """A context in which what is behind ``step`` is logged once more, at all boundaries: those between stages that
        are replayed too.  The records of its steps at once: nobody else may have any.
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
        """Why what comes is not kept, in words; empty where it is."""
        return self._log.refuses()

    def kept(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Keeps a boundary tensor, what was drawn, or a sum over a tie, once."""
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
        """Notes that a step was rejected, and what was made of the steps after ``after`` counts from generation
        ``valid_from`` on.
        """
        self._discarded.append((after, valid_from))
        self._log.void(after, valid_from)

    def applied(self, step: int, norm: Any) -> None:
        """Notes with regard to which ``norm`` this worker has applied ``step``, which may yet be taken back."""
        self._applied[step] = norm
        self.meter.stepped()
        self._log.mark(step)

    def commit(self, step: int, valid_from: int, counts_from: int = 0) -> None:
        """Keeps the records of the steps up to ``step``, which is committed, that were applied here.  ``counts_from``:
        what counts of them, where this worker has replayed them and was not told of rejections.
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
        """Drops what is kept up to ``step``, whose checkpoint is durable."""
        if step > self._checkpoint:
            self._checkpoint = step
            self._records = {each: record for each, record in self._records.items() if each > step}
            self._discarded = [each for each in self._discarded if each[0] >= step] or self._discarded[-1:]
            self._log.checkpointed(step)

    def committed(self, view: ControlView, valid_from: int) -> None:
        """Keeps the records of steps that are committed now, drops what is behind a durable checkpoint, and logs the
        boundaries that are to be logged now.
        """
        self.commit(view.committed, valid_from)
        self.checkpointed(view.durable)
        self.boundaries = self.boundaries if view.logged is None else view.logged

    def ran(self, span: Span) -> None:
        """Measures what a replay would run again."""
        self.meter.ran(span)

    def broke_off(self, step: int, why: str) -> None:
        """Notes that no log leads over ``step``, before the next checkpoint."""
        self._log.interrupted(step, why)

    def loaded(self, step: int) -> None:
        """Notes that no log leads to ``step``, whose state was loaded, and begins behind it."""
        self.broke_off(step + 1, "a checkpoint was loaded while the job trained")
        self.begin(step)

    def parks(self) -> None:
        """Returns when all that was kept can be read by others."""
        self._log.flush()
