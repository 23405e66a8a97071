"""Saving a checkpoint by all workers: it is there whole or not at all, and never half of one under its name.

It is written under another name.  When the coordinator says that everybody has written
(core/coordinator/facts/barriers.py), the first live worker gives it its own.  Whoever dies before that is seen by all:
they save once more, under yet another name.  A late writer, given up by the others and still alive, writes to a place
that nobody uses any more.

Whoever can't write, since its disk is full, comes to the barrier all the same and says so, and so does who can't give
it its name: the outcome is one for all, who go on without the checkpoint, and what was written of it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from recycle_plugin.core.messages.from_coordinator import BarrierPassed
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Interrupted, Waits
from recycle_plugin.core.worker.training_loop import TrainingLoop


class CheckpointFiles(Protocol):
    """The files of one checkpoint, as the saving needs them.  A generator's value says why something could not be
    written, and is "" where it was.
    """

    def write(self, number: int) -> Waits[str]:
        """Writes this worker's share, under a name of the attempt ``number``, which is another one in each membership.

        Raises Interrupted.
        """

    def publish(self, number: int) -> Waits[str]:
        """Gives the checkpoint its name, once all shares of attempt ``number`` are there.  Doing so again changes
        nothing.
        """

    def discard(self, number: int) -> Iterator[Any]:
        """Removes what was written of attempt ``number``, which nobody writes to or wants any more.  It has no
        value.
        """


def save(
    loop: TrainingLoop,
    control_view: ControlView,
    place: str,
    files: CheckpointFiles,
    recover: Callable[[], Iterator[Any]],
) -> Waits[str]:
    """Saves a checkpoint of all live workers' last committed step; returns when it is in place.

    ``place``: the name of its barrier, the same on all; ``recover()``: called after a membership change between steps.
    The value is "", or where it can't be written, the same on all: why.
    """
    while True:
        yield from loop.settle()
        try:
            error = yield from files.write(control_view.number)
            written = yield from loop.barrier(place, _said(control_view, error))
            why, error = why_not(written), ""
            if control_view.is_first and why:
                yield from files.discard(control_view.number)
            elif control_view.is_first:
                error = yield from files.publish(control_view.number)
            ended = yield from loop.barrier(end_of_saving(place), _said(control_view, error))
            return why or why_not(ended)
        except Interrupted:
            yield from recover()


def end_of_saving(place: str) -> str:
    """The name of the barrier at the end of a saving whose own is ``place``."""
    return f"the end of {place}"


def why_not(passed: BarrierPassed) -> str:
    """The reason why those who have passed the barrier can't have what they have written; "" where they can."""
    return next(iter(passed.values.values()), "")


def _said(control_view: ControlView, error: str) -> dict[str, str]:
    return {str(control_view.rank): error} if error else {}
