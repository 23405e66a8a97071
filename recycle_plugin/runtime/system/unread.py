"""Output without readers. If the starter of a job on another host is gone, the processes there find their pipes broken;
that printing fails is no reason to end.
"""

from __future__ import annotations

import errno
import io
import os
import sys

GONE = (errno.EPIPE, errno.EIO)  # errors of a pipe, and of a terminal


class _Outliving(io.FileIO):
    """Writes to a descriptor while it has a reader, then to nowhere."""

    def write(self, data: bytes) -> int:  # type: ignore[override]  # all buffers
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return len(data)


def outlive_readers() -> None:
    """Have this process, and its forks, go on printing without a reader."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):  # not a stream of the system
            continue
        stream.flush()
        raw = _Outliving(descriptor, "w", closefd=False)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            ),
        )
