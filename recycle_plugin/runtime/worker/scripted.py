"""A stage whose script runs the forward and the backward of a micro-batch itself.

There is no pipeline, but the same commit, exchange of gradients, undo and rerouting. The script's one call is F. It
leaves its gradients as the input of B, which adds them to the worker's sum. So a micro-batch that a loss interrupts
between the two counts once, whichever worker repeats it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.stage.gradient_store import Slots, empty, swapped
from recycle_plugin.runtime.stage.ports import Compute, StageModel
from recycle_plugin.runtime.stage.repeatable import ModuleState, Rehearsal, Reuse, check_unchanged

Computed = tuple[Slots, torch.Tensor]  # the gradient of each parameter, and the loss
CALLED = "call of compute()"
ADVICE = (
    "get data by the step, the replica and the micro-batch that compute() is given, "
    "and leave optimizer.step() to Replicas.step()"
)


class ScriptedStage:
    """Runs a script's ``compute`` in place of a Stage (runtime/stage/stage.py), for the only stage of its model.
    ``randomness``: the context in which a micro-batch of a step draws. ``warn`` is called with what may go wrong.
    ``tried``: others have seen that a call is repeatable.
    """

    loss_scale = 1.0

    def __init__(
        self,
        model: StageModel,
        compute: Compute,
        randomness: Callable[[MicroBatch, int, str], AbstractContextManager[object]],
        warn: Callable[[str], None] = lambda text: None,
        tried: bool = False,
    ) -> None:
        self._compute, self._randomness, self._warn = compute, randomness, warn
        self._module, self._keyed = model.module, model.keyed
        self._gradients, self._scale = model.made, model.scale
        self.device: Device = model.device
        self._rehearsed, self._reuse = tried, Reuse()

    def resize(self, micro_batches: int, blocks: Blocks | None) -> None:
        """Train with so many micro-batches a replica in a step from now on."""
        self._scale = micro_batches

    def load(self, batch: Any, shared: bool = False) -> None:
        """Do nothing: the script has its data."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        """Return the results of F or B, by datum. Raises RecycleError if the script's call is unusable."""
        stage, step, one = instruction.stage, instruction.step, instruction.works_on
        act, stash, loss, grad, wgrad = (
            Datum(kind, stage, one, step) for kind in ("act", "stash", "loss", "grad", "wgrad")
        )
        if instruction.op is Op.F:
            gradients, value = self._computed(step, one) if self._rehearsed else self._first(step, one)
            return {
                act: (),
                stash: [each if each is None else each.clone() for each in gradients] if self._reuse.may else gradients,
                loss: value,
            }
        made = have[stash]
        if self._scale != 1:
            made = [each if each is None else each.div_(self._scale) for each in made]
        self._gradients.add(made)
        return {grad: (), wgrad: None}

    def _first(self, step: int, one: MicroBatch) -> Computed:
        """Run the first micro-batch twice, since another worker may have to repeat it (runtime/stage/repeatable.py)."""
        self._rehearsed, before = True, ModuleState(self._module)
        if not self._keyed:
            computed = self._computed(step, one)
            check_unchanged(self._module, before, CALLED, ADVICE)
            return computed
        rehearsal = Rehearsal(self._module, before, False, self._warn, CALLED, ADVICE)
        rehearsal.once(_made(self._computed(step, one)))
        computed = self._computed(step, one)
        rehearsal.twice(_made(computed))
        return computed

    def _computed(self, step: int, one: MicroBatch) -> Computed:
        made = empty(self._gradients)
        with self._randomness(one, step, ""), torch.enable_grad(), swapped(self._gradients, made):
            loss = self._compute(step, *one)
        if not torch.is_tensor(loss) or loss.numel() != 1:
            raise RecycleError(
                f"compute({step}, {one.replica}, {one.index}) gives "
                f"{type(loss).__name__ if not torch.is_tensor(loss) else f'a tensor of {tuple(loss.shape)}'}: "
                "return the micro-batch's loss, one number, after its backward()"
            )
        if all(gradient is None for gradient in made):
            raise RecycleError(
                f"compute({step}, {one.replica}, {one.index}) has left no gradient: call backward() on the loss before "
                "you return it"
            )
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in made):
            raise RecycleError(
                f"compute({step}, {one.replica}, {one.index}) leaves sparse gradients, which are not summed over "
                "replicas yet; build its layers with sparse=False"
            )
        computed = made, loss.detach()
        self._reuse.see(_made(computed))
        return computed

    def summed(self) -> None:
        """Do nothing: contributions are now in a sum over all workers, and only the gradients held them."""

    def forget_sums(self) -> None:
        """Do nothing: there are no sums but the gradients."""


def _made(computed: Computed) -> tuple[torch.Tensor, ...]:
    gradients, loss = computed
    return (loss, *(gradient for gradient in gradients if gradient is not None))
