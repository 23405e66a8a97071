"""Automatic checkpoints, written in the background while training goes on.

Between two steps each worker copies what it has to write, and a thread writes it. On the lowest live replica of each
stage this needs host memory for a second copy of the state. The interval follows from the measured cost
(core/worker/checkpoint_interval.py). Logs reach back to the last checkpoint (core/worker/step_log.py), so a job that
logs makes one before the first step and after each loss.

A loss before all have written drops the checkpoint, and the next one is due at once. If any worker can't write its
share the whole checkpoint is removed, and the next one is tried after another interval.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from recycle_plugin import folders
from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.core.messages.from_coordinator import BarrierPassed
from recycle_plugin.core.messages.from_workers import BarrierReached, Durable
from recycle_plugin.core.messages.typed import Finite
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.log_figures import StageFigures
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.checkpoint_interval import CheckpointInterval, Cost, Meter
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.errors import NotSaved
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.worker.blocking_loop import BlockingLoop, drain
from recycle_plugin.runtime.worker.brought import by_rank
from recycle_plugin.runtime.worker.checkpoint_files import Checkpoint, unwatched
from recycle_plugin.runtime.worker.log_choice import LogChoice

Write = Callable[[], None]


class _Share(NamedTuple):
    """What a worker brings to the end of a checkpoint. ``made``: the steps of the last ones that it has seen made;
    ``error``: why its share is not written, or "".
    """

    cost_s: Finite
    step_s: Finite
    write_s: Finite
    made: tuple[int, ...]
    error: str
    figures: StageFigures | None


@dataclass
class _Begun:
    """A ``checkpoint`` under way, of the state before ``step``, which ``members`` write as ``made``. ``arrived``: the
    generation in which this worker last reported its share written, which took ``write_s`` seconds. ``figures``:
    its own for the choice of what is logged.
    """

    step: int
    checkpoint: Checkpoint
    made: Path
    members: frozenset[WorkerId]
    thread: threading.Thread = field(init=False)
    cost: Cost | None = None
    error: str = ""
    arrived: int = -1
    write_s: float = 0.0
    figures: StageFigures | None = None

    @property
    def end(self) -> Barrier:
        return Barrier(Meets.WRITTEN, self.checkpoint.tag)


def tag_of(step: int) -> str:
    """Return the name of the automatic checkpoint of ``step``."""
    return f"automatic_step{step}"


class Background:
    """Makes automatic checkpoints with ``make(tag)``, and keeps the last ``keep``. ``recover()`` is called after a
    membership change between steps. ``valid_from()``: the generation from which this worker's data is valid, if logs
    reach back to checkpoints, else None. ``choice``: which boundaries these logs have.
    """

    def __init__(
        self,
        session: Session,
        loop: BlockingLoop,
        make: Callable[[str], Checkpoint],
        interval: CheckpointInterval,
        keep: int,
        recover: Callable[[], None],
        valid_from: Callable[[], int] | None = None,
        choice: LogChoice | None = None,
    ) -> None:
        self._session, self._loop, self._make, self._interval = session, loop, make, interval
        self._valid_from, self._choice = valid_from, choice
        # a job that logs needs a checkpoint to replay from at all times
        self._first = valid_from is not None and not session.view.newcomer
        # A replay may use the last but one: while stages are replayed, the coordinator is not told of the last one.
        self._keep, self._recover = keep if valid_from is None else max(keep, 2), recover
        self._meter = Meter()
        self._begun: _Begun | None = None
        self._writing: threading.Thread | None = None
        self._made: list[int] = []  # the steps of the last ones, as they were made
        self._members = self._live()

    def before(self, step: int) -> None:
        """Begin a checkpoint before ``step`` if one is due, or follow up the one under way."""
        self._meter.tick(time.monotonic())
        if self._begun is not None:
            self._follow(self._begun)
        self._see_members()
        if self._begun is None and step >= self._interval.due:
            self._loop.settle()
            self._see_members()  # a worker that came meanwhile does not know that one is due
            if step >= self._interval.due:
                self._begin(step)
                if self._first:
                    self.conclude()
        self._first = False

    def _see_members(self) -> None:
        """Restart the interval if the members have changed. All members do, including those that joined."""
        if self._members != self._live():
            if self._valid_from is not None or not self._live() <= self._members:
                self._begun = None  # a joined worker has none under way, and would count differently
                self._interval.joined(self._session.view.changed_behind)
            self._members = self._live()
            self._forget()

    def _forget(self) -> None:
        """Drop the measurements: the membership has changed."""
        self._meter.forget()
        if self._choice is not None:
            self._choice.forget()

    def conclude(self) -> None:
        """Wait until no checkpoint is being written any more."""
        begun = self._begun
        if begun is None:
            return
        with self._session.heartbeats.at(ELSEWHERE, "a checkpoint"):
            begun.thread.join()
        self._meter.tick(time.monotonic())
        self._arrive(begun)
        while not isinstance(met := self._met(begun), BarrierPassed):
            self._recover()
            if begun.members != self._live():
                self._drop()
                return
            self._arrive(begun)
        self._end(begun, met)

    def _met(self, begun: _Begun) -> object:
        return self._session.waiting.until(
            str(begun.end), lambda: self._session.view.barrier_passed(begun.end, begun.arrived), interruptible=False
        )

    def loaded(self, step: int) -> None:
        """Count from ``step``, the step of the checkpoint that all have loaded."""
        self._interval.loaded(step)

    def _begin(self, step: int) -> None:
        session, checkpoint = self._session, self._make(tag_of(step - 1))
        try:
            with session.heartbeats.at(ELSEWHERE, "a checkpoint"), unwatched(session):
                if self._writing is not None:  # the thread of a dropped checkpoint
                    self._writing.join()
                session.waiting.for_lease("a checkpoint")
                begun = _Begun(step, checkpoint, checkpoint.path(session.view.number), self._live())
                write = checkpoint.gather(begun.made, True).write
            # all have copied the same step, or nobody writes
            drain(self._loop.training.barrier(Barrier(Meets.SCRIPT, f"checkpoint {checkpoint.tag}"), {}))
        except Interrupted:
            self._recover()
            self._drop()
            return
        self._meter.begin()
        begun.figures = None if self._choice is None else self._choice.begin()
        self._begun, self._members = begun, begun.members
        begun.thread = self._writing = threading.Thread(
            target=self._write, args=(begun, write), name="recycle: checkpoint", daemon=True
        )
        begun.thread.start()

    def _write(self, begun: _Begun, write: Write) -> None:
        began = time.monotonic()
        try:
            write()
        except NotSaved as error:
            begun.error = begun.checkpoint.why(error)
        begun.write_s = time.monotonic() - began

    def _follow(self, begun: _Begun) -> None:
        """End the checkpoint if all have written, drop it if a worker was lost, or report this worker's share."""
        met = self._session.view.barrier_passed(begun.end, begun.arrived)
        if isinstance(met, BarrierPassed):
            self._end(begun, met)
        elif not begun.members <= self._live():
            self._drop()
        elif not begun.thread.is_alive():
            self._arrive(begun)

    def _arrive(self, begun: _Begun) -> None:
        """Report once in each generation that this worker has written: the coordinator keeps no older reports."""
        session = self._session
        if begun.arrived != session.view.number:
            begun.arrived, begun.cost = session.view.number, begun.cost or self._meter.end()
            share = _Share(*begun.cost, begun.write_s, tuple(self._made), begun.error, begun.figures)
            brought = {str(session.rank): share}
            session.send(BarrierReached(session.rank, session.view.number, begun.end, brought))

    def _end(self, begun: _Begun, met: BarrierPassed) -> None:
        self._begun = None
        shares = [*by_rank(_Share, met).values()]
        costs = [Cost(share.cost_s, share.step_s) for share in shares]
        error = next((share.error for share in shares if share.error), "")
        # if a member is lost, it may have been the first and published already
        first = self._session.view.is_first and begun.members <= self._live()
        if error:
            self._interval.failed(begun.step, met.from_step)
            if first:
                begun.checkpoint.remove(begun.made)
                self._say_failed(begun, error)
            return
        self._interval.made(begun.step, costs, met.from_step)
        # who has come back hears of those that it removes some time, if it is the first one
        known = self._made or [*max((share.made for share in shares), key=len)]
        # one may be made again, once all have gone back to an older state
        self._made = [*(step for step in known if step != begun.step - 1), begun.step - 1]
        write_s = max(share.write_s for share in shares)
        if self._choice is not None:
            self._choice.made()
        figures = [share.figures for share in shares if share.figures is not None]
        if first and (error := self._publish(begun, max(costs), write_s, figures)):
            self._made.remove(begun.step - 1)
            self._say_failed(begun, error)
        del self._made[: -self._keep]

    def _say_failed(self, begun: _Begun, error: str) -> None:
        grows = "; until one succeeds, no log is deleted" * (self._valid_from is not None)
        self._session.note(
            "warning",
            f"no checkpoint of step {begun.step - 1}: {error}; the next one is tried before step {self._interval.due}"
            f"{grows}",
        )

    def _publish(self, begun: _Begun, cost: Cost, write_s: float, figures: list[StageFigures]) -> str:
        """Put the checkpoint in place, and remove old ones. Returns why it failed, or "". ``figures``: for the log."""
        said = (
            f"checkpoint of step {begun.step - 1}, which has cost {max(cost.seconds, 0.0):.3f} s with steps of "
            f"{cost.step_s:.3f} s, the next one before step {self._interval.due},"
        )
        details = {"cost_s": round(cost.seconds, 4), "step_s": round(cost.step_s, 4), "every": self._interval.every}
        if error := begun.checkpoint.named(begun.made, said, **details):
            return error
        if self._valid_from is not None:
            path = str((begun.checkpoint.folder / begun.checkpoint.tag).absolute())
            logged = None if self._choice is None else self._choice.choose(figures, self._interval.every)
            self._session.send(Durable(self._session.rank, begun.step - 1, path, self._valid_from(), write_s, logged))
        for step in self._made[: -self._keep]:
            old = begun.checkpoint.folder / tag_of(step)
            threading.Thread(target=folders.remove, args=(old,), name="recycle: old checkpoint", daemon=True).start()
        return ""

    def _live(self) -> frozenset[WorkerId]:
        return frozenset(self._session.view.roster.workers)

    def _drop(self) -> None:
        self._begun = None
        self._forget()
        self._interval.dropped(self._session.view.since)
