"""Writing what people read and no training depends on: logs, traces, the lines on the console.

A line that can't be written, on a full disk for instance, is dropped. That is reported once, and writing is tried again
now and then; success after a failure is reported too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from recycle_plugin.folders import refusal

RETRY_S = 1.0  # between two attempts: a full disk may be slow to report
KEPT = 10_000  # most lines that wait for room
BLOCK = 1 << 16  # bytes of a file that are looked through at a time
UNWRITTEN, WRITTEN = "unwritten", "written"  # kinds of events

Say = Callable[..., None]
"""Called with the kind of an event, its text, and the keyword ``path``."""


class Droppable:
    """Output to ``path``, of which a ``unit`` may be dropped. ``say`` reports failures to the user."""

    def __init__(self, path: Path | str, unit: str, say: Say) -> None:
        self.path = path
        self._unit, self._say = unit, say
        self._failing = False
        self._again = 0.0  # time of the next attempt, by the monotonic clock

    def attempt(self, write: Callable[[], None], errors: type[Exception] = OSError) -> bool:
        """Try to ``write``, and return whether that succeeded; after a failure the data is dropped."""
        if self._failing and time.monotonic() < self._again:
            return False
        try:
            write()
        except errors as error:
            self._fail(error)
            return False
        self._succeed()
        return True

    def at_once(self) -> None:
        """Allow the next attempt without a pause."""
        self._again = 0.0

    def _fail(self, error: Exception) -> None:
        first, self._failing = not self._failing, True
        self._again = time.monotonic() + RETRY_S
        if first:
            text = f"{refusal(self.path, error)}: {self._unit} are dropped until that is possible"
            self._say(UNWRITTEN, text, path=str(self.path))

    def _succeed(self) -> None:
        if self._failing:
            self._failing = False
            text = f"{self.path} is written again, without the {self._unit} that were dropped"
            self._say(WRITTEN, text, path=str(self.path))


def console() -> Path:
    """Return the file, or whatever else, that this process's standard output is."""
    return Path(os.path.realpath("/proc/self/fd/1"))


class LineFile:
    """A file to which lines are appended, each whole or not at all; it is opened with the first line."""

    def __init__(self, path: Path, say: Say) -> None:
        self.path = path
        self._target = Droppable(path, "lines", say)
        self._file: BinaryIO | None = None
        self._kept: deque[str] = deque(maxlen=KEPT)

    def add(self, line: str, keep: bool = False) -> None:
        """Append a line. ``keep``: it waits until there is room, as one of at most 10,000, instead of being dropped."""
        if keep:
            self._kept.append(line)
        self._target.attempt(lambda: self._append([] if keep else [line]))

    def close(self) -> None:
        """Try once more to write the waiting lines, and close the file."""
        if self._kept:
            self._target.at_once()
            self.add(self._kept.pop(), keep=True)
        self._let_go()

    def _append(self, lines: list[str]) -> None:
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = appending(self.path)
            _write(self._file, "".join(f"{line}\n" for line in (*self._kept, *lines)).encode())
            self._kept.clear()
        except OSError:
            self._let_go()  # opened anew next time: by then it may be another file
            raise

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:  # for instance a quota that is reported late
                pass


def appending(path: Path) -> BinaryIO:
    """Open a file to append lines to. An incomplete last line is cut off, since the next line would become a part of
    it: its writer has died, or could not take it back. Raises OSError.
    """
    file = path.open("a+b", buffering=0)
    try:
        end = size = os.fstat(file.fileno()).st_size
        while end:
            begin = max(0, end - BLOCK)
            if there := os.pread(file.fileno(), end - begin, begin).rfind(b"\n") + 1:
                end = begin + there
                break
            end = begin
        if end < size:
            os.ftruncate(file.fileno(), end)
    except OSError:
        file.close()
        raise
    return file


def _write(file: BinaryIO, data: bytes) -> None:
    """Append all of ``data`` to ``file``, or nothing. Raises OSError."""
    done = 0
    try:
        while done < len(data):
            done += file.write(data[done:])
    except OSError:
        with suppress(OSError):  # a file that can't be truncated is not a regular file
            os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - done)
        raise
