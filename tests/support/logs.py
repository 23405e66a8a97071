"""Small logs, the records that they have, and disks that refuse."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.log.disk import Disk, GrowingFile
from recycle_plugin.runtime.log.reader import LogReader
from recycle_plugin.runtime.log.records import DatumRecord, Part, StepRecord, Stream
from recycle_plugin.runtime.log.segment import Buffer, LogFault
from recycle_plugin.runtime.log.writer import LogWriter, Resumed, Stopped

RUN = "run-1"
PATIENCE_S = 30.0


def stream(rank: int = 1, incarnation: int = 0, run: str = RUN) -> Stream:
    return Stream(run, WorkerId(rank, incarnation), Seat(0, rank))


def act(step: int, index: int = 0, stage: int = 1) -> Datum:
    return Datum("act", stage, MicroBatch(0, index), step)


def content(datum: Datum, valid_from: int = 0, size: int = 24) -> bytes:
    seed = f"{datum} {valid_from} ".encode()
    return (seed * (size // len(seed) + 1))[:size]


def record(datum: Datum, valid_from: int = 0, size: int = 24) -> DatumRecord:
    return DatumRecord(datum, (Part("", "uint8", (size,)),), valid_from)


def of_step(step: int, valid_from: int = 0, norm: float = 1.5) -> StepRecord:
    return StepRecord(step, valid_from, norm + step, "float32")


def put(writer: LogWriter, datum: Datum, valid_from: int = 0, size: int = 24) -> bool:
    return writer.keep(record(datum, valid_from, size), [content(datum, valid_from, size)])


def put_step(writer: LogWriter, step: int, valid_from: int = 0, micro_batches: int = 2, size: int = 24) -> bool:
    taken = [put(writer, act(step, index), valid_from, size) for index in range(micro_batches)]
    return all([*taken, writer.keep(of_step(step, valid_from)), writer.commit(step, valid_from)])


class WholeReader(LogReader):
    """A reader that also says which steps are complete, and reads every record."""

    @property
    def committed(self) -> tuple[int, ...]:
        """The steps of which something is logged that counts."""
        return tuple(sorted(step for step in self._commits if self._counting(step)))

    @property
    def whole(self) -> tuple[int, ...]:
        """The committed steps of which everything is readable that these streams have logged."""
        return tuple(step for step in self.committed if not self.lacks(step))

    def lacks(self, step: int) -> list[str]:
        """What keeps a committed step from being whole. Reads no tensors."""
        found = [f"{worker}: {gap}" for worker, gaps in self.gaps.items() for gap in gaps if gap.covers(step)]
        for worker, commit in self._counting(step).items():
            counted = [self._counted(step, places) for places in self._data.get(step, {}).values()]
            there = sum(any(place.segment.stream.worker == worker for place in places) for places in counted)
            if there < commit.tensors:
                found.append(f"{worker}: {there} of {commit.tensors} data")
            if not self._counted(step, self._steps.get(step, {}).get(worker, ())):
                found.append(f"{worker}: no record of the step")
        return found

    def data(self, step: int) -> tuple[Datum, ...]:
        return tuple(datum for datum in self._data.get(step, {}) if not self.missing([datum]))

    def verify(self) -> list[LogFault]:
        """All faults. Those of segments that are not sealed were found as they were opened."""
        sealed = [each for segments in self.segments.values() for each in segments if each.sealed]
        read = [found for each in sealed for found in each.each(each.entries)]
        return list(dict.fromkeys([*self.faults, *(found for found in read if isinstance(found, LogFault))]))


class News(list[Stopped | Resumed]):
    """What a writer has reported, for a thread that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._told = threading.Condition()

    def __call__(self, news: Stopped | Resumed) -> None:
        with self._told:
            self.append(news)
            self._told.notify_all()

    def wait(self, count: int) -> list[Stopped | Resumed]:
        """The first ``count`` of them, once they are there."""
        with self._told:
            assert self._told.wait_for(lambda: len(self) >= count, PATIENCE_S), f"{count} reports, so far {self}"
            return self[:count]


class RefusingDisk(Disk):
    """A disk with room for so many bytes, whose files are real ones; the last bytes that fit are written.

    ``refuses_closing``: no file can be closed; ``refuses_files``: none can be made.
    ``go``: nothing is appended before it is set.
    """

    def __init__(self, room: int = 1 << 30, number: int = errno.ENOSPC) -> None:
        self.room, self.number = room, number
        self.refuses_closing = self.refuses_files = False
        self.go = threading.Event()
        self.go.set()

    def create(self, path: Path) -> GrowingFile:
        if self.refuses_files:
            raise OSError(errno.EIO, "broken")
        return _Refusing(self, path, super().create(path))

    def remove(self, path: Path) -> None:
        self.room += path.stat().st_size
        super().remove(path)


class _Refusing:
    def __init__(self, disk: RefusingDisk, path: Path, file: GrowingFile) -> None:
        self._disk, self._path, self._file = disk, path, file

    def append(self, pieces: Sequence[Buffer]) -> None:
        assert self._disk.go.wait(PATIENCE_S), "a disk that nobody has let go"
        data = b"".join(pieces)
        fits = data[: max(0, self._disk.room)]
        self._disk.room -= len(fits)
        self._file.append([fits])
        if len(fits) < len(data):
            raise OSError(self._disk.number, "refused")

    def cut(self, size: int) -> None:
        self._disk.room += self._path.stat().st_size - size
        self._file.cut(size)

    def close(self) -> None:
        self._file.close()
        if self._disk.refuses_closing:
            raise OSError(errno.EIO, "broken")


class StuckDisk(Disk):
    """A disk that takes nothing before ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def create(self, path: Path) -> GrowingFile:
        assert self.go.wait(PATIENCE_S), "a disk that nobody has let go"
        return super().create(path)


class RecordingDisk(Disk):
    """A disk that notes what is done to its files, of which :meth:`after` makes the folder as it was at any time."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, bytes]] = []

    def create(self, path: Path) -> GrowingFile:
        self.done.append(("create", path.name, b""))
        return _Recording(self, path.name)

    def remove(self, path: Path) -> None:
        self.done.append(("remove", path.name, b""))

    @property
    def moments(self) -> list[int]:
        """The moments after each of these: one for each byte, and for each file that came or went."""
        return list(accumulate(len(data) or 1 for _, _, data in self.done))

    def after(self, moment: int, folder: Path) -> None:
        folder.mkdir()
        for what, name, data in self.done:
            part = data[:moment]
            moment -= len(data) or 1
            if what == "remove":
                (folder / name).unlink()
            else:
                with (folder / name).open("ab") as file:
                    file.write(part)
            if moment <= 0:
                return


class _Recording:
    def __init__(self, disk: RecordingDisk, name: str) -> None:
        self._disk, self._name = disk, name

    def append(self, pieces: Sequence[Buffer]) -> None:
        self._disk.done.append(("append", self._name, b"".join(pieces)))

    def cut(self, size: int) -> None:
        raise AssertionError(f"{self._name} is cut to {size} bytes, and nothing was refused")

    def close(self) -> None:
        pass


HERE, LOOK_S = "127.0.0.1", 0.01


def written(folder: Path, rank: int, steps: int, run: str = RUN, **options: int) -> LogWriter:
    writer = LogWriter(folder, stream(rank, run=run), 1 << 24, News(), **options)
    for step in range(1, steps + 1):
        assert put_step(writer, step)
    writer.flush(PATIENCE_S)
    return writer
