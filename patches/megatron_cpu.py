"""Run megatron-core 0.16's local spec on a machine without CUDA: one function has to change.

With ``use_cpu_initialization``, no fusions and an explicit mask (lab/training/gpt.py), a GPT asks for the CUDA device
in one place: the scratch buffer of attention scores. Nothing else is replaced, and nothing of torch. Random numbers
need no patch: see ``follow_default_generator`` in the adapter.
"""

from __future__ import annotations

import os
from functools import reduce
from operator import mul
from typing import Any

import torch

from recycle_plugin.patches import Patch
from recycle_plugin.runtime.devices.kinds import own_device


def _get_tensor(
    self: Any, tensor_shape: Any, dtype: torch.dtype, name: str, mem_alloc_context: Any = None
) -> torch.Tensor:
    """Return a view of a growing buffer on this job's device, with undefined values
    (``GlobalMemoryBuffer.get_tensor``).
    """
    length = reduce(mul, tensor_shape, 1)
    buffer = self.buffer.get((name, dtype))
    if buffer is None or buffer.numel() < length:
        where = own_device(os.environ.get("DS_ACCELERATOR")).where
        buffer = self.buffer[name, dtype] = torch.empty(length, dtype=dtype, device=where)
    return buffer[:length].view(*tensor_shape)


MEMORY_BUFFER = Patch(
    target="megatron.core.utils:GlobalMemoryBuffer.get_tensor",
    package="megatron-core",
    versions=">=0.16,<0.17",
    source_sha256="2b843a83eb762098e280232a8a6ad2a826f66ffbddd35a3ea5447b9035310b1d",
    replacement=_get_tensor,
)


def apply() -> None:
    """Apply the patch unless this job computes on CUDA. Raises ``PatchMismatch``."""
    if not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        MEMORY_BUFFER.apply()
