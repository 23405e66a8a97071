"""The host itself as a device."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import NamedTuple

import psutil
import torch

from recycle_plugin.runtime.devices.port import Copy, DeviceEvent, DeviceMemory, Order, Tensors

HOST = torch.device("cpu")  # where memory is that other processes, files and networks can be given
LARGE = 1 << 25  # bytes: what malloc takes from the system, and gives back, each time


class There(NamedTuple):
    """A copy that has succeeded already."""

    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def poll(self) -> bool:
        """Always True: the copy is over."""
        return True

    def wait(self, timeout_s: float) -> Tensors:
        """The tensors, at once."""
        return self.tensors


class Done(NamedTuple):
    """An event that has happened, ``at`` that many seconds of time.perf_counter."""

    at: float

    def poll(self) -> bool:
        """Always True: the work is done."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Return at once: the work is done."""

    def since(self, earlier: Done) -> float:
        """Seconds between an earlier event and this one."""
        return self.at - earlier.at


class CallsInOrder:
    """The order of calls, which no thread can leave where all is done when a call returns."""

    def kept(self) -> AbstractContextManager[object]:
        """A context that changes nothing."""
        return nullcontext()

    def join(self) -> None:
        """Nothing: all that was started is done."""


class Cpu:
    """The host itself as a device: its work is done when a call returns.

    Its memory is the machine's, which other workers use too.
    """

    where, kind, lags = HOST, HOST.type, False
    generators = (torch.default_generator,)

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool, apart: bool = False) -> Copy:
        """Detached tensors, contiguous; copies where their memory may not be shared."""
        given = [tensor.detach() if shared else tensor.detach().clone() for tensor in tensors]
        return There(tuple([tensor.contiguous() if tensor.layout is torch.strided else tensor for tensor in given]))

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Detached tensors on the host; copies where their memory may not be shared."""
        return There(tuple([tensor.detach().to(HOST, copy=not shared) for tensor in tensors]))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in host memory.

        A large one is in huge pages where the system has them: a fault for each page of 4 KiB takes several times as
        long as what is then written there.
        """
        numbers = prod(shape)
        if numbers * dtype.itemsize <= LARGE:
            return torch.empty(shape, dtype=dtype, device=HOST)
        memory = mmap.mmap(-1, numbers * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
        return torch.frombuffer(memory, dtype=dtype, count=numbers).view(*shape)

    def event(self, what: object) -> DeviceEvent:
        """An event that has happened now."""
        return Done(time.perf_counter())

    def order(self) -> Order:
        """The order of calls."""
        return CallsInOrder()

    def memory(self) -> DeviceMemory:
        """The machine's memory, used by all processes and in total."""
        found = psutil.virtual_memory()
        return DeviceMemory(found.total - found.available, found.total)

    def arithmetic(self) -> str:
        """The torch version, the CPU capability that torch uses, and its number of threads."""
        return (
            f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        )

    def budget(self, pinned: int | None, short: Callable[[int], None]) -> None:
        """Nothing: none of the host's memory has to be pinned for a device that is the host."""

    def repeatable(self) -> None:
        """Nothing: operations with a fixed number of threads are."""


CPU = Cpu()


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in host memory."""
    return tensor.device.type == HOST.type
