"""Refusals for jobs of sharded replicas: one line for each unsupported setting, with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.moe.utils import has_moe_layers
from deepspeed.pipe import PipelineModule

from recycle_plugin.adapters.deepspeed.refusals import (
    FP16,
    half,
    of_checkpoints,
    of_optimizer,
    removed,
    section_of,
    sizes,
    value_of,
)
from recycle_plugin.errors import RecycleError
from recycle_plugin.settings.wording import shown

REPLICA = "recycle.replicas"
ZERO = {
    "offload_optimizer": "keeps a shard in host memory, where the exchange does not find its gradients",
    "offload_param": "keeps a shard in host memory, where the exchange does not find its gradients",
    "cpu_offload": "keeps a shard in host memory, where the exchange does not find its gradients",
    "zero_quantized_weights": "sends rounded weights inside a replica, and is not tried yet",
    "zero_quantized_nontrainable_weights": "sends rounded weights inside a replica, and is not tried yet",
    "zero_quantized_gradients": "sends rounded gradients inside a replica, and is not tried yet",
    "zenflow": "steps parameters apart from the others",
}
ELSEWHERE = {
    "torch_autocast.enabled": "is not tried yet; set bf16.enabled to true if you can",
    "amp.enabled": "is not supported; set bf16.enabled to true if you can",
    "expert_parallel.enabled": "sends tokens between ranks of a replica by groups of its own; leave it out",
    "hybrid_engine.enabled": "is an engine of its own; leave it out",
    "compile.deepcompile": "reduces gradients in the compiled backward; leave it out",
    "autotuning.enabled": "ends its trials in a forward; tune with recycle.enabled false",
    "data_efficiency.enabled": "counts steps by itself, which a replica that comes back has not seen; leave it out",
    "bf16.bf16_master_weights_and_grads": "keeps the shard in bf16, in which replicas' parts are not summed; leave it "
    "out",
    "bf16.bf16_optimizer_states": "keeps the shard in bf16, in which replicas' parts are not summed; leave it out",
}


def check(
    config: dict[str, Any],
    given: dict[str, Any],
    replicas: int,
    world: int,
) -> None:
    """Raise RecycleError for a job that is not supported, before its engine is built. ``config``: the whole DeepSpeed
    config. ``given``: the arguments of ``deepspeed.initialize``, by name.
    """
    lines = _of_config(config), sizes(config), _of_ranks(replicas, world), _of_arguments(config, given)
    for line in (line for each in lines for line in each):
        raise RecycleError(line)


def _of_config(config: dict[str, Any]) -> Iterator[str]:
    yield from _of_zero(section_of(config, "zero_optimization"))
    yield from _of_precision(config)
    for name, why in ELSEWHERE.items():
        if value_of(config, name):
            yield f"{name} with {REPLICA} {why}"
    for name in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        if (value_of(config, name) or 1) > 1:
            yield f"{name} above 1 with {REPLICA}: a replica is sharded by ZeRO only; leave it out"
    if not config.get("managed_gradient_accumulation", True):
        yield f"managed_gradient_accumulation false with {REPLICA}: the program says when a step is full; leave it out"
    if config.get("gradient_allreduce_op", "mean") != "mean":
        yield f'gradient_allreduce_op {shown(config["gradient_allreduce_op"])} with {REPLICA}: write "mean"'
    yield from of_optimizer(section_of(config, "optimizer"))
    if str(section_of(config, "optimizer").get("type", "")).lower() == "muon":
        yield f"optimizer Muon with {REPLICA} mixes gradients and momentum before they are exchanged; use AdamW"
    yield from of_checkpoints(section_of(config, "checkpoint"))
    yield from removed(config)


def _of_zero(section: dict[str, Any]) -> Iterator[str]:
    for name, why in ZERO.items():
        value = section.get(name)
        if value and not (isinstance(value, dict) and value.get("device", "") in ("none", None)):
            yield f"zero_optimization.{name} with {REPLICA} {why}; leave it out"
    if (section.get("zero_hpz_partition_size") or 1) > 1:
        yield (
            f"zero_optimization.zero_hpz_partition_size with {REPLICA}: a replica is such a partition itself; leave it "
            "out, and set recycle.replicas to as many replicas as there were partitions"
        )
    if (section.get("mics_shard_size") or 0) > 0:
        yield (
            "zero_optimization.mics_shard_size: DeepSpeed has removed MiCS; leave it out, and set recycle.replicas to "
            "the number of ranks divided by it"
        )


def _of_precision(config: dict[str, Any]) -> Iterator[str]:
    name = half(config)
    if name == FP16:
        yield f"fp16.enabled with {REPLICA} is not tried yet; set bf16.enabled to true instead, or train in fp32"
    elif name is not None and not section_of(config, "zero_optimization").get("stage", 0):
        yield (
            f"{name}.enabled at zero_optimization.stage 0 with {REPLICA}: its master weights are in another optimizer "
            "of DeepSpeed's; set stage to 1, which shards them inside a replica"
        )
    if name is not None and section_of(config, "data_types").get("grad_accum_dtype") is not None:
        yield f"data_types.grad_accum_dtype with {REPLICA}: micro-batches are added up in fp32; leave it out"


def _of_ranks(replicas: int, world: int) -> Iterator[str]:
    if world % replicas:
        yield (
            f"recycle.replicas is {replicas}, and the job has {world} ranks: each replica has equally many, so start a "
            f"multiple of {replicas}"
        )


def _of_arguments(config: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    model = given.get("model")
    if isinstance(model, PipelineModule):
        yield f"{REPLICA} with a PipelineModule, whose topology has its replicas already: leave recycle.replicas out"
        return
    if given.get("mpu") is not None or given.get("mesh_param") is not None:
        yield (
            f"mpu= or mesh_param= with {REPLICA}: a replica's ranks are DeepSpeed's data parallel group, and nothing "
            "else is parallel; leave it out"
        )
    if given.get("optimizer") is None and not config.get("optimizer"):
        yield (
            'there is no optimizer: add an "optimizer" section to the DeepSpeed config, or pass optimizer= to '
            "deepspeed.initialize"
        )
    if model is not None and has_moe_layers(model)[0]:
        yield f"deepspeed.moe layers with {REPLICA} send tokens by groups of their own; use dense layers"
    for name, part in model.named_modules() if model is not None else ():
        if getattr(part, "track_running_stats", False):
            yield (
                f"{name or 'the model'} with {REPLICA} keeps running statistics, which a rank that comes back would "
                "not have; use a normalisation without them (LayerNorm, GroupNorm), or track_running_stats=False"
            )
    if model is not None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        yield (
            f"deepspeed.zero.Init with {REPLICA} has sharded the model over all ranks, not over those of a replica: "
            "build it without, and deepspeed.initialize shards it"
        )
