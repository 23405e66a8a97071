"""What torch finds as ``torch.standin``: the functions that ``torch.cuda`` has, as far as they are called here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tests.support.standin_build import native

NAME = "standin"
extension = native()

Where = torch.device | str | int | None

default_generators = tuple(extension.default_generator(index) for index in range(extension.device_count()))


class Properties(NamedTuple):
    name: str
    total_memory: int
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # torch.utils.checkpoint looks at it
        return is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _index(device: Where) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# ---- devices ----


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return extension.in_use()


def init() -> None:
    extension.use()


_lazy_init = init  # torch calls it before it makes a tensor


def _is_in_bad_fork() -> bool:
    return extension.in_bad_fork()


def device_count() -> int:
    """How many devices there are: RECYCLE_TEST_STANDIN_DEVICES, or one."""
    return extension.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Where) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextmanager
def device(device: Where) -> Iterator[None]:
    """Choose this thread's device for a while; -1 leaves it."""
    before, index = current_device(), _index(device)
    if index >= 0:
        set_device(index)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Where = None) -> str:
    return "stand-in accelerator"


def get_device_properties(device: Where = None) -> Properties:
    return Properties(get_device_name(device), extension.capacity())


def get_device_capability(device: Where = None) -> tuple[int, int]:
    return 0, 0


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


# ---- streams and events ----


def Stream(device: Where = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(torch.device(NAME, _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: Where = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Where = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE)


_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Choose this thread's stream for a while; None leaves it."""
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize(device: Where = None) -> None:
    torch.accelerator.synchronize(_index(device))


# ---- random numbers ----


def get_rng_state(device: Where = NAME) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Where = NAME) -> None:
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, new_states):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> None:
    """Seed this thread's device's default generator with a number of nobody's choice."""
    default_generators[current_device()].seed()


def seed_all() -> None:
    """Seed all default generators with one number of nobody's choice."""
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


# ---- memory ----


def memory_allocated(device: Where = None) -> int:
    """Bytes of the tensors that live on a device, exactly."""
    return extension.allocated(_index(device))


def max_memory_allocated(device: Where = None) -> int:
    """The most bytes that have lived on a device at once."""
    return extension.most_allocated(_index(device))


def reset_peak_memory_stats(device: Where = None) -> None:
    """Measure the most bytes from now on."""
    extension.reset_most_allocated(_index(device))


def memory_stats(device: Where = None) -> dict[str, int]:
    """Bytes now and at most, under the names of torch.cuda."""
    return dict(torch.accelerator.memory_stats(_index(device)))


def mem_get_info(device: Where = None) -> tuple[int, int]:
    return extension.capacity() - memory_allocated(device), extension.capacity()


def empty_cache() -> None:
    """Do nothing: freed memory is not kept."""


# Nothing is kept, nor rounded.
memory_reserved, max_memory_reserved, reset_max_memory_allocated = (
    memory_allocated,
    max_memory_allocated,
    reset_peak_memory_stats,
)
