"""A newcomer's stage while it is filled with others' state, and follows their steps: its store and its step counts are
those of a worker that has applied them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.state_stream import Marker
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.worker.step_store import StepStore


class StateWriter(Protocol):
    """The part of a worker's machine that has its stage's state."""

    def fill(self, head: Any) -> None:
        """Takes what goes by value from another worker's state, and makes room for units."""

    def write(self, name: str, value: Any) -> None:
        """Writes a unit of another worker's state."""

    def hash_state(self, step: int) -> None:
        """Begins to hash the state after ``step``; the coordinator is sent the result."""

    def finish_hash(self) -> None:
        """Returns when no hash is being made."""

    def settings(self) -> Any:
        """What the optimizer applies its next step with."""

    def take_settings(self, settings: Any) -> None:
        """Applies steps with another worker's settings from now on."""

    def go_by(self, share: LiveShare) -> None:
        """Takes which part of the replicas has contributed to what is applied from now on."""

    def gathered(self, step: int, sums: Mapping[str, Any]) -> Mapping[Datum, Any]:
        """What REDUCE and TIE of ``step`` would have left, with ``sums`` for these units, and nothing for others."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Makes what STEP provides, of what the store has."""


class FilledStage:
    """The stage of the worker that has ``store`` and counts its steps in ``steps``, before it is a member."""

    def __init__(self, machine: StateWriter, store: StepStore, steps: StepMachine) -> None:
        self._machine, self._store, self._steps = machine, store, steps

    def begin(self, step: int, head: Any) -> None:
        """Takes what goes by value of the state after ``step``, and makes room for units."""
        self._machine.finish_hash()
        self._steps.stepped = self._steps.committed = step
        self._store.rewind(step, self._store.valid_from)
        self._machine.fill(head)

    def write(self, name: str, value: Any) -> None:
        """Writes a unit."""
        self._machine.finish_hash()
        self._machine.write(name, value)

    def take_settings(self, settings: Any) -> None:
        """Has the next step applied with these settings."""
        self._machine.take_settings(settings)

    def hash_after(self, step: int, settings: Any) -> None:
        """Begins to hash the state, which is that after ``step``, with these ``settings``; what changes it waits for
        that.  The script here has its own, and changes those.
        """
        own = self._machine.settings()
        self._machine.take_settings(settings)
        self._machine.hash_state(step)
        self._machine.take_settings(own)

    def follow(self, marker: Marker, sums: Mapping[str, Any]) -> None:
        """Applies the step that ``marker`` says is committed: to each unit of ``sums`` what is given, to the others
        nothing.
        """
        store, step = self._store, marker.step
        self._machine.finish_hash()
        store.valid_from = marker.valid_from
        for datum, value in self._machine.gathered(step, sums).items():
            store.put(datum, value)
        if marker.settings is not None:
            self._machine.take_settings(marker.settings)
        self._machine.go_by(marker.share)
        if marker.norm is not None:
            store.put(Datum("norm", store.seat.stage, None, step), marker.norm)
        store.run(
            Instruction(Op.STEP, store.seat.stage, None, step),
            lambda one, have: self._machine.compute(one, have, False),
        )
        self._steps.applied(step)
        self._steps.commit(step)
        store.commit(step)
