"""A device with an order of its own: work started on it is done later, stream by stream.

Layers and optimizers use the current stream, as everywhere in torch. Copies have a stream for each direction, so that
they run beside the computing, and large ones for which nobody waits have a third. Events alone order them with the
computing: no call here waits for the device, except a copy of host memory for which no pinned room is left.

A block of device memory that a copy uses on a foreign stream is recorded there. So torch reuses it only after the copy,
even if all references are gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.devices.host import CPU, on_host, plain
from recycle_plugin.runtime.devices.pinned import PinnedMemory
from recycle_plugin.runtime.devices.port import Copy, DeviceEvent, DeviceMemory, Order, Tensors

STREAMS = 32  # per priority, in torch (c10/cuda/CUDAStream.cpp)
SHORTEST_S, LONGEST_S = 20e-6, 200e-6  # between two polls of an event; a device may wait for its host meanwhile


class Accelerator:
    """The accelerator at ``where``, of any kind for which torch has streams and events (runtime/devices/port.py)."""

    def __init__(self, where: torch.device) -> None:
        self.where, self.kind, self.lags = where, where.type, True
        self._module: Any = torch.get_device_module(where)
        self._pinned = PinnedMemory()
        self._taken, self._taking = Counter[Any](), threading.Lock()  # orders by stream
        self._down, self._up, self._apart = copying = [self._free_stream() for _ in range(3)]
        self._taken.update(STREAMS * copying)  # the last ones to be shared: a stuck order would hold up all copies

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The host's default random generator, and the device's."""
        return torch.default_generator, self._module.default_generators[self.where.index]

    # --- copies ---------------------------------------------------------------------------------------

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool, apart: bool = False) -> Copy:
        """Start copying tensors to host memory, after all that the calling thread has started on the device. If they
        are not ``shared`` they may change at once: later work waits for the copy, on the device.
        """
        if all(map(on_host, tensors)):
            return CPU.to_host(tensors, what, shared=shared)
        down = self._apart if apart else self._down
        computing = self._module.current_stream(self.where)
        sources = [plain(tensor) for tensor in tensors]
        begun = self._mark(computing)
        with self._module.stream(down):
            stand_behind(down, begun)
            targets = tuple(self._from(source, shared, down) for source in sources)
            over = self._mark(down)
        if not shared:
            stand_behind(computing, over)
        return Downward(targets, over, f"{what}, to the host")

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Start copying tensors to the device; they are ready in the order of the thread that waits for the copy."""
        here = [tensor.detach() if shared or on_host(tensor) else tensor.detach().clone() for tensor in tensors]
        staged = [self._staged(tensor, shared) if on_host(tensor) else tensor for tensor in here]
        with self._module.stream(self._up):
            targets = tuple(self._to(each) if on_host(each) else each for each in staged)
            over = self._mark(self._up)
        return Upward(targets, over, f"{what}, to the device", lambda: self._module.current_stream(self.where))

    def _from(self, source: torch.Tensor, shared: bool, down: Any) -> torch.Tensor:
        if on_host(source):
            return CPU.to_host((source,), "", shared=shared).wait(0)[0]
        if source.layout is not torch.strided:
            return source.to(CPU.where)
        target = self.room(source.shape, source.dtype)
        source.record_stream(down)
        return target.copy_(source, non_blocking=target.is_pinned())

    def _staged(self, tensor: torch.Tensor, shared: bool) -> torch.Tensor:
        """Return host tensor ``tensor`` where a copy can read it while its owner goes on."""
        if tensor.layout is not torch.strided or (shared and tensor.is_pinned() and tensor.is_contiguous()):
            return tensor
        return self.room(tensor.shape, tensor.dtype).copy_(tensor)

    def _to(self, staged: torch.Tensor) -> torch.Tensor:
        if staged.layout is not torch.strided:
            return staged.to(self.where)
        return torch.empty_like(staged, device=self.where).copy_(staged, non_blocking=staged.is_pinned())

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in host memory, pinned within the budget."""
        with self._module.device(self.where):  # else threads that compute nothing would initialise the first device
            return self._pinned.room(shape, dtype)

    # --- events ---------------------------------------------------------------------------------------

    def event(self, what: object) -> DeviceEvent:
        """Mark the end of the work that the calling thread has started on the device so far."""
        return StreamEvent(self._mark(self._module.current_stream(self.where)), what)

    def order(self) -> Order:
        """Return the order of the stream that the calling thread computes on."""
        return StreamOrder(self._module, self._module.current_stream(self.where))

    def lane(self) -> Lane:
        """Return a new order beside all others, for another library's work on the device; see Lane.leave."""
        return Lane(self._module, self.where, self._free_stream(), self._leave_stream)

    def _free_stream(self) -> Any:
        """Return a stream that the fewest orders use: torch reuses streams after STREAMS."""
        with self._taking:
            streams = (self._module.Stream(self.where) for _ in range(STREAMS))
            stream = min(streams, key=self._taken.__getitem__)
            self._taken[stream] += 1
            return stream

    def _leave_stream(self, stream: Any) -> None:
        with self._taking:
            self._taken[stream] -= 1

    def _mark(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event

    # --- the rest -------------------------------------------------------------------------------------

    def memory(self) -> DeviceMemory:
        """Return how much of the device's memory all processes use together, and its size."""
        free, total = self._module.mem_get_info(self.where)
        return DeviceMemory(total - free, total)

    def arithmetic(self) -> str:
        """Describe the device's name, the releases of torch and its toolkit, and the precision of matrix products."""
        built = torch.version.cuda or torch.version.hip or ""
        return (
            f"{self._module.get_device_name(self.where)}, torch {torch.__version__}{built and f' with {built}'}, "
            f"{torch.get_float32_matmul_precision()} matrix products"
        )

    def budget(self, pinned: int | None, short: Callable[[int], None]) -> None:
        """Pin at most ``pinned`` bytes of host memory at a time; None: no limit. ``short`` is called with the size of
        the first piece that is not pinned because of that.
        """
        self._pinned.limit(sys.maxsize if pinned is None else pinned, short)

    def repeatable(self) -> None:
        """Have torch choose deterministic kernels, and refuse operations without one, by name."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic  # torch's stubs lack its attributes
        deterministic.fill_uninitialized_memory = False  # it costs a kernel per empty tensor


class StreamEvent:
    """A mark on a stream, after ``what``."""

    def __init__(self, event: Any, what: object) -> None:
        self._event, self._what = event, what

    def poll(self) -> bool:
        """Return whether the device has reached the mark; True also if it has failed."""
        return _over(self._event)

    def wait(self, timeout_s: float) -> None:
        """Return when the device has reached the mark; raises its error, or WaitTimeout past the deadline."""
        await_event(self._event, self._what, timeout_s)

    def since(self, earlier: StreamEvent) -> float:
        """Return the seconds between two reached marks, by the device's clock."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


class StreamOrder:
    """The order of a ``stream``; ``module``: torch's for the kind of device."""

    def __init__(self, module: Any, stream: Any) -> None:
        self._module, self._stream = module, stream

    def kept(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread computes on the stream."""
        made: AbstractContextManager[object] = self._module.stream(self._stream)
        return made

    def join(self) -> None:
        """Put later work of the calling thread after everything on the stream."""
        ours = self._module.current_stream(self._stream.device)
        if ours != self._stream:
            ours.wait_stream(self._stream)


class Lane:
    """A ``stream`` of the device at ``where``; ``module``: torch's for its kind; ``give_back(stream)`` frees it."""

    def __init__(self, module: Any, where: torch.device, stream: Any, give_back: Callable[[Any], object]) -> None:
        self._module, self.where, self._stream, self._give_back = module, where, stream, give_back

    def leave(self) -> None:
        """Free the stream for another lane. Nothing may be under way in this order, now or later."""
        self._give_back(self._stream)

    def mark(self) -> Any:
        """Mark the end of the work that the calling thread has started on the device so far."""
        event = self._module.Event()
        event.record(self._module.current_stream(self.where))
        return event

    def take_thread(self) -> None:
        """Make the calling thread use this device. Without this call the thread would initialise the first device."""
        self._module.set_device(self.where)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._module.device(self.where), self._module.stream(self._stream):
            yield

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Return a context in which the calling thread's device work is in this order, after ``mark``."""
        with self.alone():
            stand_behind(self._stream, mark)
            yield

    def event(self, what: object) -> StreamEvent:
        """Mark the end of the work started in this order so far."""
        event = self._module.Event()
        event.record(self._stream)
        return StreamEvent(event, what)


class Downward:
    """Tensors on their way to the host, complete once ``over`` has happened."""

    def __init__(self, targets: Tensors, over: Any, what: str) -> None:
        self._targets, self._over, self._what = targets, over, what
        self.nbytes = sum(target.nbytes for target in targets)

    def poll(self) -> bool:
        return _over(self._over)

    def wait(self, timeout_s: float) -> Tensors:
        """Return the tensors in host memory; raises the device's error, or WaitTimeout past the deadline."""
        await_event(self._over, self._what, timeout_s)
        return self._targets


class Upward(Downward):
    """Tensors on their way to the device; ``current()``: the stream that the calling thread computes on."""

    def __init__(self, targets: Tensors, over: Any, what: str, current: Callable[[], Any]) -> None:
        super().__init__(targets, over, what)
        self._current = current

    def wait(self, timeout_s: float) -> Tensors:
        """Return the tensors at once; later work of the calling thread is after the copy."""
        stream = self._current()
        stand_behind(stream, self._over)
        for target in self._targets:
            if target.layout is torch.strided:
                target.record_stream(stream)
        return self._targets


def stand_behind(stream: Any, event: Any) -> None:
    """Have later work on ``stream`` wait for ``event``, without blocking the host."""
    stream.wait_event(event)


def await_event(event: Any, what: object, timeout_s: float) -> None:
    """Return when ``event`` has happened; raises the device's error, or WaitTimeout, which names ``what``. Polls, since
    torch's own wait has no deadline.
    """
    until, pause = time.monotonic() + timeout_s, SHORTEST_S
    while not event.query():
        if time.monotonic() > until:
            raise WaitTimeout(f"waited {timeout_s:g} s for {what}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_S)
    event.synchronize()  # returns at once; torch.cuda._sanitizer does not count a query as ordering


def _over(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # of the device; the waiting caller gets it
        return True
