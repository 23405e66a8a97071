"""A live worker that replays its stage beside its state, for a lost one that can't read what this stage had sent it.

Where the boundary between two stages is not logged (planner/log_selection.py), or what was logged of it can't be read,
a loss on one side of it has both sides replayed: each makes once more what the other one needs, and logs it.  The side
that is live, the *companion*, keeps its state meanwhile and has it again afterwards; what it has come to is compared
with that.  So in the limit all stages go back to the checkpoint, and nobody's process does.

What it had begun behind the last committed step is dropped, as if it were lost, and its last step is taken back where
that is not committed: lineage makes both again (core/vocabulary/recovery_plan.py).  That costs a step at most, where
the replay costs many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from recycle_plugin.core.messages.from_coordinator import Replay
from recycle_plugin.core.messages.from_workers import Accompanied, Unreplayable
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.stage_work import CantReplay
from recycle_plugin.core.worker.step_store import StepStore


class CompanionMachine(Protocol):
    """The part of a live worker's machine that a companion needs beside that of its replay."""

    @property
    def control_view(self) -> ControlView:
        """What this worker knows of the control plane."""

    def send(self, message: object) -> None:
        """Sends ``message`` to the coordinator."""

    def forget_sums(self, after: int) -> None:
        """Drops the weight gradients of the steps after ``after`` that were added up here."""

    def keep_state(self) -> Any:
        """A copy of the state of this worker's stage, and of all else that a replay changes."""

    def otherwise(self, kept: Any) -> str:
        """In what the state here is another one than was ``kept``, in words; "" where it is the same, up to what the
        order of sums changes.
        """

    def put_back(self, kept: Any) -> None:
        """Has what was ``kept`` again."""


class Companion:
    """What the worker on ``machine`` does for stages beside its own that are replayed.

    ``steps``: those of its stage; ``replay``: by which that is replayed; ``undo(step)``: takes the last one back.
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
        """Replays what ``replay`` says, and tells the coordinator how that has ended.  Raises JobEnded."""
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
                raise CantReplay(f"stage {store.seat.stage} comes out otherwise than it was: {how}")
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
