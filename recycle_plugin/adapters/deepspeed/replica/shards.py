"""What one rank of a replica steps, at each ZeRO stage, and where stock DeepSpeed keeps the gradients of it.

A *shard* is what a rank's optimizer steps: at ZeRO stages 1 to 3 flat fp32 partitions, at stage 0 all parameters.  A
micro-batch's contribution to the step is what stock's reduction inside the replica leaves of its gradients in this
shard.  It is taken after each backward, and not at the boundary only, which the loss of a replica may move: so a
micro-batch counts as a whole or not at all.  At stages 2 and 3 stock reduces after each backward itself; at 0 and 1
that costs one reduction inside the replica for each micro-batch more.

The sum over the replicas is put where stock has the reduced gradient between its backward and its step, so that scripts
find it there, and stock judges what they have made of it for overflows, clips by its norm, steps, and gathers the
parameters.  DeepSpeed's private names are used here and in
engine.py only.
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
)  # of stage 3's optimizer, by which deepspeed.utils.safe_get_full_grad and the like go


class Whole:
    """Stage 0 in fp32: each rank of a replica has all parameters of ``module``, and steps them by ``optimizer``.

    ``limit``: gradients are clipped by it, 0 for not at all; ``clipped_by()``: the norm by which stock code has done so
    last, None where it does not.
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
        """A context for a backward; the list has its contribution afterwards."""
        made = empty(self.gradients)
        with swapped(self.gradients, made):
            yield made

    def step(self, once: Callable[[], None]) -> torch.Tensor:
        """Let ``once()`` step by the gradients, which stay as they are; returns the norm by which it has judged."""
        self.show()
        once()
        norm = torch.tensor(self._clipped_by() or 0.0)
        return norm if norm.isfinite() else torch.tensor(0.0)  # stock skips nothing at stage 0

    def show(self) -> None:
        """Show a script the sum that is in the gradients, in memory of its own."""
        self.gradients.change(torch.clone)

    def hide(self) -> None:
        """Nothing: ``parameter.grad`` is the plugin's again."""

    def made(self, sums: Sequence[torch.Tensor | None]) -> Slots | None:
        """What the script has made of ``sums``; None where it has left all as it was."""
        found = self.gradients.view()
        return found if _differ(found, sums) else None

    def follow(self, norm: torch.Tensor) -> None:
        """Step by the gradients, as others have judged them; what has none stays as it is."""
        self.show()
        if self._limit:
            torch.nn.utils.clip_grads_with_norm_(self.gradients.parameters, self._limit, norm)  # with stock's rounding
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
        """Those of the partitions, where the plugin has what it adds up."""
        return TorchGradients(self.parameters)

    @property
    def scaler(self) -> Any:
        """Stock's loss scaler, whose attributes are its state."""
        return self._optimizer.loss_scaler

    @contextmanager
    def backward(self) -> Iterator[Slots]:
        """A context for a backward; the list has its contribution afterwards."""
        made: Slots = []
        yield made
        found = self._optimizer.averaged_gradients
        made.extend(self._flat(found[group]) for group in range(len(self.parameters)))
        self._forget()

    def step(self, once: Callable[[], None]) -> torch.Tensor:
        """Let ``once()`` step by the gradients, which stay as they are; returns the norm by which it has judged."""
        self._show()
        self.gradients.zero()
        once()
        return _judged(self._optimizer)

    def show(self) -> None:
        """Show a script the sum that is in the gradients, in memory of its own."""
        self._show()

    def _show(self) -> None:
        """Put copies of the gradients where stock has what it has reduced."""
        for group, gradient in enumerate(self.gradients.view()):
            assert gradient is not None, "all that is stepped was summed"
            self._put(group, gradient)

    def hide(self) -> None:
        """Show nothing any more, and have the next backward begin anew."""
        self._forget()

    def made(self, sums: Sequence[torch.Tensor | None]) -> Slots | None:
        """What the script has made of ``sums``; None where it has left all as it was."""
        found: Slots = [_changed(self._shown(group), gradient) for group, gradient in enumerate(sums)]
        return found if _differ(found, sums) else None

    def _shown(self, group: int) -> torch.Tensor:
        """What is in the place of a group's reduced gradient, flat."""
        return self._optimizer.averaged_gradients[group].flat_partition

    def follow(self, norm: torch.Tensor) -> None:
        """Step by the gradients, as others have judged them; what has none stays as it is."""
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
        """Put a copy of the reduced ``gradient`` in its place, cut as stock cuts it by parameters."""
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
        """Make this rank's part of the model's weights: now, since scripts may change masters behind a step, which is
        in no forward before the next.
        """
        optimizer = self._optimizer
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        optimizer.parallel_partitioned_bit16_groups[group][rank].data.copy_(self.parameters[group].data)

    def refresh_model(self) -> None:
        """Gather the model's weights of what each rank of the replica has made.  All of them call it."""
        optimizer = self._optimizer
        all_gather_dp_groups(
            groups_flat=optimizer.bit16_groups_flat,
            partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )


class PartitionedWeights(Partitions):
    """Stage 3: the flat fp32 partitions of ``optimizer``, one for each of its sub-groups.

    Outside of its own steps stock leaves torch's optimizer without parameters, so that nobody could say what its state
    is of; here they are in its groups.
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
        """Zero what stock has allocated beyond a parameter's end and nobody reads: replicas would differ in it."""
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
        optimizer.zero_grad(set_to_none=True)  # which begins to count micro-batches anew

    @contextmanager
    def backward(self) -> Iterator[Slots]:
        """As Partitions does; what was shown goes, which a micro-batch that leaves a weight out would keep else."""
        self._shows = False
        self._optimizer.grad_partitions_flat_buffer.zero_()
        with super().backward() as made:
            yield made

    def hide(self) -> None:
        """Show nothing any more, and have the next backward begin anew."""
        self._shows = False
        super().hide()

    def _if_shown(self, stock: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not self._shows:
            raise RecycleError(
                "gradients with recycle.replicas: a step's are there behind the backward of its last micro-batch "
                "(engine.is_gradient_accumulation_boundary()), as the sum over all replicas, and not before; ask for "
                "them there"
            )
        return stock(*arguments, **named)

    def show(self) -> None:
        """Show a script the sum where stock's functions for gradients look for it: in its own buffer, and dtype."""
        for group, whole in enumerate(self.gradients.view()):
            assert whole is not None, "all that is stepped was summed"
            for part, gradient in zip(self._places(group), self._cut(group, whole), strict=True):
                part.copy_(gradient)
        self._shows = True

    def _shown(self, group: int) -> torch.Tensor:
        return torch.cat(self._places(group))

    def _places(self, group: int) -> list[torch.Tensor]:
        """Where stock has the reduced gradients of a group's parameters."""
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
        """Do nothing: forwards gather what each rank has made."""


class Shard(torch.nn.Module):
    """The tensors of a shard as a module's parameters, by number."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        shards: Mapping[str, Any] = {f"shard{number}": tensor for number, tensor in enumerate(tensors)}
        self._parameters.update(shards)  # which are no nn.Parameters, and have to stay what stock has


def shards_of(engine: Any) -> Whole | Partitions:
    """The shard of this rank.  Raises RecycleError where stock has built another optimizer than is known."""
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
    """Whether a script has changed anything; where something is no number it may have."""
    if any((one is None) != (other is None) for one, other in zip(made, sums)):
        return True
    there = [torch.ne(one, other).any() for one, other in zip(made, sums) if one is not None and other is not None]
    return bool(there) and bool(fetch(torch.stack(there).any(), "whether a script has changed gradients"))


def _changed(shown: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """``gradient`` with what was changed in ``shown``, which has it in a dtype of its own."""
    assert gradient is not None, "what is shown was summed"
    if shown.dtype == gradient.dtype:
        return shown
    return torch.where(shown == gradient.to(shown.dtype), gradient, shown.to(gradient.dtype))


def _judged(optimizer: Any) -> torch.Tensor:
    """The norm by which stock has judged a step, without the loss scale, in its own dtype, on the host; not finite
    where it has skipped it.
    """
    if optimizer.overflow:
        return torch.tensor(float("inf"))
    norm = optimizer._global_grad_norm
    return fetch(norm, "a norm") if torch.is_tensor(norm) else torch.tensor(norm or 0.0)
