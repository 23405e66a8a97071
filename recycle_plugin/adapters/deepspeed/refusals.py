"""What a DeepSpeed config asks for that is refused. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recycle_plugin.errors import RecycleError
from recycle_plugin.settings.wording import SECTION, shown

FP16 = "fp16"  # DeepSpeed's section


def refusals(config: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each unsupported entry of ``config``, the whole DeepSpeed config; it tells what to change.
    Raises RecycleError for sections that are no JSON objects.
    """
    yield from _precision(config)
    yield from _zero(config)
    yield from of_optimizer(section_of(config, "optimizer"))
    yield from of_checkpoints(section_of(config, "checkpoint"))
    yield from _bypassed(config)
    yield from _parallel(config)
    yield from removed(config)
    yield from _exact(config)


def sizes(config: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each wrong batch size, which DeepSpeed would refuse on every worker by an assertion."""
    given = {
        name: config.get(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    }
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield f"{name} is {shown(value)}; write a whole number of at least 1"
    if given["train_batch_size"] is None and given["train_micro_batch_size_per_gpu"] is None:
        yield (
            "the DeepSpeed config has neither train_batch_size nor train_micro_batch_size_per_gpu: "
            "write one of the two, with gradient_accumulation_steps"
        )


def section_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the section ``name`` of the config, {} if there is none. Raises RecycleError if it is no object."""
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise RecycleError(f"{name} is {shown(found)}; write an object, or leave it out")
    return found


def _precision(config: dict[str, Any]) -> Iterator[str]:
    for name in ("torch_autocast", "amp"):
        if section_of(config, name).get("enabled"):
            yield (
                f"{name}.enabled: only fp32, bf16 and fp16 are supported yet; remove the {name} section, "
                "and set bf16.enabled or fp16.enabled to true if you can"
            )
    precision = half(config)
    if precision is not None and precision != FP16 and section_of(config, FP16).get("enabled"):
        yield f"{precision}.enabled and {FP16}.enabled contradict each other: set one of them to false"
    elif precision is not None:
        yield from _half(config, precision)


def half(config: dict[str, Any]) -> str | None:
    """Return the name of the section that enables bf16 or fp16, else None. DeepSpeed has two names for bf16's."""
    return next((name for name in ("bf16", "bfloat16", FP16) if section_of(config, name).get("enabled")), None)


def _half(config: dict[str, Any], name: str) -> Iterator[str]:
    """Refuse options that contradict fp32 sums, masters and optimizer state, whatever stock code would do."""
    kind = FP16 if name == FP16 else "bf16"
    for key in (f"{kind}_master_weights_and_grads", "bf16_optimizer_states"):
        if section_of(config, name).get(key):
            yield (
                f"{name}.{key}: master weights, sums of gradients and the optimizer's state are fp32 with "
                "recycle.enabled; leave it out"
            )
    wanted = {"data_types.grad_accum_dtype": section_of(config, "data_types").get("grad_accum_dtype"),
              "communication_data_type": config.get("communication_data_type")}  # fmt: skip
    for key, value in wanted.items():
        if value not in (None, "fp32", "float32"):
            yield (
                f"{key} is {shown(value)}: {kind} gradients are summed in fp32 with recycle.enabled; "
                'write "fp32", or leave it out'
            )
    recycle = section_of(config, SECTION)
    if recycle.get("norm") == "deepspeed":
        yield f'recycle.norm "deepspeed" is for fp32: in {name} DeepSpeed\'s norm is over all stages; leave it out'
    if recycle.get("loss_scaling") and name != FP16:
        yield f"recycle.loss_scaling: {name} has fp32's range and needs no loss scale; set it to false"


def _zero(config: dict[str, Any]) -> Iterator[str]:
    section, recycle = section_of(config, "zero_optimization"), section_of(config, SECTION)
    stage = section.get("stage", 0)
    if stage == 1 and recycle.get("zero") != "replicate":
        yield (
            "zero_optimization.stage 1 shards the optimizer state, so that a lost worker's shard has no copy; set "
            'recycle.zero to "replicate" to keep '
            "it whole on every worker (with Adam 12 bytes a parameter instead of 12 / replicas), or stage to 0"
        )
    elif stage == 1:
        yield from _replicated(section, recycle)
    elif stage:
        yield f"zero_optimization.stage {stage} does not work with pipelines in DeepSpeed itself; set stage to 0"


def _replicated(section: dict[str, Any], recycle: dict[str, Any]) -> Iterator[str]:
    for key in ("offload_optimizer", "offload_param", "cpu_offload"):
        if section.get(key):
            yield (
                f'zero_optimization.{key} moves shards to the host, but with recycle.zero "replicate" there are none; '
                "leave it out"
            )
    if recycle.get("norm") == "deepspeed":
        yield (
            'recycle.norm "deepspeed" is for ZeRO stage 0: at stage 1 DeepSpeed\'s norm is over all stages; '
            "leave it out"
        )


def of_optimizer(section: dict[str, Any]) -> Iterator[str]:
    """Refuse optimizers that send gradients themselves, and DeepSpeed's Adam if it can't be compiled."""
    name = str(section.get("type", "")).lower()
    if name.startswith(("onebit", "zeroone")):
        yield (
            f"optimizer {section['type']} sends gradients by itself, to workers that may be lost; "
            "use Adam or AdamW with torch_adam: true"
        )
    if name not in ("adam", "adamw") or section_of(section, "params").get("torch_adam"):
        return
    advice = "set optimizer.params.torch_adam to true, which needs no compiler"
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        yield (
            f"optimizer {section['type']} is compiled by DeepSpeed at first use, and there is no C++ compiler; {advice}"
        )
        return
    stale = _stale_lock()
    if stale is not None:
        yield (
            f"{stale} is the lock of a DeepSpeed extension whose build died: DeepSpeed would wait for it for ever; "
            f"delete it, or {advice}"
        )


def of_checkpoints(section: dict[str, Any]) -> Iterator[str]:
    """Refuse ways to save whose files can't be waited for, can't be read by all, or are of another optimizer."""
    reasons = {
        "load_universal": "needs the files of a ZeRO optimizer, and only ZeRO stage 0 is supported yet",
        "use_node_local_storage": "keeps each host's files where the others can't read them, so that they are lost "
        "with their host",
        "writer": "writes files without telling when they are complete",
    }
    for name, reason in reasons.items():
        if section.get(name):
            yield f"checkpoint.{name} {reason}; leave it out"


BYPASSED = {
    "flops_profiler.enabled": "counts in DeepSpeed's own forward, which the plugin does not call; leave it out "
    "(recycle.trace times every instruction)",
    "wall_clock_breakdown": "times DeepSpeed's own instructions, which the plugin does not run, and would print zeros; "
    "set recycle.trace to true instead",
    "comms_logger.enabled": "counts what DeepSpeed sends, and the plugin sends activations and gradients itself; leave "
    "it out",
    "autotuning.enabled": "ends its trials in DeepSpeed's own forward, which the plugin does not call; tune with "
    "recycle.enabled false",
    "data_efficiency.enabled": "orders training_data, or drops tokens, by DeepSpeed's own loader and count of steps, "
    "which a peer could not repeat; "
    "order the data in engine.set_data_source(source), by its step",
    "zero_optimization.zenflow": "steps some parameters separately, by ZeRO's shards; leave it out",
    "compile.deepcompile": "compiles the backward, which the plugin splits and lets peers run again; leave it out",
    "activation_checkpointing.contiguous_memory_optimization": (
        "needs backwards in the order of DeepSpeed's own schedule; leave it out"
    ),
    "activation_checkpointing.partition_activations": "deals activations to tensor-parallel workers, which are not "
    "supported yet; leave it out",
}
REMOVED = (
    "curriculum_learning",
    "progressive_layer_drop",
    "eigenvalue",
    "quantize_training",
    "compression_training",
    "sparse_attention",
    "sparse_gradients",
    "elasticity",
    "nebula",
    "graph_harvesting",
)


def _bypassed(config: dict[str, Any]) -> Iterator[str]:
    """Refuse settings for DeepSpeed code that the plugin replaces: they would silently have no effect."""
    for name, reason in BYPASSED.items():
        if value_of(config, name):
            yield f"{name} {reason}"
    if not config.get("managed_gradient_accumulation", True):
        yield (
            "managed_gradient_accumulation false lets the script choose when to step, "
            "but a pipeline steps once per train_batch; leave it out"
        )


def _parallel(config: dict[str, Any]) -> Iterator[str]:
    for name in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        if (value_of(config, name) or 1) > 1:
            yield (
                f"{name} above 1 splits micro-batches or layers over workers, which is not supported yet; leave it out"
            )
    if value_of(config, "expert_parallel.enabled"):
        yield (
            "expert_parallel.enabled: mixtures of experts send tokens between replicas, which may be lost; leave it out"
        )


def removed(config: dict[str, Any]) -> Iterator[str]:
    """Refuse entries that newer releases have removed; some supported releases of DeepSpeed still take them."""
    for name in REMOVED:
        value = config.get(name)
        if value and not (isinstance(value, dict) and not value.get("enabled", True)):
            yield f"{name} is not supported, and newer releases of DeepSpeed have removed it; leave it out"


def _exact(config: dict[str, Any]) -> Iterator[str]:
    kind = config.get("communication_data_type")
    if kind is not None and str(kind).lower() != "fp32" and section_of(config, "recycle").get("exact"):
        yield (
            f"communication_data_type {shown(kind)} rounds gradients on their way, "
            "and recycle.exact adds them as they are; leave one of the two out"
        )


def value_of(config: dict[str, Any], name: str) -> Any:
    section, _, key = name.rpartition(".")
    return (section_of(config, section) if section else config).get(key)


def _stale_lock() -> Path | None:
    """Return a build lock in the cache of extensions that no live process holds, None if there is none."""
    default = Path.home() / ".cache" / "torch_extensions"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    return next((lock for lock in sorted(folder.glob("**/lock")) if not _held(lock)), None)


def _held(lock: Path) -> bool:
    """Whether a process of this user has the lock file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.resolve() == lock.resolve():
                return True
        except OSError:
            continue
    return False
