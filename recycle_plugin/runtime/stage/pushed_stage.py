"""The results of a script's own forward and backward, in a Stage's place (runtime/stage/stage.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.pushed import Script
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.stage.gradient_store import GradientStore

Made = tuple[Sequence[torch.Tensor | None], torch.Tensor]  # the gradient of each parameter, and the loss


class Shown(Protocol):
    """Where a framework shows a script the sum of a step's gradients, between its backward and its step."""

    def show(self) -> None:
        """Show the gradients' values, in separate memory."""

    def hide(self) -> None:
        """Stop showing: no step follows."""

    def made(self, sums: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """Return the shown ``sums`` as the script has changed them; None if it has changed nothing."""


class PushedStage:
    """Takes the results of each micro-batch that a script pushes (core/worker/pushed.py).

    ``gradients``: where they are added up; a micro-batch's are its share of the mean over a replica's. ``shown``: where
    the script finds the sum.
    """

    loss_scale = 1.0

    def __init__(self, gradients: GradientStore, device: Device, shown: Shown) -> None:
        self._gradients, self.device, self.shown = gradients, device, shown
        self.script = Script()
        self.made: Made | None = None  # of the micro-batch that the script has just run

    def load(self, batch: Any, shared: bool = False) -> None:
        """Do nothing: the script has its data."""

    def resize(self, micro_batches: int, blocks: Blocks | None) -> None:
        """Raise RecycleError: the number of micro-batches is fixed."""
        raise RecycleError(
            "set_train_batch_size() with recycle.replicas: steps of another size are not planned for yet; leave it out"
        )

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        """Return the results of F or B, by datum."""
        stage, step, one = instruction.stage, instruction.step, instruction.works_on
        if instruction.op is Op.F:
            assert self.made is not None, "the script has run it"
            (gradients, loss), self.made = self.made, None
            kinds: dict[str, Any] = {"act": (), "stash": gradients, "loss": loss}
        else:
            self._gradients.add(have[Datum("stash", stage, one, step)])
            kinds = {"grad": (), "wgrad": None}
        return {Datum(kind, stage, one, step): value for kind, value in kinds.items()}

    def summed(self) -> None:
        """Show the script the sum over all workers, which is in the gradients."""
        self.shown.show()

    def forget_sums(self) -> None:
        """Hide a sum that no longer counts from the script."""
        self.shown.hide()
