"""The disk that a log is written to: files that grow at their end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from recycle_plugin.runtime.log.segment import Buffer

MOST = 1024  # pieces in one system call


class Disk:
    """The file system. Each method raises OSError."""

    def create(self, path: Path) -> GrowingFile:
        """Create and return an empty file. Raises FileExistsError if it exists."""
        return GrowingFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666))

    def remove(self, path: Path) -> None:
        """Remove a file, which may be gone already."""
        path.unlink(missing_ok=True)


class GrowingFile:
    """The file open as ``descriptor``. Each method raises OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def append(self, pieces: Sequence[Buffer]) -> None:
        left = [memoryview(piece) for piece in pieces if len(piece)]
        while left:
            done = os.writev(self._descriptor, left[:MOST])
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def cut(self, size: int) -> None:
        """Drop everything after the first ``size`` bytes."""
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        os.close(self._descriptor)
