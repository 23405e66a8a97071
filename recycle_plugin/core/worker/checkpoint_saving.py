"""Saving a checkpoint by all workers: it is there whole or not at all, never in part under its name.

It is written under another name. When the coordinator says that all have written (core/coordinator/facts/barriers.py),
the first live worker gives it its own. If a worker dies before that, all see it and save once more, under yet another
name. A late writer, given up by the others and still alive, writes to a place that nobody uses any more.

A worker that can't write, since its disk is full, or can't give the name, still comes to the barrier and says so. The
outcome is the same for all: they go on without the checkpoint, and its files are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from recycle_plugin.core.messages.from_coordinator import BarrierPassed
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Interrupted, Waits
from recycle_plugin.core.worker.training_loop import TrainingLoop


class CheckpointFiles(Protocol):
    """The files of one checkpoint. A generator's value is the reason why something could not be written, else ""."""

    def write(self, number: int) -> Waits[str]:
        """Write this worker's share, under a name of attempt ``number``, new in each membership. Raises Interrupted."""

    def publish(self, number: int) -> Waits[str]:
        """Give the checkpoint its name, once all shares of attempt ``number`` are there. May be repeated."""

    def discard(self, number: int) -> Iterator[Any]:
        """Remove the files of attempt ``number``, which no worker writes to or needs any more. Yields; no value."""


def save(
    loop: TrainingLoop,
    control_view: ControlView,
    call: str,
    files: CheckpointFiles,
    recover: Callable[[], Iterator[Any]],
) -> Waits[str]:
    """Save a checkpoint of all live workers' last committed step; return when it is in place. ``call``: the script's,
    the same on all. ``recover()``: called after a membership change between steps. The value is "", or the
    reason why it can't be written, the same on all.
    """
    while True:
        yield from loop.settle()
        try:
            error = yield from files.write(control_view.number)
            written = yield from loop.barrier(Barrier(Meets.SCRIPT, call), _said(control_view, error))
            why, error = why_not(written), ""
            if control_view.is_first and why:
                yield from files.discard(control_view.number)
            elif control_view.is_first:
                error = yield from files.publish(control_view.number)
            ended = yield from loop.barrier(Barrier(Meets.SAVED, call), _said(control_view, error))
            return why or why_not(ended)
        except Interrupted:
            yield from recover()


def why_not(passed: BarrierPassed) -> str:
    """Return, by rank, why its files from before the barrier can't be used; "" if they can."""
    return "; ".join(dict.fromkeys(why for _, why in sorted(passed.values.items(), key=lambda said: int(said[0]))))


def _said(control_view: ControlView, error: str) -> dict[str, str]:
    return {str(control_view.rank): error} if error else {}
