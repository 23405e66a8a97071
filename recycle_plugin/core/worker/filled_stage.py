"""A newcomer's stage while it is filled with others' state, and follows their steps: its store and its step counts are
those of a worker that has applied them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.state_stream import Marker
from recycle_plugin.core.worker.machine import Machine
from recycle_plugin.core.worker.step_store import StepStore


class FilledStage:
    """The stage of the worker that has ``store`` and counts its steps in ``steps``, before it is a member."""

    def __init__(self, machine: Machine, store: StepStore, steps: StepMachine) -> None:
        self._machine, self._store, self._steps = machine, store, steps

    def begin(self, step: int, head: Any) -> None:
        """Takes what goes by value of the state after ``step``, and makes room for units."""
        self._machine.hashing.finish()
        self._steps.stepped = self._steps.committed = step
        self._store.rewind(step, self._store.valid_from)
        self._machine.units.fill(head)

    def write(self, name: str, value: Any) -> None:
        """Writes a unit."""
        self._machine.hashing.finish()
        self._machine.units.write(name, value)

    def take_settings(self, settings: Any) -> None:
        """Has the next step applied with these settings."""
        self._machine.units.take_settings(settings)

    def hash_after(self, step: int, settings: Any) -> None:
        """Begins to hash the state, which is that after ``step``, with these ``settings``; what changes it waits for
        that.  The script here has its own, and changes those.
        """
        own = self._machine.units.settings()
        self._machine.units.take_settings(settings)
        self._machine.hashing.hash_state(step)
        self._machine.units.take_settings(own)

    def follow(self, marker: Marker, sums: Mapping[str, Any]) -> None:
        """Applies the step that ``marker`` says is committed: to each unit of ``sums`` what is given, to the others
        nothing.
        """
        store, step = self._store, marker.step
        self._machine.hashing.finish()
        store.valid_from = marker.valid_from
        for datum, value in self._machine.units.gathered(step, sums).items():
            store.put(datum, value)
        if marker.settings is not None:
            self._machine.units.take_settings(marker.settings)
        self._machine.operations.go_by(marker.share)
        if marker.norm is not None:
            store.put(store.of_layers("norm", step), marker.norm)
        store.run(Instruction(Op.STEP, store.seat.chunk, None, step), self._machine.operations.compute)
        self._steps.applied(step)
        self._steps.commit(step)
        store.commit(step)
