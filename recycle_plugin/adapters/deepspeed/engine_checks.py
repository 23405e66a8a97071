"""Checks before an engine is built: each refusal is one line that tells what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import has_moe_layers
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing

from recycle_plugin.adapters.deepspeed import ties
from recycle_plugin.adapters.deepspeed.engine import layer_specs
from recycle_plugin.adapters.deepspeed.refusals import FP16, half, refusals, sizes
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices import kinds
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.stage.fitness import check_layers
from recycle_plugin.settings.wording import SECTION


def check_config(config: dict[str, Any], model: Any, optimizer: Any, parameters: Any) -> None:
    """Raise RecycleError for a job that is not supported. ``config`` is the whole DeepSpeed config."""
    if not isinstance(model, PipelineModule):
        raise RecycleError(
            f"recycle.enabled needs a deepspeed.pipe.PipelineModule, and the model is a {type(model).__name__}: for a "
            'model without a pipeline set recycle.unit to "replica" and recycle.replicas to how many there are'
        )
    _check_device()
    _refuse(refusals(config))
    _check_half(config)
    _check_layers(model)
    _check_real(model, config)
    if optimizer is None and not config.get("optimizer"):
        raise RecycleError(
            'there is no optimizer: add an "optimizer" section to the DeepSpeed config, or pass optimizer= to '
            "deepspeed.initialize"
        )
    _check_module(model, parameters, (config.get(SECTION) or {}).get("log") is not None)
    _refuse(sizes(config))


def _refuse(wrong: Iterator[str]) -> None:
    for line in wrong:
        raise RecycleError(line)


def backend() -> str:
    """Return the communication backend that DeepSpeed asks for on this process's accelerator."""
    return get_accelerator().communication_backend_name()


def check_placement(placement: str, model: PipelineModule, given: str) -> None:
    """Raise RecycleError if it is too late for the setting ``placement``, or if it does not fit the module's topology.
    ``given``: how ranks were placed, when only the command line was known.
    """
    replicas = model.topology().get_axis_comm_lists("data")
    dims = [len(replicas[0]), len(replicas)]
    axes = f"give PipelineModule topology=ProcessTopology(axes=['data', 'pipe'], dims={dims})"
    if placement == "spread" and given != "spread":
        raise RecycleError(
            'recycle.placement "spread" came too late, ranks had been assigned before this config was read: put it '
            "into a file, and name that on the "
            f"script's command line with --deepspeed_config; or leave placement out, and {axes}"
        )
    if given == "spread" and any(
        ranks != list(range(ranks[0], ranks[0] + len(ranks))) for ranks in map(list, replicas)
    ):
        raise RecycleError(
            'recycle.placement "spread" puts neighbouring ranks on different hosts, but in the topology of this '
            "PipelineModule the replicas of a stage "
            "are not neighbouring ranks: leave one of the two out"
        )


def check_dataset(dataset: Any) -> None:
    """Raise RecycleError for ``training_data`` without access by index. IterableDataset's __getitem__ does not work."""
    iterable = isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    )
    if dataset is not None and iterable:
        raise RecycleError(
            f"training_data is a {type(dataset).__name__}, which cannot be read by index: give a map-style dataset, "
            "or pass an iterator to train_batch(data_iter=…)"
        )


def _check_device() -> None:
    try:
        kinds.check(get_accelerator().device_name())
    except RecycleError as error:
        raise RecycleError(
            f"{error}; set the environment variable DS_ACCELERATOR={HOST.type}, or recycle.enabled to false"
        ) from None


def _check_module(model: PipelineModule, parameters: Any, logs: bool) -> None:
    ties.check(layer_specs(model))
    grid = model.mpu()
    if grid.slice_parallel_size > 1:
        raise RecycleError(
            "tensor parallelism above 1 is not supported yet: build the PipelineModule with a topology of the axes "
            "pipe and data only"
        )
    if grid.pipe_parallel_size > len(layer_specs(model)):
        raise RecycleError(
            f"the pipeline has {grid.pipe_parallel_size} stages for {len(layer_specs(model))} layers, so that a stage "
            "would have none; "
            "use fewer stages, or give the model more layers"
        )
    if not any(True for _ in model.parameters()) or parameters == []:
        raise RecycleError(
            "a stage has no parameters for its optimizer, which DeepSpeed's optimizers refuse: "
            "give PipelineModule another partition_method or fewer stages, and pass frozen parameters to "
            "deepspeed.initialize as well (requires_grad = False is enough)"
        )
    if grid.data_parallel_size == 1 and not logs:
        raise RecycleError(
            "data parallelism is 1: a lost worker would have no peer to take its micro-batches; "
            "use at least twice as many ranks as pipeline stages, set recycle.log, so that a stage without a replica "
            "can be replayed, or set recycle.enabled to false"
        )


def _check_half(config: dict[str, Any]) -> None:
    """Refuse fp16 in one line where DeepSpeed would fail with a traceback."""
    accelerator = get_accelerator()
    if half(config) == FP16 and not accelerator.is_fp16_supported():
        raise RecycleError(
            f"fp16.enabled: DeepSpeed has no fp16 on this device, {accelerator.device_name()}; "
            "set bf16.enabled to true instead, or use another device"
        )


def _check_real(model: PipelineModule, config: dict[str, Any]) -> None:
    """Refuse complex weights in bf16, fp16 and exact mode. Their imaginary part would be lost in fp32 masters, as in
    stock DeepSpeed, and Gloo's all-to-all takes no complex numbers.
    """
    why = (
        f"{name}'s master weights are real"
        if (name := half(config)) is not None
        else "recycle.exact sums real numbers only"
        if config.get(SECTION, {}).get("exact")
        else None
    )
    name = next(
        (name for name, parameter in model.named_parameters() if parameter.is_complex() and parameter.requires_grad),
        None,
    )
    if name is not None and why is not None:
        raise RecycleError(
            f"{name} is complex, and {why}: leave that out, or keep the weight as a real parameter, and "
            "torch.view_as_complex it in the forward"
        )


def _check_layers(model: PipelineModule) -> None:
    """Refuse layers that would train differently from stock DeepSpeed, or depend on which worker computes them."""
    if has_moe_layers(model)[0]:
        raise RecycleError(
            "deepspeed.moe layers send tokens between replicas, which may be lost, and are not supported; use dense "
            "layers, or set recycle.enabled to false"
        )
    if type(model).get_additional_losses is not PipelineModule.get_additional_losses:
        raise RecycleError(
            f"{type(model).__name__}.get_additional_losses: other losses than the one that is trained are not reported "
            "yet; leave the method out"
        )
    if checkpointing.CONTIGUOUS_CHECKPOINTING or checkpointing.PARTITION_ACTIVATIONS:
        raise RecycleError(
            "deepspeed.checkpointing.configure with contiguous_checkpointing or partition_activations needs "
            "DeepSpeed's own schedule, or tensor parallelism; "
            "leave both out"
        )
    check_layers(model)
