"""Run Megatron-LM's training loop on a machine without CUDA.

Many literals of that loop say ``device="cuda"``. With this module they mean the CPU; the random state, streams and
memory counts that the loop asks CUDA for are the host's, or do nothing. ``torch.cuda.is_available`` stays false, and
nothing of torch.distributed, of the schedule or of an optimizer is touched. The replacements hold for the whole
process, which computes on the CPU only.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from recycle_plugin.adapters.unlaunched import AfterImport

CPU = torch.device("cpu")
KERNELS = (
    "megatron.core.transformer.moe.ops.paged_stash",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)
"""Modules of triton kernels, which Megatron-LM imports in every job, but does not call on a CPU."""


def wanted() -> bool:
    """Return whether this job computes on the CPU."""
    return not torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cpu") == "cpu"


def apply() -> None:
    """Prepare torch, and Megatron-LM once it is imported; a second call does nothing."""
    if hasattr(torch.Tensor.cuda, "recycle"):
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron compiles small functions, 10 s a process
    _torch()
    _without_triton()
    AfterImport(
        {
            "megatron.core.tensor_parallel.random": _random,
            "megatron.training.initialize": _initialize,
            "megatron.training.training": _training,
        }
    ).install()


class _Stream:
    """A stream that completes all work at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``factory`` with CUDA devices read as the CPU, and without pinned memory."""

    @functools.wraps(factory)
    def made(*arguments: Any, **named: Any) -> torch.Tensor:
        device = named.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            named["device"] = CPU
        named.pop("pin_memory", None)
        return factory(*arguments, **named)

    return made


def _torch() -> None:
    cuda: Any = torch.cuda
    for name in ("tensor", "zeros", "ones", "full", "rand", "empty"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    def stays(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self

    stays.recycle = True  # type: ignore[attr-defined]
    torch.Tensor.cuda = stays  # type: ignore[method-assign, assignment]
    kind = torch.Tensor.type  # Megatron sorts and checks by types such as "torch.cuda.FloatTensor"
    torch.Tensor.type = lambda self, *to, **how: (  # type: ignore[method-assign, assignment]
        kind(self, *to, **how) if to or how else kind(self).replace("torch.", "torch.cuda.", 1)
    )
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1  # at 0 Megatron makes no process groups and no random streams
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.manual_seed = torch.default_generator.manual_seed
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=10, minor=0)
    cuda.Stream = _Stream
    cuda.current_stream = cuda.stream = lambda *_: _Stream()


def _without_triton() -> None:
    """Put empty modules in the place of those that need triton, if triton is missing."""
    if find_spec("triton") is not None:
        return
    for name in KERNELS:
        empty = ModuleType(name)
        empty.__getattr__ = functools.partial(_missing, name)  # type: ignore[method-assign]
        sys.modules.setdefault(name, empty)


def _missing(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{module}.{name} needs triton, which is not installed")

    return refuse


def _random(module: ModuleType) -> None:
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]


def _initialize(module: ModuleType) -> None:
    """Skip the compilation, whose fused kernels need nvcc, if a wheel has brought the datasets' index."""
    stock = module._compile_dependencies  # type: ignore[attr-defined]
    if find_spec("megatron.core.datasets.helpers_cpp") is not None:
        stock = lambda: None
    module._compile_dependencies = stock  # type: ignore[attr-defined]


def _training(module: ModuleType) -> None:
    stock = module.initialize_megatron  # type: ignore[attr-defined]
    module.initialize_megatron = functools.partial(stock, allow_no_cuda=True)  # type: ignore[attr-defined]
