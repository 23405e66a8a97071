"""A stage of Megatron-LM's model for the runtime: one micro-batch by Megatron's own forward step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import nn

from recycle_plugin.adapters.megatron_lm import log_line
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.ports import Told


class Batches:
    """Megatron's batches, dicts by name, as tuples that can be sent. The keys, in the tuples' order, are kept apart for
    training and evaluation, whose datasets may have others.
    """

    def __init__(self) -> None:
        self._names: dict[bool, tuple[str, ...]] = {}  # by whether they are for training

    def packed(self, batch: Any, training: bool) -> tuple[Any, ...]:
        """Return the values of ``batch``. Raises RecycleError for anything but tensors by name."""
        if not isinstance(batch, dict):
            raise RecycleError(f"the data iterator gives a {type(batch).__name__}: a dict of tensors is supported")
        names = tuple(batch)
        if strange := next((name for name in names if not (batch[name] is None or torch.is_tensor(batch[name]))), None):
            raise RecycleError(
                f"{strange!r} in a batch is a {type(batch[strange]).__name__}: a dict of tensors is supported"
            )
        if names != (before := self._names.setdefault(training, names)):
            raise RecycleError(f"a batch has {', '.join(names)}, and the ones before had {', '.join(before)}")
        return tuple(batch[name] for name in names)

    def unpacked(self, values: tuple[Any, ...], training: bool) -> dict[str, Any]:
        """Return the batch as a dict, with the names of this worker's own data."""
        return dict(zip(self._names[training], values, strict=True))

    def begin_evaluation(self) -> None:
        """Forget the last evaluation's names: the test data may have others than the validation data."""
        self._names.pop(False, None)


class StageModule(nn.Module):
    """The layers of a stage behind Megatron's ``forward_step_func``, ``forward_step`` here. ``chunk``: what Megatron
    has built, DDP around the layers. ``first``, ``last``: which stage it is. The last stage's forward only hands on its
    input, and :meth:`loss` computes, since only there the labels are known.
    """

    def __init__(self, chunk: nn.Module, batches: Batches, first: bool, last: bool) -> None:
        super().__init__()
        self.layers = chunk.module
        self._chunk, self._batches = [chunk], batches  # a list, so that it is no submodule
        self._first, self.last = first, last
        self._config = get_model_config(chunk)
        self.forward_step: Callable[..., Any] | None = None
        self._values: list[Any] = []  # given by the loss function for the log line, at the last forward

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode of Megatron's wrapper too, which the script's forward step sees."""
        self._chunk[0].train(mode)
        return super().train(mode)

    def forward(self, given: Any) -> Any:
        """Return the stage's output; on the last stage return ``given``."""
        if self.last:
            return given
        return self._run(None, given) if self._first else self._run(given, None)

    def loss(self, given: Any, batch: tuple[Any, ...]) -> torch.Tensor:
        """Return the mean loss of a micro-batch from ``given``, the activations of the last stage."""
        return self._run(None if self._first else given, batch)

    def told(self, loss: torch.Tensor) -> Told:
        """Return the numbers of the last computed ``loss`` that all workers get."""
        return log_line.told(loss, self._values.pop())

    def _run(self, activations: torch.Tensor | None, batch: tuple[Any, ...] | None) -> torch.Tensor:
        assert self.forward_step is not None, "the script has given it"
        found: list[Any] = []
        data = None if batch is None else iter([self._batches.unpacked(batch, self.training)])
        output, _ = schedules.forward_step(
            self.forward_step,
            data,
            self._chunk[0],
            1,  # the number of micro-batches to divide the loss by: the runtime divides
            activations,
            found,
            self._config,
            cp_group_size=1,
            is_last_stage=self.last,
        )
        get_attr_wrapped_model(self._chunk[0], "set_input_tensor")([None])  # else it is kept until the next forward
        self._values = found
        return output


def detach_from_ddp(chunk: Any) -> None:
    """Leave gradients where autograd puts them: remove Megatron's hooks to its own buffers, and free those."""
    chunk.grad_accs = []  # it kept the hooked nodes alive, as may an optimizer that was there to load only
    gc.collect()
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.grad_data.untyped_storage().resize_(0)
