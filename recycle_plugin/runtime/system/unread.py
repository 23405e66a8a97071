"""Output that nobody reads any more: where who has started a job from another host is gone, what it has started there
finds its pipes broken, and to print is no reason to end.
"""

from __future__ import annotations

import errno
import io
import os
import sys

GONE = (errno.EPIPE, errno.EIO)  # of a pipe, and of a terminal


class _Outliving(io.FileIO):
    """Writes to a descriptor as long as that has a reader, and then to nowhere."""

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
    """Have this process, and those that it forks, go on printing where nobody reads it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):  # it is none of the system's
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
