"""A worker's log of the data that it sends, written to disk in the background: training never waits for the disk.

Records enter a ring without a copy; the ring holds host memory that sending needs anyway, at most ``budget`` bytes. A
thread appends the records to segments (runtime/log/segment.py). If the ring is full or the disk fails (full, quota,
broken), training goes on and the log gets a *gap*: from a step on it keeps nothing, and reports that. The gap ends at
the next durable checkpoint, when :meth:`LogWriter.checkpointed` also frees disk space. A step of which one record is
lost belongs to the gap as a whole, and has no Commit record.

Segments are removed once a checkpoint covers all of their steps, the oldest of a stream first. So a Void is never
removed before the records that it voids. A new segment repeats the Voids that still matter.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from recycle_plugin import folders
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.log.disk import Disk
from recycle_plugin.runtime.log.records import Commit, DatumRecord, Gap, Head, IndexEntry, Kept, Record, Stream, Void
from recycle_plugin.runtime.log.segment import (
    Buffer,
    Damaged,
    begun,
    called,
    ended,
    entry,
    files,
    framed,
    load,
    payload,
)

OVERHEAD = 512  # bytes that a record counts in the ring besides its payload
NICE = 10  # of the writing thread, so that training gets the processor first; 50 MB/s take a twentieth of a core
SEGMENT_BYTES = 256 << 20
SEGMENT_RECORDS = 1 << 16  # so that an index stays small
CLOSE_S = 60.0
BATCH_BYTES, BATCH_RECORDS = 1 << 20, 256  # written at once: small records then cost little more than large ones


@dataclass(frozen=True)
class Stopped:
    """The log keeps nothing from ``step`` on, and ``why``: no replay over that step is possible."""

    step: int
    why: str


@dataclass(frozen=True)
class Resumed:
    """The log is complete again from ``step`` on: replays from checkpoints of ``step - 1`` and later are possible."""

    step: int


Report = Callable[[Stopped | Resumed], None]


@dataclass(frozen=True)
class _Checkpointed:
    step: int


@dataclass
class _UpToHere:
    happen: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)


class _Close: ...


class _Waiting(NamedTuple):
    record: Record
    tensors: tuple[memoryview, ...]
    weight: int


class LogWriter:
    """The log of one worker, a ``stream`` of segments in a ``folder``.

    ``budget``: bytes that may wait for the disk. ``report`` is called when the log stops and starts again, on the
    caller's or the writer's thread. ``segment_bytes``: the size at which the next segment is begun.

    For any thread. A step's records may come in any order before its :meth:`commit`. A worker that joins later first
    calls :meth:`void` with the Void in force, since the logs of the workers that wrote it may be gone.
    """

    def __init__(
        self,
        folder: Path,
        stream: Stream,
        budget: int,
        report: Report,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk | None = None,
    ) -> None:
        self._folder, self._budget, self._report = folder, budget, report
        self._segments = _Segments(folder, stream, segment_bytes, disk or Disk())
        self._ring: deque[_Waiting | _Checkpointed | _UpToHere | _Close] = deque()
        self._writing: list[_Waiting] = []  # taken out of the ring by the thread, and not written yet
        self._weight = 0  # of both, in bytes
        self._gap: Gap | None = None
        self._refusal = ""  # the disk's last refusal, until a checkpoint
        self._refused = -1  # the last step of which a record was refused
        self._base = 0  # the step of the last durable checkpoint
        self._voids: tuple[Void, ...] = ()
        self._kept: dict[int, dict[Datum, int]] = {}  # of uncommitted steps: from which generation each datum is valid
        self._closed = False
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="recycle: log", daemon=True)
        self._thread.start()

    # --- the worker's side: nothing here waits, but for flush() and close() ------------------------

    def keep(self, record: Kept, tensors: Sequence[Buffer] = ()) -> bool:
        """Keep a record and the bytes of its tensors, which callers may not change afterwards. Returns False if the
        record is dropped. Raises ValueError if the tensors do not fit the record.
        """
        weight = OVERHEAD + sum(part.nbytes for part in record.parts)
        waiting = _Waiting(record, payload(record.parts, tensors), weight)
        with self._lock:
            taken, news = self._admit(record.step, weight)
            if taken:
                self._put(waiting)
                if isinstance(record, DatumRecord):
                    since = self._kept.setdefault(record.step, {})
                    since[record.datum] = max(record.valid_from, since.get(record.datum, 0))
        self._tell(news)
        return taken

    def void(self, after: int, valid_from: int) -> None:
        """Void the records of steps after ``after`` that are valid from a generation before ``valid_from``."""
        news = None
        with self._lock:
            made = Void(after, valid_from)
            self._voids = (*(each for each in self._voids if each.after < after), made)
            self._refused = min(self._refused, after)  # the later steps' records come again
            if self._refusal:
                news = self._lose(after + 1, after + 1, self._refusal)
            else:
                self._put(_Waiting(made, (), 0))
        self._tell(news)

    def commit(self, step: int, valid_from: int) -> bool:
        """Append the commit record of ``step``, after all of the step's records. Only data valid from generation
        ``valid_from`` or later counts. Returns False if the step was dropped.
        """
        with self._lock:
            kept = self._kept.get(step, {})
            for older in [each for each in self._kept if each <= step]:
                del self._kept[older]
            taken, news = self._admit(step, 0)
            if taken:
                count = sum(since >= valid_from for since in kept.values())
                self._put(_Waiting(Commit(step, valid_from, count), (), 0))
        self._tell(news)
        return taken

    def interrupted(self, step: int, why: str) -> None:
        """Keep nothing from ``step`` on until the next checkpoint, as if the disk were too slow."""
        with self._lock:
            news = self._lose(step, step, why)
            if news is not None and not self._refusal:
                self._put_gap()
        self._tell(news)

    def checkpointed(self, step: int) -> None:
        """Remove records up to ``step``, of which a checkpoint is durable. A log that has stopped starts again."""
        with self._lock:
            of_no_use = [each for each in self._voids if each.after <= step][:-1]
            self._voids = tuple(each for each in self._voids if each not in of_no_use)
            self._base = max(self._base, step)
            self._put(_Checkpointed(step))

    def resume(self) -> None:
        """Keep records of any step again, in a new segment: the present one may be damaged or gone. The caller repeats
        the refused records that matter.
        """
        with self._lock:
            self._gap, self._refusal = None, ""
            self._put(_Checkpointed(self._base))

    @property
    def refusal(self) -> str:
        """Why the log keeps nothing now, in words; "" if it is complete."""
        gap = self._gap
        return "" if gap is None or gap.last is not None else gap.why

    def reached(self, happen: Callable[[], None]) -> None:
        """Call ``happen``, on the writer's thread, once all records so far are in files; never if any was lost."""
        with self._lock:
            if not self._closed:
                self._put(_UpToHere(happen))

    def flush(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until all records so far are in files, except those that the disk refused. Raises WaitTimeout."""
        asked = _UpToHere(lambda: None)
        with self._lock:
            self._put(asked)
        if not asked.done.wait(timeout_s):
            raise WaitTimeout(f"waited {timeout_s:g} s for the log to be written to {self._folder}")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the records in the ring, and end the stream. Raises WaitTimeout."""
        with self._lock:
            if not self._closed:
                self._put(_Close())
            self._closed = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(f"waited {timeout_s:g} s for the end of the log in {self._folder}")

    def _admit(self, step: int, weight: int) -> tuple[bool, Stopped | None]:
        """Return whether a record of ``step`` is kept, and the report if the log stops here."""
        if self._gap is not None and self._gap.covers(step):
            self._refused = max(self._refused, step)
            return False, None
        if self._refusal:
            return False, self._lose(step, step, self._refusal)
        if weight and self._weight + weight > self._budget:
            news = self._lose(step, step, f"more than {self._budget} bytes wait for the disk")
            self._put_gap()
            return False, news
        return True, None

    def _put(self, item: _Waiting | _Checkpointed | _UpToHere | _Close) -> None:
        if self._closed:
            raise RuntimeError("the log is closed")
        self._weight += item.weight if isinstance(item, _Waiting) else 0
        self._ring.append(item)
        if len(self._ring) == 1:  # else the thread is not waiting
            self._wake.notify()

    def _put_gap(self) -> None:
        assert self._gap is not None, "it has just been opened"
        self._put(_Waiting(self._gap, (), 0))

    def _lose(self, first: int, last: int, why: str) -> Stopped | None:
        """Open a gap from step ``first`` on, or extend the open gap to it. Returns the report to make, if any."""
        before = self._gap.first if self._gap is not None and self._gap.last is None else None
        self._refused = max(self._refused, last)
        if before is not None and before <= first:
            return None
        self._gap = Gap(first, None, why)
        return Stopped(first, why)

    def _tell(self, news: Stopped | Resumed | None) -> None:
        if news is not None:
            self._report(news)

    # --- the thread's side ---------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError):  # training goes first, as far as the system lets a thread yield
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        going_on = True
        while going_on:
            item = self._next()
            try:
                going_on = self._handle(item)
            except OSError as error:
                self._fail(error)
                going_on = not isinstance(item, _Close)
            if isinstance(item, _UpToHere):
                item.done.set()

    def _next(self) -> _Checkpointed | _UpToHere | _Close | None:
        """Take the next item out of the ring: None for records, a batch of which is moved to ``_writing``."""
        with self._wake:
            while not self._ring:
                self._wake.wait()
            if not isinstance(item := self._ring[0], _Waiting):
                self._ring.popleft()
                return item
            size = 0
            while self._ring and isinstance(item := self._ring[0], _Waiting):
                size += item.weight
                if self._writing and (size > BATCH_BYTES or len(self._writing) >= BATCH_RECORDS):
                    break
                self._writing.append(item)
                self._ring.popleft()
            return None

    def _handle(self, item: _Checkpointed | _UpToHere | _Close | None) -> bool:
        """Handle an item of the ring. Return False for the last item."""
        match item:
            case None:
                while self._writing:
                    written = self._segments.append(self._writing, self._voids)
                    with self._lock:
                        self._weight -= sum(each.weight for each in self._writing[:written])
                    del self._writing[:written]
            case _Checkpointed(step):
                self._segments.let_go(step)
                self._segments.rotate()
                self._segments.let_go(step)
                self._resume()
            case _UpToHere(happen) if not self._refusal:
                happen()
            case _Close():
                self._segments.rotate()
        return not isinstance(item, _Close)

    def _resume(self) -> None:
        """Close the gap, if there is one, behind the last refused record."""
        with self._lock:
            gap, self._refusal = self._gap, ""
            if gap is None or gap.last is not None:
                return
            self._gap = replace(gap, last=max(gap.first, self._refused))
        try:
            self._segments.append([_Waiting(self._gap, (), 0)], self._voids)
        except OSError:
            with self._lock:
                self._gap = gap
            raise
        self._tell(Resumed(self._gap.step + 1))

    def _fail(self, error: OSError) -> None:
        """Stop the log after an error of the disk. The records in the ring are lost too."""
        with self._lock:
            self._refusal = folders.refusal(self._folder, error)
            lost = self._writing + [each for each in self._ring if isinstance(each, _Waiting)]
            self._ring = deque(each for each in self._ring if not isinstance(each, _Waiting))
            self._weight -= sum(each.weight for each in lost)
            steps = [each.record.step + isinstance(each.record, Void) for each in lost] + self._segments.doubted
            self._writing, self._segments.doubted = [], []
            news = self._lose(min(steps), max(steps), self._refusal) if steps else None
        self._tell(news)


# --- the files -----------------------------------------------------------------------------------------------


class _Open:
    def __init__(self, disk: Disk, path: Path, head: Head) -> None:
        self.path, self.entries = path, list[IndexEntry]()
        start, self._seed = begun(head)
        self._file = disk.create(path)
        self.size = 0
        try:
            self._append([start])
        except OSError:
            self._file.close()
            disk.remove(path)
            raise

    def append(self, batch: Sequence[_Waiting]) -> None:
        pieces: list[Buffer] = []
        entries: list[IndexEntry] = []
        offset = self.size
        for record, tensors, _ in batch:
            made = framed(record, tensors, offset, self._seed)
            entries.append(entry(record, offset, sum(map(len, made))))
            offset += entries[-1].size
            pieces += made
        self._append(pieces)
        self.entries += entries

    def seal(self) -> None:
        self._append(ended(self.entries, self.size, self._seed))

    def close(self) -> None:
        self._file.close()

    def _append(self, pieces: Sequence[Buffer]) -> None:
        try:
            self._file.append(pieces)
        except OSError:
            with suppress(OSError):  # a torn tail is detected anyway
                self._file.cut(self.size)
            raise
        self.size += sum(map(len, pieces))


class _Ended(NamedTuple):
    path: Path
    last_step: int


class _Segments:
    """The files of a stream, and of the rank's earlier processes. Writer's thread only; each method raises OSError."""

    def __init__(self, folder: Path, stream: Stream, limit: int, disk: Disk) -> None:
        self._folder, self._stream, self._limit, self._disk = folder, stream, limit, disk
        there = files(folder).get(stream.worker, {})  # perhaps another run's in this folder
        self._next = max(there, default=-1) + 1
        self._open: _Open | None = None
        self._ended: deque[_Ended] = deque()
        self._before: list[deque[_Ended]] | None = None  # of each earlier incarnation; None: not looked for yet
        self.doubted: list[int] = []  # steps of which written records may be lost

    def append(self, batch: Sequence[_Waiting], voids: Iterable[Void]) -> int:
        """Write the first records of ``batch``, if need be in a new segment after ``voids``. Returns how many."""
        if self._open is not None and not self._fitting(batch):
            self.rotate()
        repeated: list[_Waiting] = []
        if self._open is None:
            self._open = self._begin()
            repeated = [_Waiting(each, (), 0) for each in voids]
        now = batch[: self._fitting(batch) or 1]
        self._open.append([*repeated, *now])
        return len(now)

    def _fitting(self, batch: Sequence[_Waiting]) -> int:
        assert self._open is not None, "one is"
        room, count = self._limit - self._open.size, SEGMENT_RECORDS - len(self._open.entries)
        sizes = accumulate(each.weight for each in batch[:count])
        return sum(size <= room for size in sizes)

    def _begin(self) -> _Open:
        folders.make(self._folder)
        path = self._folder / called(self._stream.worker, self._next)
        made = _Open(self._disk, path, Head(self._stream, self._next))
        self._next += 1
        return made

    def rotate(self) -> None:
        """Complete the present segment, if there is one."""
        if (ending := self._open) is None:
            return
        ending.seal()
        self._ended.append(_Ended(ending.path, max((each.step for each in ending.entries), default=-1)))
        self._open = None
        try:
            ending.close()
        except OSError:  # a network file system may report only now that earlier writes have failed
            self.doubted += [each.step + (each.what == "Void") for each in ending.entries]
            raise

    def let_go(self, step: int) -> None:
        """Remove each stream's oldest segments, up to the first with a record of a step after ``step``."""
        if self._before is None:
            self._before = list(self._found())
        for stream in (self._ended, *self._before):
            while stream and stream[0].last_step <= step:
                self._disk.remove(stream[0].path)
                stream.popleft()

    def _found(self) -> Iterator[deque[_Ended]]:
        """Yield, for each earlier process of this rank, its segments of this run."""
        rank, incarnation = self._stream.worker
        there = files(self._folder)
        for earlier in range(incarnation):
            left = deque[_Ended]()
            with suppress(Damaged):
                for path in there.get(WorkerId(rank, earlier), {}).values():
                    segment = load(path)
                    if segment.stream.run_id == self._stream.run_id:
                        left.append(_Ended(path, segment.last_step))
            yield left
