"""What is not supported is refused at the door, in one line that says what works and what to change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from recycle_plugin.runtime.errors import RecycleError


def check_config(config: dict[str, Any], model: Any) -> None:
    """Before the engine is built.  ``config``: the whole DeepSpeed config."""
    if not isinstance(model, PipelineModule):
        raise RecycleError(f"recycle.enabled needs a deepspeed.pipe.PipelineModule, and the model is a {type(model).__name__}")
    _check_device()
    _check_precision(config)
    _check_zero(config)
    _check_optimizer(config.get("optimizer") or {})
    _check_module(model)


def check_dataset(dataset: Any) -> None:
    """``training_data`` as the script gives it.  IterableDataset inherits a __getitem__ that is not there for use."""
    iterable = isinstance(dataset, torch.utils.data.IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
    if dataset is not None and iterable:
        raise RecycleError(
            f"training_data is a {type(dataset).__name__}, which cannot be read by index: give a map-style dataset; "
            "iterable datasets and plain iterators cannot be read again by a peer and come later"
        )


def _check_device() -> None:
    device = get_accelerator().device_name()
    if device != "cpu":
        raise RecycleError(
            f"the accelerator is {device}: process groups that lose members work over Gloo on the CPU only yet (NCCL comes later); "
            "set the environment variable DS_ACCELERATOR=cpu, or recycle.enabled to false"
        )


def _check_precision(config: dict[str, Any]) -> None:
    for name in ("bf16", "bfloat16", "fp16", "torch_autocast", "amp"):
        if (config.get(name) or {}).get("enabled"):
            raise RecycleError(f"{name}.enabled: only fp32 is supported yet (bf16 comes next); remove the {name} section or set enabled to false")


def _check_zero(config: dict[str, Any]) -> None:
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage == 1:
        raise RecycleError(
            "zero_optimization.stage 1 shards the optimizer state, so that a lost worker's shard has no copy; "
            "set stage to 0 (protected shards come later)"
        )
    if stage:
        raise RecycleError(f"zero_optimization.stage {stage} does not work with pipelines in DeepSpeed itself; set stage to 0")


def _check_optimizer(section: dict[str, Any]) -> None:
    """DeepSpeed's own Adam is compiled at first use: say so before the compiler does."""
    name = section.get("type", "").lower()
    if name not in ("adam", "adamw") or (section.get("params") or {}).get("torch_adam"):
        return
    advice = 'set optimizer.params.torch_adam to true, which needs no compiler'
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise RecycleError(f"optimizer {section['type']} is compiled by DeepSpeed at first use, and there is no C++ compiler; {advice}")
    stale = _stale_lock()
    if stale is not None:
        raise RecycleError(
            f"{stale} is the lock of a DeepSpeed extension whose build died: DeepSpeed would wait for it for ever; delete it, or {advice}"
        )


def _stale_lock() -> Path | None:
    """A build lock in the extensions' cache that no live process holds."""
    default = Path.home() / ".cache" / "torch_extensions"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    return next((lock for lock in sorted(folder.glob("**/lock")) if not _held(lock)), None)


def _held(lock: Path) -> bool:
    """Whether some process of this user has the lock file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.resolve() == lock.resolve():
                return True
        except OSError:
            continue
    return False


def _check_module(model: PipelineModule) -> None:
    tied = sorted({spec.key for spec in model._layer_specs if isinstance(spec, TiedLayerSpec)})
    if tied:
        raise RecycleError(f"tied layers ({', '.join(tied)}) couple stages and are not supported yet; use LayerSpec instead of TiedLayerSpec for now")
    tracking = [name for name, module in model.named_modules() if getattr(module, "track_running_stats", False)]
    if tracking:
        raise RecycleError(
            f"{tracking[0]} keeps running statistics, which a step that is run again would count twice; "
            "use a normalisation without them (LayerNorm, GroupNorm), or track_running_stats=False"
        )
    grid = model._grid
    if grid.slice_parallel_size > 1:
        raise RecycleError("tensor parallelism above 1 is not supported yet: build the PipelineModule with a topology of the axes pipe and data only")
    if grid.pipe_parallel_size > len(model._layer_specs):
        raise RecycleError(
            f"the pipeline has {grid.pipe_parallel_size} stages for {len(model._layer_specs)} layers, so that a stage would have none; "
            "use fewer stages, or give the model more layers"
        )
    if grid.data_parallel_size == 1:
        raise RecycleError(
            "data parallelism is 1: a lost worker would have no peer to take its micro-batches; "
            "use at least twice as many ranks as pipeline stages, or set recycle.enabled to false"
        )
