"""The port to what tensors are computed on: copies to and from host memory, events, random numbers, memory.

Nothing else names a kind of device; a test checks that. Work on a device may go on after the call that started it; this
module says what follows for others.

**Copies** are started and run by themselves. The caller says whether a tensor's memory may be ``shared``. If so, nobody
changes it before the copy is over, nor while the copy is in use; on the host there is then no copy at all. If not, the
caller may change it as soon as the call returns. The uses are:

* boundary tensors, for peers and for the store (runtime/worker/tiers.py): shared. A stage returns nothing that an
  optimizer, a layer or the next forward writes to (runtime/stage/stage.py copies such tensors), and nobody changes a
  stored tensor in place. So any thread can send them from where they were made;
* a peer's tensors, for the stage: shared. Layers get copies (runtime/stage/boundary.py);
* a script's batches, kept (runtime/movers/batches.py) or passed to layers (runtime/stage/boundary.py): not shared,
  since loaders and layers write to them. A LOAD of a batch that is kept is: its F makes the copy for layers;
* bytes for hashes and for other workers (runtime/state/stage_state.py), and single numbers: shared, since they are read
  before the thread goes on;
* undo records in host memory (runtime/state/undo/snapshot.py): shared. They are read while nothing changes them, and
  made anew if something has;
* a checkpoint written in the background: not shared, since training goes on meanwhile.

**Events** tell whether, and when, work was done. The host is at most one instruction ahead of its device
(runtime/devices/timeline.py). That keeps the device busy, and a worker that hears of a loss waits for one instruction
only. Traces and compute times (core/worker/stopwatch.py) measure the device's work by its own events, and a hanging
device is found at the instruction that hangs, by name. Heartbeats (runtime/control/heartbeats.py) report what the
worker's thread does, and need no device.

**The host waits for the device only if it needs a number, and then by a copy and an event with a deadline**: the loss
and the norm's share of a step, sums over the network, a script's collectives, hashes, files, and the end of a step's
STEP. A test counts all other waits (tests/cluster/test_accelerator.py).

An implementation passes tests/runtime/test_device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

Tensors = tuple[torch.Tensor, ...]
COPY_S = 300.0  # longest wait for a copy


class Copy(Protocol):
    """A copy of tensors that is under way; any thread may use it."""

    @property
    def nbytes(self) -> int:
        """The size of all its tensors in bytes."""

    def poll(self) -> bool:
        """Return whether it is over, also with an error."""

    def wait(self, timeout_s: float) -> Tensors:
        """Return the tensors; raises the copy's error, or WaitTimeout past the deadline (it goes on).

        Tensors on the device are for its later work: a device with its own order may return them early, and put that
        work after the copy.
        """


class DeviceEvent(Protocol):
    """A mark after the work that was started on a device before it."""

    def poll(self) -> bool:
        """Return whether the work before it is done, or never will be."""

    def wait(self, timeout_s: float) -> None:
        """Return when the work before it is done; raises that work's error, or WaitTimeout past the deadline."""

    def since(self, earlier: Any) -> float:
        """Return the seconds between two events of one device that have both happened."""


class Order(Protocol):
    """The order in which a device does the work that a thread has started on it."""

    def kept(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread's work is done in this order."""

    def join(self) -> None:
        """Have the calling thread's later work done after everything started in this order."""


class DeviceMemory(NamedTuple):
    """A device's memory in bytes; ``used`` counts all processes."""

    used: int
    total: int


class Device(Protocol):
    """What a worker computes on; any thread may use it.

    ``where``: the place of its tensors; ``kind``: its name for torch.autocast; ``lags``: work may go on after the call
    that started it. Methods' ``what`` names a wait in errors; it is made a text only then.
    """

    where: torch.device
    kind: str
    lags: bool

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool, apart: bool = False) -> Copy:
        """Start copying tensors from anywhere to host memory, contiguous and detached. ``apart``: no other copy waits
        for this one.
        """

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Start copying tensors from anywhere to the device, without a graph."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in host memory, of the kind that is fastest to copy to the device."""

    def event(self, what: object) -> DeviceEvent:
        """Mark the end of the work started on the device so far."""

    def order(self) -> Order:
        """Return the order of the calling thread's present work on the device."""

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The default random generators that layers on the device draw from, the device's own last."""

    def memory(self) -> DeviceMemory:
        """Return how much of the device's memory is used, and its size."""

    def arithmetic(self) -> str:
        """Describe all that decides how operations round, besides their inputs: equal texts mean equal rounding."""

    def budget(self, pinned: int | None, short: Callable[[int], None]) -> None:
        """Pin at most ``pinned`` bytes of host memory at a time; None: no limit. Beyond that :meth:`room` returns
        ordinary memory; ``short`` is called with the first size for which it does.
        """

    def repeatable(self) -> None:
        """Have each operation of the whole process give the same bits whenever it is run, from now on."""
