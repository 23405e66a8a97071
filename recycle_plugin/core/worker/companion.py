"""A live worker that replays its own stage too, for a lost worker whose log lacks the data that this stage had sent it.

If the boundary between two stages is not logged (planner/log_selection.py), or its log can't be read, a loss on one
side makes both stages replay. Each stage recomputes the data that the other one needs, and logs it. The live side, the
*companion*, keeps its state meanwhile, compares the replay's result with it, and restores it afterwards. In the extreme
case all stages replay from the checkpoint, and no process is restarted.

The companion drops its work after the last committed step as if it were lost, and takes back a last step that is not
committed. The recovery plan makes both again (core/vocabulary/recovery_plan.py). This costs at most one step; a replay
costs many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from recycle_plugin.core.messages.from_coordinator import Replay
from recycle_plugin.core.messages.from_workers import Accompanied, Unreplayable
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.worker.control_view import ControlPort
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.stage_work import CantReplay
from recycle_plugin.core.worker.step_store import StepStore


class CompanionMachine(ControlPort, Protocol):
    """The part of a live worker's machine that a companion needs beside that of its replay."""

    def forget_sums(self, after: int) -> None:
        """Drop the weight gradients of the steps after ``after`` that were summed here."""

    def keep_state(self) -> Any:
        """Return a copy of the state of this worker's stage, and of all else that a replay changes."""

    def otherwise(self, kept: Any) -> str:
        """Return in words how the state here differs from ``kept``; "" if another order of sums explains it."""

    def put_back(self, kept: Any) -> None:
        """Restore ``kept``, a result of :meth:`keep_state`."""


class Companion:
    """The part of the worker on ``machine`` in the replays of other stages: it replays its own. ``steps``: its step
    counts; ``replay``: replays its stage; ``undo(step)``: takes its last step back.
    """

    def __init__(
        self,
        machine: CompanionMachine,
        store: StepStore,
        steps: StepMachine,
        replay: StageReplay,
        undo: Callable[[int], None],
    ) -> None:
        self._machine, self._store, self._steps, self._replay, self._undo = machine, store, steps, replay, undo

    def run(self, replay: Replay) -> Iterator[Any]:
        """Carry out ``replay``, and send the coordinator the outcome. Raises JobEnded."""
        committed, store, rank = replay.committed, self._store, self._machine.control_view.rank
        if self._steps.stepped > committed:
            self._undo(self._steps.stepped)
            self._steps.stepped = committed
        drawn = {datum: store[datum] for datum in store if datum.kind == "drawn" and datum.step > committed}
        valid_from = max(store.valid_from, replay.valid_from)
        kept = self._machine.keep_state()
        try:
            yield from self._replay.run(replay)
            if how := self._machine.otherwise(kept):
                raise CantReplay(f"the replay of stage {store.seat.stage} leads to another state than it had: {how}")
        except CantReplay as error:
            ended: object = Unreplayable(rank, str(error), error.stage, error.checkpoint)
        else:
            ended = Accompanied(rank, committed)
        finally:
            self._steps.stepped = self._steps.committed = committed
            store.rewind(committed, valid_from)
            self._machine.forget_sums(committed)
            for datum, batch in drawn.items():
                store.put(datum, batch)
            self._machine.put_back(kept)
        self._machine.send(ended)
