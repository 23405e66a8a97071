"""A checkpoint is there whole or not at all, and never half of one under its name.

It is written under another name.  When the coordinator says that everybody has written (core/coordinator/barriers.py),
the first live worker gives it its own.  Whoever dies before that is seen by all: they save once more, under yet another
name.  A late writer, given up by the others and still alive, writes to a place that nobody uses any more.

Whoever can't write, since its disk is full, comes to the meeting all the same and says so, and so does who can't give
it its name: the verdict is one for all, who go on without the checkpoint, and what was written of it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from recycle_plugin.core.messages.protocol import BarrierPassed
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Interrupted, Waits
from recycle_plugin.core.worker.training_loop import TrainingLoop


class CheckpointFiles(Protocol):
    """Of one checkpoint.  The values say why something could not be written, "" where it was."""

    def write(self, number: int) -> Waits[str]:
        """This worker's share, under a name of the attempt ``number``, which is another one in each membership.

        Raises Interrupted.
        """

    def publish(self, number: int) -> Waits[str]:
        """All shares of this attempt are there: give it its name.  Once it has that, doing so again changes nothing."""

    def discard(self, number: int) -> Iterator[Any]:
        """Nobody writes to this attempt any more, and nobody wants it.  No value."""


def save(
    loop: TrainingLoop,
    control_view: ControlView,
    place: str,
    files: CheckpointFiles,
    recover: Callable[[], Iterator[Any]],
) -> Waits[str]:
    """Returns when the checkpoint is in place, of all live workers' last committed step.

    ``place``: its name, the same on all; ``recover()``: after a membership change between steps.  The value is "", or
    where it can't be written, the same on all: why.
    """
    while True:
        yield from loop.settle()
        try:
            error = yield from files.write(control_view.number)
            written = yield from loop.barrier(place, _said(control_view, error))
            why, error = verdict(written), ""
            if control_view.is_first and why:
                yield from files.discard(control_view.number)
            elif control_view.is_first:
                error = yield from files.publish(control_view.number)
            ended = yield from loop.barrier(f"the end of {place}", _said(control_view, error))
            return why or verdict(ended)
        except Interrupted:
            yield from recover()


def verdict(met: BarrierPassed) -> str:
    """Why those who have met there can't have what they have written; "" where they can."""
    return next(iter(met.values.values()), "")


def _said(control_view: ControlView, error: str) -> dict[str, str]:
    return {str(control_view.rank): error} if error else {}
