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

HOST = torch.device("cpu")  # the memory that other processes, files and networks can use
LARGE = 1 << 25  # bytes; malloc maps and unmaps larger blocks each time


class There(NamedTuple):
    """A copy that is already complete."""

    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def poll(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> Tensors:
        return self.tensors


class Done(NamedTuple):
    """An event that happened ``at`` that many seconds of time.perf_counter."""

    at: float

    def poll(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Return at once."""

    def since(self, earlier: Done) -> float:
        """Return the seconds since an earlier event."""
        return self.at - earlier.at


NOTHING: AbstractContextManager[object] = nullcontext()


class CallsInOrder:
    """The order of calls, in which work is done when its call returns, on any thread."""

    def kept(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return NOTHING

    def join(self) -> None:
        """Do nothing: all started work is done."""


IN_ORDER = CallsInOrder()


class Cpu:
    """The host itself as a device: work is done when its call returns. Its memory is the whole machine's."""

    where, kind, lags = HOST, HOST.type, False
    generators = (torch.default_generator,)

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool, apart: bool = False) -> Copy:
        """Return detached contiguous tensors; copies if their memory may not be shared."""
        return There(tuple([plain(tensor if shared else tensor.detach().clone()) for tensor in tensors]))

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Return detached tensors on the host; copies if their memory may not be shared."""
        return There(tuple([tensor.detach().to(HOST, copy=not shared) for tensor in tensors]))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in host memory. A large one uses huge pages if the system has them: a fault
        per page of 4 KiB takes several times as long as writing it.
        """
        numbers = prod(shape)
        if numbers * dtype.itemsize <= LARGE:
            return torch.empty(shape, dtype=dtype, device=HOST)
        memory = mmap.mmap(-1, numbers * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            pass
        return torch.frombuffer(memory, dtype=dtype, count=numbers).view(*shape)

    def event(self, what: object) -> DeviceEvent:
        return Done(time.perf_counter())

    def order(self) -> Order:
        return IN_ORDER

    def memory(self) -> DeviceMemory:
        """Return the machine's memory, used by all processes and in total."""
        found = psutil.virtual_memory()
        return DeviceMemory(found.total - found.available, found.total)

    def arithmetic(self) -> str:
        """Describe torch's version, its CPU capability, and its number of threads."""
        return (
            f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        )

    def budget(self, pinned: int | None, short: Callable[[int], None]) -> None:
        """Do nothing: a device that is the host needs no pinned memory."""

    def repeatable(self) -> None:
        """Do nothing: with a fixed number of threads operations are repeatable."""


CPU = Cpu()


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is in host memory."""
    return tensor.device.type == HOST.type


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, contiguous, with conjugation resolved; may run a kernel on the current stream."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous() if plain.layout is torch.strided else plain


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, in the order of its numbers, 1-D; a view of its memory if it is contiguous. To
    torch a lone number is contiguous whatever its stride, but only one with stride 1 can be viewed as bytes.
    """
    return (tensor.view(()).view(1) if tensor.numel() == 1 else tensor.reshape(-1)).view(torch.uint8)
