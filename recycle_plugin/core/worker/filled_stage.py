"""A newcomer's stage while sources fill it: its store and step counts are those of a worker that applied the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.state_stream import Marker
from recycle_plugin.core.worker.machine import Machine
from recycle_plugin.core.worker.step_store import StepStore


class FilledStage:
    """The stage of a worker with ``store`` and step counts ``steps``, before it is a member."""

    def __init__(self, machine: Machine, store: StepStore, steps: StepMachine) -> None:
        self._machine, self._store, self._steps = machine, store, steps

    def begin(self, step: int, head: Any) -> None:
        """Set the non-tensor state to that after ``step``, and allocate the units."""
        self._machine.hashing.finish()
        self._steps.stepped = self._steps.committed = step
        self._store.rewind(step, self._store.valid_from)
        self._machine.units.fill(head)

    def write(self, name: str, value: Any) -> None:
        """Write a unit."""
        self._machine.hashing.finish()
        self._machine.units.write(name, value)

    def take_settings(self, settings: Any) -> None:
        """Have the next step applied with these settings."""
        self._machine.units.take_settings(settings)

    def hash_after(self, step: int, settings: Any) -> None:
        """Begin to hash the state after ``step`` with these ``settings``; the script here keeps its own."""
        own = self._machine.units.settings()
        self._machine.units.take_settings(settings)
        self._machine.hashing.hash_state(step)
        self._machine.units.take_settings(own)

    def follow(self, marker: Marker, sums: Mapping[str, Any]) -> None:
        """Apply the step that ``marker`` commits, with ``sums`` by unit; units without a sum stay."""
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
