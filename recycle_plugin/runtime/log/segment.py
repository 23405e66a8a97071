"""The files of a log: append-only segments, in which each damaged record is detected.

The format, all numbers big-endian::

    segment  = MAGIC (8 bytes), LAYOUT (4), record of a Head, records..., [record of an Index, end]
    record   = CRC (4), bytes of the payload (8), frame, payload
    frame    = "RP", version (4), bytes of the body (4), body          as on every line of this package
    body     = msgpack of [number of the type in LANGUAGE, its fields...]
    payload  = the tensors of the record's parts, one behind the other, raw and little-endian
    end      = END_MAGIC (8), offset of the Index's record (8), CRC (4)

The frame's version is a checksum of the record types and their fields (core/messages/encoding.py). A CRC (zlib.crc32)
covers all of its record after it, and is seeded with the CRC of the segment's Head and the record's offset. So a record
at a wrong place, or in another file, is damaged too: after a loss of power a file system may leave old blocks at a
file's end.

A segment is named ``RANK.INCARNATION-SEQUENCE.log`` from the beginning, and grows at its end. If its writer was killed
it has no Index and is read from its beginning; what follows its last whole record is a torn tail.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from struct import Struct
from typing import NamedTuple, NoReturn
from zlib import crc32

from recycle_plugin.core.messages.encoding import HEAD
from recycle_plugin.core.messages.typed import Unreadable
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.log.records import LANGUAGE, Head, Index, IndexEntry, Part, Record, Stream

MAGIC, LAYOUT = b"RCYLOG\r\n", 1
END_MAGIC = b"RCYEND\r\n"
START = Struct(">8sI")
CRC, PAYLOAD, OFFSET = Struct(">I"), Struct(">Q"), Struct(">Q")
END = Struct(">8sQI")
FRONT = CRC.size + PAYLOAD.size + HEAD.size
CHUNK = 1 << 20  # bytes read at once where only the CRC is needed
NAME = re.compile(r"(\d{1,9})\.(\d{1,9})-(\d{1,18})\.log")

Buffer = bytes | bytearray | memoryview


class LogFault(NamedTuple):
    """A fault of a log: the file, the first wrong byte, and what is wrong or was expected there."""

    file: Path
    offset: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}, byte {self.offset}: {self.what}"


class Damaged(RecycleError):
    """A record of a log is unreadable; ``fault`` tells where and why."""

    def __init__(self, fault: LogFault) -> None:
        super().__init__(str(fault))
        self.fault = fault


# --- written -------------------------------------------------------------------------------------------------


def called(worker: WorkerId, sequence: int) -> str:
    """Return the name of a segment's file."""
    return f"{worker.rank}.{worker.incarnation}-{sequence:06d}.log"


def files(folder: Path) -> dict[WorkerId, dict[int, Path]]:
    """Return the segments in a folder by the worker and the number in their names, in order."""
    found: dict[WorkerId, dict[int, Path]] = {}
    named = [(NAME.fullmatch(path.name), path) for path in folder.glob("*.log")]
    for worker, sequence, path in sorted(
        (WorkerId(int(match[1]), int(match[2])), int(match[3]), path) for match, path in named if match
    ):
        found.setdefault(worker, {})[sequence] = path
    return found


def payload(parts: Sequence[Part], tensors: Sequence[Buffer]) -> tuple[memoryview, ...]:
    """Return the tensors' bytes, not copied. Raises ValueError if ``parts`` differ, TypeError if not contiguous."""
    found = tuple(_flat(tensor) for tensor in tensors)
    if [part.nbytes for part in parts] != [each.nbytes for each in found]:
        raise ValueError(f"{[each.nbytes for each in found]} bytes are no payload of {parts}")
    return found


def _flat(tensor: Buffer) -> memoryview:
    view = memoryview(tensor)
    return view.cast("B") if view.nbytes else memoryview(b"")  # empty views can't be cast


def framed(record: object, tensors: Sequence[memoryview], offset: int, seed: int) -> list[Buffer]:
    """Return the pieces of a record at ``offset``, to be written in order. Computes a CRC, copies nothing."""
    front = PAYLOAD.pack(sum(each.nbytes for each in tensors)) + LANGUAGE.encode(record)
    crc = crc32(front, crc32(OFFSET.pack(offset), seed))
    for each in tensors:
        crc = crc32(each, crc)
    return [CRC.pack(crc) + front, *tensors]


def begun(of: Head) -> tuple[bytes, int]:
    """Return the first bytes of a segment, and the seed of the CRCs after them."""
    start = START.pack(MAGIC, LAYOUT)
    (record,) = framed(of, (), len(start), crc32(start))
    return start + bytes(record), crc32(record)


def entry(record: Record, offset: int, size: int) -> IndexEntry:
    return IndexEntry(
        type(record).__name__,
        record.step,
        getattr(record, "datum", None),
        getattr(record, "valid_from", 0),
        offset,
        size,
    )


def ended(entries: Sequence[IndexEntry], offset: int, seed: int) -> list[Buffer]:
    """Return the last bytes of a complete segment, from ``offset`` on."""
    end = END_MAGIC + OFFSET.pack(offset)
    return [*framed(Index(tuple(entries)), (), offset, seed), end + CRC.pack(crc32(end, seed))]


# --- read ----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A record that was read, with the bytes of its parts, each in its own memory."""

    record: object
    tensors: tuple[bytearray, ...]


@dataclass(frozen=True)
class Segment:
    """The readable part of a segment: its records' places, and its faults. ``sealed``: it has an index, so its writer
    has completed it. ``size``: bytes of the file.
    """

    path: Path
    head: Head
    seed: int
    entries: tuple[IndexEntry, ...]
    sealed: bool
    size: int
    faults: tuple[LogFault, ...] = ()

    @property
    def stream(self) -> Stream:
        return self.head.stream

    @property
    def last_step(self) -> int:
        """The last step that it has a record of; -1 without records."""
        return max((each.step for each in self.entries), default=-1)

    def read(self, place: IndexEntry) -> Found:
        """Return the record at a place of the index, its CRC checked. Raises Damaged."""
        (found,) = self.each([place])
        if isinstance(found, LogFault):
            raise Damaged(found)
        return found

    def each(self, places: Iterable[IndexEntry]) -> Iterator[Found | LogFault]:
        """Yield the record at each of some places of the index, or its fault."""
        try:
            with opened(self.path) as file:
                for place in places:
                    try:
                        yield self._found(file, place)
                    except Damaged as error:
                        yield error.fault
        except Damaged as error:
            yield error.fault

    def _found(self, file: BufferedReader, place: IndexEntry) -> Found:
        found = _SegmentFile(self.path, file, self.seed).record(place.offset, place.offset + place.size)
        if isinstance(found.record, Record) and entry(found.record, place.offset, found.size) == place:
            return Found(found.record, found.tensors)
        what = f"is not what the index says: {place.what} of step {place.step}"
        raise Damaged(LogFault(self.path, place.offset, what))


def load(path: Path, before: Segment | None = None) -> Segment:
    """Return the readable part of the segment at ``path``. Raises Damaged if even its head is unreadable. Reads the
    index; without one it reads the whole file, except for the entries known from ``before``.
    """
    with opened(path) as file:
        size = file.seek(0, 2)
        if before is not None and before.sealed and before.size == size:
            return before
        found, first, seed = _head(path, file, size)
        reading = _SegmentFile(path, file, seed)
        if (indexed := reading.indexed(first, size)) is not None:
            return Segment(path, found, seed, indexed, True, size)
        known = before.entries if before is not None and before.seed == seed else ()
        entries, faults = reading.scanned(known[-1].offset + known[-1].size if known else first, size)
        return Segment(path, found, seed, (*known, *entries), False, size, tuple(faults))


def head(path: Path) -> Head:
    """Return the head of the segment at ``path``. Raises Damaged."""
    with opened(path) as file:
        return _head(path, file, file.seek(0, 2))[0]


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open the file at ``path`` for reading. Raises Damaged for errors of the disk, and if it is no regular file."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Damaged(LogFault(path, 0, "is no file"))
            yield file
    except FileNotFoundError as error:
        raise Damaged(LogFault(path, 0, "is missing")) from error
    except OSError as error:
        raise Damaged(LogFault(path, 0, f"can't be read: {error.strerror}")) from error


def _at_once(path: str, flags: int) -> int:
    """Open without blocking: a pipe without a writer would block its reader forever."""
    return os.open(path, flags | os.O_NONBLOCK)


def _head(path: Path, file: BufferedReader, size: int) -> tuple[Head, int, int]:
    """Return a segment's head, the offset after it, and the seed of the CRCs."""
    file.seek(0)
    start = file.read(START.size)
    if len(start) < START.size:
        raise Damaged(LogFault(path, 0, f"truncated at byte {size}: expected a head of a segment"))
    magic, layout = START.unpack(start)
    if magic != MAGIC:
        raise Damaged(LogFault(path, 0, f"is no segment: begins with {magic!r}, expected {MAGIC!r}"))
    if layout != LAYOUT:
        raise Damaged(LogFault(path, len(MAGIC), f"is of format version {layout}, expected {LAYOUT}"))
    found = _SegmentFile(path, file, crc32(start)).record(START.size, size)
    if not isinstance(found.record, Head):
        raise Damaged(LogFault(path, START.size, f"is a {type(found.record).__name__}, expected a Head"))
    if path.name != (name := called(found.record.stream.worker, found.record.sequence)):
        raise Damaged(LogFault(path, START.size, f"is of {name} by its head, expected {path.name}"))
    file.seek(START.size)
    return found.record, START.size + found.size, crc32(file.read(found.size))


class _Read(NamedTuple):
    record: object
    tensors: tuple[bytearray, ...]
    size: int


class _SegmentFile:
    """An open segment file. ``seed``: the initial value of its CRCs."""

    def __init__(self, path: Path, file: BufferedReader, seed: int) -> None:
        self._path, self._file, self._seed = path, file, seed

    def indexed(self, first: int, size: int) -> tuple[IndexEntry, ...] | None:
        """Return the places of all records from the index; None if there is no whole index."""
        try:
            end = self._take(size - END.size, END.size, size) if size >= first + END.size else b""
            if not end or not end.startswith(END_MAGIC):
                return None
            _, offset, crc = END.unpack(end)
            if crc != crc32(end[: -CRC.size], self._seed) or not first <= offset < size:
                return None
            index = self.record(offset, size - END.size).record
        except Damaged:  # reading record by record finds where
            return None
        if not isinstance(index, Index):
            return None
        begins = [each.offset for each in index.entries] + [offset]
        follow = [first] + [each.offset + each.size for each in index.entries]
        return index.entries if begins == follow else None

    def scanned(self, first: int, size: int) -> tuple[list[IndexEntry], list[LogFault]]:
        """Return the places of the whole records from ``first`` on, and the fault after them, if any."""
        entries: list[IndexEntry] = []
        offset = first
        while offset < size:
            try:
                found = self.record(offset, size, wanted=False)
            except Damaged as error:
                return entries, [error.fault]
            if isinstance(found.record, Record):
                entries.append(entry(found.record, offset, found.size))
                offset += found.size
            elif isinstance(found.record, Index):
                what = f"the end is damaged or truncated: expected {END.size} bytes that name byte {offset}"
                return entries, [LogFault(self._path, offset + found.size, what)]
            else:
                return entries, [LogFault(self._path, offset, "is a second head, expected a record")]
        return entries, []

    def record(self, offset: int, end: int, wanted: bool = True) -> _Read:
        """Return the record at ``offset``, ending by ``end``; without ``wanted`` only check it. Raises Damaged."""
        front = self._take(offset, FRONT, end)
        size, length = self._sizes(front, offset, end)
        body = self._take(offset + FRONT, length, end)
        record = LANGUAGE.message(body)
        parts = getattr(record, "parts", ()) if wanted else ()
        whole = sum(part.nbytes for part in parts) == size
        tensors = tuple(bytearray(part.nbytes) for part in parts) if whole else ()
        crc = crc32(body, crc32(front[CRC.size :], crc32(OFFSET.pack(offset), self._seed)))
        for piece in tensors or _chunks(size):
            if self._file.readinto(piece) < len(piece):
                self._refuse(offset, "truncated while it was read")
            crc = crc32(piece, crc)
        (said,) = CRC.unpack_from(front)
        if crc != said:
            self._refuse(offset, f"is damaged: CRC {crc:08x}, expected {said:08x}")
        if isinstance(record, Unreadable):
            self._refuse(offset, f"is no record: {record}")
        if wanted and not whole:
            self._refuse(offset, f"has {size} bytes of payload, expected {sum(part.nbytes for part in parts)}")
        return _Read(record, tensors, FRONT + length + size)

    def _sizes(self, front: bytes, offset: int, end: int) -> tuple[int, int]:
        (size,) = PAYLOAD.unpack_from(front, CRC.size)
        length = LANGUAGE.size(front[-HEAD.size :])
        if isinstance(length, Unreadable):
            self._refuse(offset, f"is no record: {length}")
        if offset + FRONT + length + size > end:
            self._refuse(
                offset, f"truncated at byte {end}: expected a record up to byte {offset + FRONT + length + size}"
            )
        return size, length

    def _take(self, offset: int, size: int, end: int) -> bytes:
        if offset + size > end:
            self._refuse(
                offset, f"truncated at byte {end}: expected a record of at least {offset + size - end} bytes more"
            )
        self._file.seek(offset)
        found = self._file.read(size)
        if len(found) < size:
            self._refuse(offset, "truncated while it was read")
        return found

    def _refuse(self, offset: int, what: str) -> NoReturn:
        raise Damaged(LogFault(self._path, offset, what))


def _chunks(size: int) -> Iterator[memoryview]:
    room = memoryview(bytearray(min(size, CHUNK)))
    for begin in range(0, size, CHUNK):
        yield room[: size - begin]
