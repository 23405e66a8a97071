"""Writing what people read and no training depends on: logs, traces, the lines on the console.

Where it can't be written, since the disk is full for instance, it is dropped; that is said once, and it is tried again
now and then.  Once it can be written again, that is said too.
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

RETRY_S = 1.0  # between two attempts: a full disk may take its time to say so
KEPT = 10_000  # lines that may wait for room
UNWRITTEN, WRITTEN = "unwritten", "written"  # kinds of events

Say = Callable[..., None]
"""Of the kind of an event, its text, and as a keyword the ``path``."""


class Droppable:
    """Something that is written to ``path``, and of which a ``unit`` may be dropped.  ``say`` tells the user."""

    def __init__(self, path: Path | str, unit: str, say: Say) -> None:
        self.path = path
        self._unit, self._say = unit, say
        self._failing = False
        self._again = 0.0  # when it is tried again

    def attempt(self, write: Callable[[], None], errors: type[Exception] = OSError) -> bool:
        """Try to ``write``; returns whether it is done, else that is dropped."""
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
        """Make the next attempt whenever it comes, without a pause."""
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
    """The file that this process prints to, or whatever else its standard output is."""
    return Path(os.path.realpath("/proc/self/fd/1"))


class LineFile:
    """A file that lines are appended to, each whole or not at all; it is opened with the first one."""

    def __init__(self, path: Path, say: Say) -> None:
        self.path = path
        self._target = Droppable(path, "lines", say)
        self._file: BinaryIO | None = None
        self._kept: deque[str] = deque(maxlen=KEPT)

    def add(self, line: str, keep: bool = False) -> None:
        """Append a line.  ``keep``: it is not dropped, and waits until there is room."""
        if keep:
            self._kept.append(line)
        self._target.attempt(lambda: self._append([] if keep else [line]))

    def close(self) -> None:
        """Try once more to write what waits, and close the file."""
        if self._kept:
            self._target.at_once()
            self.add(self._kept.pop(), keep=True)
        self._let_go()

    def _append(self, lines: list[str]) -> None:
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
            _write(self._file, "".join(f"{line}\n" for line in (*self._kept, *lines)).encode())
            self._kept.clear()
        except OSError:
            self._let_go()  # it is opened anew: the file may be another one then
            raise

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:  # as where a quota is found out late
                pass


def _write(file: BinaryIO, data: bytes) -> None:
    """Append all of ``data`` to ``file``, or nothing.  Raises OSError."""
    done = 0
    try:
        while done < len(data):
            done += file.write(data[done:])
    except OSError:
        with suppress(OSError):  # what can't be cut off either is no file
            os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - done)
        raise
