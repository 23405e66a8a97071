"""The shard that one rank of a replica steps, at each ZeRO stage, and the place where stock DeepSpeed keeps its
gradients.

A *shard* is the part that a rank's optimizer steps: at ZeRO stages 1 to 3 flat fp32 partitions, at stage 0 all
parameters. A micro-batch's contribution is the part of its gradients in this shard, after stock's reduction inside the
replica. The contribution is taken after each backward, not only at the boundary, because a lost replica may move the
boundary. So a micro-batch counts as a whole or not at all. Stages 2 and 3 reduce after each backward anyway; at stages
0 and 1 this costs one more reduction inside the replica per micro-batch.

The sum over the replicas is put where stock has the reduced gradient between backward and step, so scripts find it
there. Stock then checks it for overflows, as scripts have left it, clips by its norm, steps, and gathers the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import (
    INITIAL_MICRO_STEP_ID,
    DeepSpeedZeroOptimizer,
    GradPartitionBufferGroup,
)

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.kinds import fetch
from recycle_plugin.runtime.stage.gradient_store import Slots, TorchGradients, empty, swapped

OF_GRADIENTS = (
    "get_fp32_grad_for_param",
    "set_fp32_grad_for_param",
    "get_local_fp32_grad_for_param",
    "set_local_grad_for_param",
    "update_fp32_grad_for_param_vectorized",
)  # called by deepspeed.utils.safe_get_full_grad and the like, at stage 3


class Whole:
    """Stage 0 in fp32: each rank of a replica has all parameters of ``module``, and ``optimizer`` steps them.
    ``limit``: the norm to clip at, 0 for no clipping. ``clipped_by()``: the norm by which stock code clipped last, None
    if it does not clip.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        limit: float,
        clipped_by: Callable[[], float | None],
    ) -> None:
        self.module, self.wrapped, self._limit, self._clipped_by = module, optimizer, limit, clipped_by
        self.gradients = TorchGradients(each for each in module.parameters() if each.requires_grad)

    @property
    def scaler(self) -> None:
        """None: losses are not scaled."""

    @contextmanager
    def backward(self) -> Iterator[Slots]:
        """A context for a backward; the yielded list has its contribution afterwards."""
        made = empty(self.gradients)
        with swapped(self.gradients, made):
            yield made

    def step(self, once: Callable[[], None]) -> torch.Tensor:
        """Run stock's step ``once()`` on the gradients without changing them. Returns the norm that it judged by."""
        self.show()
        once()
        norm = torch.tensor(self._clipped_by() or 0.0)
        return norm if norm.isfinite() else torch.tensor(0.0)  # stock skips nothing at stage 0

    def show(self) -> None:
        """Show a copy of the summed gradients to the script."""
        self.gradients.change(torch.clone)

    def hide(self) -> None:
        """Do nothing: ``parameter.grad`` is the plugin's again."""

    def made(self, sums: Sequence[torch.Tensor | None]) -> Slots | None:
        """Return ``sums`` as the script has changed them, None if it has changed nothing."""
        found = self.gradients.view()
        return found if _differ(found, sums) else None

    def follow(self, norm: torch.Tensor) -> None:
        """Step by the gradients, clipped by the other ranks' ``norm``; parameters without a gradient stay as is."""
        self.show()
        if self._limit:
            torch.nn.utils.clip_grads_with_norm_(self.gradients.parameters, self._limit, norm)  # rounds as stock does
        self.wrapped.step()

    def refresh_model(self) -> None:
        """Do nothing: the optimizer steps the model's own weights."""

    @contextmanager
    def as_stock(self) -> Iterator[None]:
        """A context in which the optimizer is as stock code leaves it."""
        yield


class Partitions:
    """Stages 1 and 2: the flat fp32 partitions of ``optimizer``, one for each of its parameter groups."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        self._optimizer = optimizer
        self.wrapped: torch.optim.Optimizer = optimizer.optimizer
        self.module = Shard(self.parameters)

    @property
    def parameters(self) -> list[Any]:
        return list(self._optimizer.single_partition_of_fp32_groups)

    @property
    def gradients(self) -> TorchGradients:
        """The partitions' gradients, in which the plugin adds up contributions."""
        return TorchGradients(self.parameters)

    @property
    def scaler(self) -> Any:
        """Stock's loss scaler, whose attributes are its state."""
        return self._optimizer.loss_scaler

    @contextmanager
    def backward(self) -> Iterator[Slots]:
        """A context for a backward; the yielded list has its contribution afterwards."""
        made: Slots = []
        yield made
        found = self._optimizer.averaged_gradients
        made.extend(self._flat(found[group]) for group in range(len(self.parameters)))
        self._forget()

    def step(self, once: Callable[[], None]) -> torch.Tensor:
        """Run stock's step ``once()`` on the gradients without changing them. Returns the norm that it judged by."""
        self._show()
        self.gradients.zero()
        once()
        return _judged(self._optimizer)

    def show(self) -> None:
        """Show a copy of the summed gradients to the script."""
        self._show()

    def _show(self) -> None:
        """Put copies of the gradients where stock has its reduced ones."""
        for group, gradient in enumerate(self.gradients.view()):
            assert gradient is not None, "all that is stepped was summed"
            self._put(group, gradient)

    def hide(self) -> None:
        """Show nothing any more, and have the next backward start afresh."""
        self._forget()

    def made(self, sums: Sequence[torch.Tensor | None]) -> Slots | None:
        """Return ``sums`` as the script has changed them, None if it has changed nothing."""
        found: Slots = [_changed(self._shown(group), gradient) for group, gradient in enumerate(sums)]
        return found if _differ(found, sums) else None

    def _shown(self, group: int) -> torch.Tensor:
        """Return the flat tensor in the place of a group's reduced gradient."""
        return self._optimizer.averaged_gradients[group].flat_partition

    def follow(self, norm: torch.Tensor) -> None:
        """Step by the gradients, clipped by the other ranks' ``norm``; partitions without a gradient stay as is."""
        optimizer, scaled = self._optimizer, norm * self._optimizer.loss_scale
        for group, gradient in enumerate(self.gradients.swap(empty(self.gradients))):
            if gradient is not None:
                own = TorchGradients([self.parameters[group]])
                own.add([gradient.clone()])
                (made,) = own.view()
                assert made is not None, "it was added"
                self._clip(group, made, scaled)
                optimizer._optimizer_step(group)
                own.zero()
            self._make_own(group)
        optimizer._update_scale(False)

    @contextmanager
    def as_stock(self) -> Iterator[None]:
        """A context in which the optimizer is as stock code leaves it."""
        yield

    def _flat(self, reduced: Any) -> torch.Tensor:
        flat = getattr(reduced, "flat_partition", None)
        return (self._optimizer.flatten(reduced) if flat is None else flat).detach().to(torch.float32, copy=True)

    def _forget(self) -> None:
        optimizer = self._optimizer
        for group in range(len(self.parameters)):
            optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None
        optimizer.zero_grad(set_to_none=True)
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID

    def _put(self, group: int, gradient: torch.Tensor) -> None:
        """Put a copy of the reduced ``gradient`` in its place, cut by parameters as in stock."""
        flat, offset, parts = gradient.clone(), 0, []
        for each in self._optimizer._build_compact_grad_partition_buffer(group):
            part: Any = flat.narrow(0, offset, each.numel()).view(each.shape)
            part._zero_padding = getattr(each, "_zero_padding", False)
            offset += each.numel()
            parts.append(part)
        self._optimizer.averaged_gradients[group] = GradPartitionBufferGroup(parts, flat)

    def _clip(self, group: int, gradient: torch.Tensor, norm: torch.Tensor) -> None:
        self._optimizer.unscale_and_clip_grads([gradient], norm)

    def _make_own(self, group: int) -> None:
        """Update this rank's part of the model's weights. It is done now, since scripts may change masters after a
        step, which must not show in forwards before the next one.
        """
        optimizer = self._optimizer
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        optimizer.parallel_partitioned_bit16_groups[group][rank].data.copy_(self.parameters[group].data)

    def refresh_model(self) -> None:
        """Gather the model's weights from the parts of the replica's ranks. All of them call it."""
        optimizer = self._optimizer
        all_gather_dp_groups(
            groups_flat=optimizer.bit16_groups_flat,
            partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )


class PartitionedWeights(Partitions):
    """Stage 3: the flat fp32 partitions of ``optimizer``, one for each of its sub-groups. Between its steps stock
    leaves torch's optimizer without parameters, so its state could not be assigned to any. Here they are in its groups.
    """

    _optimizer: Any

    def __init__(self, optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
        super().__init__(optimizer)
        self._fill()
        self._clear_paddings()
        self._shows = False
        for name in OF_GRADIENTS:
            setattr(optimizer, name, partial(self._if_shown, getattr(optimizer, name)))

    @property
    def parameters(self) -> list[Any]:
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def step(self, once: Callable[[], None]) -> torch.Tensor:
        """Step as Partitions does, and fill torch's optimizer again."""
        norm = super().step(once)
        self._fill()
        return norm

    def follow(self, norm: torch.Tensor) -> None:
        """Follow as Partitions does, and fill torch's optimizer again."""
        super().follow(norm)
        self._fill()

    @contextmanager
    def as_stock(self) -> Iterator[None]:
        """A context in which the optimizer is as stock code leaves it."""
        for group in self.wrapped.param_groups:
            group["params"] = []
        try:
            yield
        finally:
            self._fill()
            self._clear_paddings()

    @torch.no_grad()
    def _clear_paddings(self) -> None:
        """Zero the memory beyond a parameter's end, which stock never reads: replicas would differ in it."""
        for group, flat in zip(self._optimizer.fp16_groups, self.parameters, strict=True):
            for parameter, part in zip(group, flat.split([each.partition_numel() for each in group]), strict=True):
                begin = parameter.ds_process_group.rank() * len(part)
                part[max(0, parameter.ds_numel - begin) :].zero_()

    def _fill(self) -> None:
        for group in self.wrapped.param_groups:
            group["params"] = []
        for number, parameter in enumerate(self.parameters):
            group = self._optimizer.sub_group_to_group_id[number]
            self.wrapped.param_groups[group]["params"].append(parameter)

    def _forget(self) -> None:
        optimizer = self._optimizer
        for group in range(len(self.parameters)):
            optimizer.averaged_gradients[group] = None
        optimizer.zero_grad(set_to_none=True)  # it also restarts the count of micro-batches

    @contextmanager
    def backward(self) -> Iterator[Slots]:
        """As in Partitions, after clearing the shown sums: a micro-batch that leaves a weight out would keep them."""
        self._shows = False
        self._optimizer.grad_partitions_flat_buffer.zero_()
        with super().backward() as made:
            yield made

    def hide(self) -> None:
        """Show nothing any more, and have the next backward start afresh."""
        self._shows = False
        super().hide()

    def _if_shown(self, stock: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not self._shows:
            raise RecycleError(
                "gradients with recycle.replicas: they can be read only after the backward of a step's last "
                "micro-batch (engine.is_gradient_accumulation_boundary()), as the sum over all replicas; ask for "
                "them there"
            )
        return stock(*arguments, **named)

    def show(self) -> None:
        """Show the sum where stock's functions for gradients look for it: in stock's buffer, in its dtype."""
        for group, whole in enumerate(self.gradients.view()):
            assert whole is not None, "all that is stepped was summed"
            for part, gradient in zip(self._places(group), self._cut(group, whole), strict=True):
                part.copy_(gradient)
        self._shows = True

    def _shown(self, group: int) -> torch.Tensor:
        return torch.cat(self._places(group))

    def _places(self, group: int) -> list[torch.Tensor]:
        """Return stock's views of the reduced gradients of a group's parameters."""
        optimizer = self._optimizer
        return [optimizer._get_fp32_grad_state_partition(each, False)[0] for each in optimizer.fp16_groups[group]]

    def _cut(self, group: int, gradient: torch.Tensor) -> list[torch.Tensor]:
        return list(gradient.split([each.partition_numel() for each in self._optimizer.fp16_groups[group]]))

    def _put(self, group: int, gradient: torch.Tensor) -> None:
        self._optimizer.averaged_gradients[group] = self._cut(group, gradient.clone())

    def _clip(self, group: int, gradient: torch.Tensor, norm: torch.Tensor) -> None:
        self._optimizer.unscale_and_clip_grads(group, norm)

    def _make_own(self, group: int) -> None:
        self._optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def refresh_model(self) -> None:
        """Do nothing: forwards gather the ranks' parts."""


class Shard(torch.nn.Module):
    """The tensors of a shard as a module's parameters, by number."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        shards: Mapping[str, Any] = {f"shard{number}": tensor for number, tensor in enumerate(tensors)}
        self._parameters.update(shards)  # not nn.Parameters: they have to stay stock's tensors


def shards_of(engine: Any) -> Whole | Partitions:
    """Return the shard of this rank. Raises RecycleError if stock has built an unknown optimizer."""
    optimizer = engine.optimizer
    if type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        return PartitionedWeights(optimizer)
    if type(optimizer) is DeepSpeedZeroOptimizer:
        return Partitions(optimizer)
    if optimizer is engine.basic_optimizer:
        return Whole(engine.module, optimizer, engine.gradient_clipping(), lambda: engine._global_grad_norm)
    raise RecycleError(
        f"recycle.replicas: DeepSpeed trains this config with {type(optimizer).__name__}, which is not supported "
        "yet; in bf16 set zero_optimization.stage to 1, 2 or 3, and leave data_types.grad_accum_dtype out, or train in "
        "fp32"
    )


def _differ(made: Slots, sums: Sequence[torch.Tensor | None]) -> bool:
    """Whether a script has changed anything; NaNs count as changed."""
    if any((one is None) != (other is None) for one, other in zip(made, sums)):
        return True
    there = [torch.ne(one, other).any() for one, other in zip(made, sums) if one is not None and other is not None]
    return bool(there) and bool(fetch(torch.stack(there).any(), "whether a script has changed gradients"))


def _changed(shown: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return ``gradient`` with the changes made in ``shown``, a copy of it in another dtype."""
    assert gradient is not None, "what is shown was summed"
    if shown.dtype == gradient.dtype:
        return shown
    return torch.where(shown == gradient.to(shown.dtype), gradient, shown.to(gradient.dtype))


def _judged(optimizer: Any) -> torch.Tensor:
    """Return stock's norm of a step, without the loss scale, on the host; infinite if stock has skipped the step."""
    if optimizer.overflow:
        return torch.tensor(float("inf"))
    norm = optimizer._global_grad_norm
    return fetch(norm, "a norm") if torch.is_tensor(norm) else torch.tensor(norm or 0.0)
