"""A stage with the store of its worker: instructions by name, for tests that drive one stage."""

from __future__ import annotations

from typing import Any

import torch

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.stage.stage import Stage

Key = tuple[int, MicroBatch]  # step, micro-batch
Tensors = tuple[torch.Tensor, ...]


class StoredStage:
    """``stage`` is number ``number`` of ``stages``; its parameters are those of whatever step is run."""

    def __init__(self, stage: Stage, number: int = 0, stages: int = 1) -> None:
        self.stage, self.number = stage, number
        self.store = StepStore(Seat(0, number), stages)

    def load(self, key: Key, batch: tuple[Any, Any]) -> None:
        self.store.put(self._datum("data", key), self.stage.load(batch))

    def receive_activation(self, key: Key, tensors: Tensors) -> None:
        self.store.arrive(self._datum("act", key)._replace(stage=self.number - 1), tensors, 0)

    def receive_grad(self, key: Key, tensors: Tensors) -> None:
        self.store.arrive(self._datum("grad", key)._replace(stage=self.number + 1), tensors, 0)

    def forward(self, key: Key, boundary_only: bool = False) -> Tensors:
        return self._run(Op.F, key, boundary_only, "act")

    def backward(self, key: Key) -> Tensors:
        return self._run(Op.B, key, False, "grad")

    def backward_input(self, key: Key) -> Tensors:
        return self._run(Op.I, key, False, "grad")

    def backward_input_boundary_only(self, key: Key) -> Tensors:
        return self._run(Op.I, key, True, "grad")

    def backward_weight(self, key: Key) -> None:
        self._run(Op.W, key, False, "wgrad")

    @property
    def losses(self) -> dict[Key, torch.Tensor]:
        return {(datum.step, datum.micro_batch): self.store[datum] for datum in self.store if datum.kind == "loss"}

    def held(self) -> set[Datum]:
        """Without the weights, and without what goes to other stages."""
        return {
            datum
            for datum in self.store.held()
            if datum.kind != "params" and (datum.kind not in ("act", "grad") or datum.stage != self.number)
        }

    def summed(self, step: int) -> None:
        """What was counted of ``step`` is in a sum over all workers now."""
        self.stage.summed()
        self.store.conclude(Instruction(Op.REDUCE, self.number, None, step), {})

    def committed(self, step: int) -> None:
        self.store.commit(step)

    def _run(self, op: Op, key: Key, boundary_only: bool, wanted: str) -> Any:
        made: dict[Datum, Any] = {}

        def compute(instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
            made.update(self.stage.compute(instruction, have, boundary_only))
            return made

        if key[0] >= 0:
            self.store.put(self._datum("params", key)._replace(micro_batch=None))
        self.store.run(Instruction(op, self.number, key[1], key[0]), compute, boundary_only)
        return made[self._datum(wanted, key)]

    def _datum(self, kind: str, key: Key) -> Datum:
        return Datum(kind, self.number, key[1], key[0])
