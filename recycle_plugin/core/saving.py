"""A checkpoint is there whole or not at all, and never half of one under its name.

It is written under another name.  When the coordinator says that everybody has written (core/meeting.py), the first live worker gives it its own.  Whoever
dies before that is seen by all: they save once more, under yet another name.  A late writer, given up by the others and still alive, writes to a place that
nobody uses any more.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Protocol

from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.line import Line
from recycle_plugin.core.loop import Loop


class Files(Protocol):
    """Of one checkpoint."""

    def write(self, number: int) -> Iterator[Any]:
        """This worker's share, under a name of the attempt ``number``, which is another one in each membership.  Raises Interrupted."""

    def publish(self, number: int) -> Iterator[Any]:
        """All shares of this attempt are there: give it its name.  Once it has that, doing so again changes nothing."""


def save(loop: Loop, line: Line, place: str, files: Files, recover: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Returns when the checkpoint is in place, of all live workers' last committed step.  ``place``: its name, the same on all; ``recover()``: after a
    membership change between steps."""
    while True:
        yield from loop.settle()
        try:
            yield from files.write(line.number)
            yield from loop.meet(place, {})
            if line.is_first:
                yield from files.publish(line.number)
            yield from loop.meet(f"the end of {place}", {})
            return
        except Interrupted:
            yield from recover()
