"""The stand-in as DeepSpeed's accelerator.

It has the CPU accelerator's builders of native operators, since none may meet the device's memory.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.support.standin import NAME, device

# Functions of torch.standin that DeepSpeed's interface has too, with the same arguments.
SAME = (
    "set_device",
    "current_device",
    "device_count",
    "synchronize",
    "manual_seed",
    "manual_seed_all",
    "initial_seed",
    "stream",
    "current_stream",
    "default_stream",
    "empty_cache",
    "memory_allocated",
    "max_memory_allocated",
    "reset_max_memory_allocated",
    "memory_stats",
    "reset_peak_memory_stats",
    "memory_reserved",
    "max_memory_reserved",
    "is_available",
    "is_bf16_supported",
)


class AsCuda(str):
    """The stand-in's name, which is also equal to "cuda": so DeepSpeed does all that it does on CUDA alone."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "cuda" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class StandinAccelerator(CPU_Accelerator):
    """The stand-in as DeepSpeed sees it: a device that works on by itself, with streams, bf16 and fp16."""

    Stream = staticmethod(device.Stream)
    Event = staticmethod(device.Event)
    memory_cached = staticmethod(device.memory_reserved)
    max_memory_cached = staticmethod(device.max_memory_reserved)
    reset_max_memory_cached = staticmethod(device.reset_peak_memory_stats)

    # As torch pins memory for it, which the CPU's accelerator does without.
    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory
    _torch_pin_memory = DeepSpeedAccelerator._torch_pin_memory
    _torch_empty_pinned = DeepSpeedAccelerator._torch_empty_pinned

    def __init__(self) -> None:
        """Ask for NCCL, as on CUDA: collectives on the device need a backend that takes its place."""
        super().__init__()
        self._name = NAME
        self._communication_backend_name = "nccl"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return AsCuda(NAME) if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(NAME, device.current_device() if device_index is None else device_index)

    def current_device_name(self) -> str:
        return self.device_name(device.current_device())

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        device.set_rng_state(new_state, device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return device.get_rng_state(device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return device.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        return device.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return device.mem_get_info(device_index)[0]

    def is_fp16_supported(self) -> bool:
        return True

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager:
        raise NotImplementedError("the stand-in accelerator has no graphs")

    def create_op_builder(self, op_name: str) -> Any:
        """The builder of a native operator; none for collectives in the host's shared memory."""
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME


for name in SAME:
    setattr(StandinAccelerator, name, staticmethod(getattr(device, name)))
for kind, dtype in {
    "BFloat16": torch.bfloat16,
    "Byte": torch.uint8,
    "Double": torch.double,
    "Float": torch.float,
    "Half": torch.half,
    "Int": torch.int,
    "Long": torch.long,
}.items():
    setattr(StandinAccelerator, f"{kind}Tensor", functools.partial(torch.tensor, dtype=dtype, device=NAME))


def use() -> StandinAccelerator:
    """Make it DeepSpeed's accelerator in this process, before an engine is made."""
    made = StandinAccelerator()
    set_accelerator(made)
    return made
