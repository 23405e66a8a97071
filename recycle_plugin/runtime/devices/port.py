"""The port to what tensors are computed on: copies to and from host memory, events, random numbers, memory.

Nothing else names a kind of device; a test checks it.  Work on a device may go on after the call that has started it;
this module has what that changes for others.

**Copies** are started and go on by themselves.  Whoever gives a tensor says whether its memory may be ``shared``: then
nobody changes it before the copy is over, nor afterwards while the copy is of use, and on a device that is the host
there is no copy at all.  Otherwise the giver may change it as soon as the call returns, and the copy has memory of its
own.  Who needs what:

* boundary tensors, for peers and for the store (runtime/worker/tiers.py): shared.  A stage gives nothing that an
  optimizer, a layer or the next forward writes to (runtime/stage/stage.py copies such), and what is in a store is not
  changed in place.  So they are sent from where they were made, by any thread;
* what has come from a peer, for the stage: shared.  Layers get copies of it (runtime/stage/boundary.py);
* a script's batches, kept (runtime/movers/batches.py) or given to layers (runtime/stage/boundary.py): not shared, since
  loaders and layers write to them;
* bytes for hashes and for other workers (runtime/state/stage_state.py), and single numbers: shared, since they are read
  before the thread goes on;
* what takes a step back, in host memory (runtime/state/undo/snapshot.py): shared, since it is read while nothing
  changes it, and made anew where something has;
* a checkpoint that is written in the background: not shared, since training goes on meanwhile.

**Events** tell when work is done, and when it was.  The host is at most one instruction ahead of its device
(runtime/devices/timeline.py): that keeps the device busy, and a worker that hears of a loss waits for one instruction.
Traces and compute times (core/worker/stopwatch.py) are of the device's work, by its own events, and a device that hangs
is found at the instruction that it hangs in, by name.  A worker's heartbeats (runtime/control/heartbeats.py) say what
its thread is at, and need no device.

**The host never waits for the device but where it needs a number, and then by a copy and an event with a deadline**:
the loss and the share of the norm of a step, sums that go over the network, a script's collectives, hashes, files, and
the end of a step's STEP.  A test counts everything else (tests/cluster/test_accelerator.py).

An implementation passes tests/runtime/test_device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

Tensors = tuple[torch.Tensor, ...]
COPY_S = 300.0  # how long a copy may take that its thread waits for


class Copy(Protocol):
    """A copy of tensors that is under way, of ``nbytes`` bytes in all; any thread may use it."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes, of all tensors together."""

    def poll(self) -> bool:
        """Whether it is over, well or badly."""

    def wait(self, timeout_s: float) -> Tensors:
        """The tensors; raises the copy's error, or WaitTimeout past the deadline (it goes on).

        Those on the device are for what it computes from now on: a device with an order of its own may return them
        earlier, and put that behind the copy.
        """


class DeviceEvent(Protocol):
    """A mark behind the work that was started on a device before it."""

    def poll(self) -> bool:
        """Whether the work before it is done, or never will be."""

    def wait(self, timeout_s: float) -> None:
        """Return when the work before it is done; raises what that has failed with, WaitTimeout past the deadline."""

    def since(self, earlier: Any) -> float:
        """Seconds between two events of one device, both of which have happened."""


class Order(Protocol):
    """The order in which a device does what some thread has started on it."""

    def kept(self) -> AbstractContextManager[object]:
        """A context: what the calling thread starts inside is done in this order."""

    def join(self) -> None:
        """Have what the calling thread starts from now on done behind all that was started in this order."""


class DeviceMemory(NamedTuple):
    """A device's memory in bytes; ``used`` counts all processes."""

    used: int
    total: int


class Device(Protocol):
    """What a worker computes on, for any thread.

    ``where`` is where tensors are made that it computes with, ``kind`` its name for torch.autocast.  ``lags``: its work
    may go on after the call that has started it.  Methods' ``what``
    is named by a wait that passes its deadline; only then is it made a text.
    """

    where: torch.device
    kind: str
    lags: bool

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool, apart: bool = False) -> Copy:
        """Start copying tensors, wherever they are, to host memory, contiguous and without a graph.

        ``apart``: no other copy stands behind it.
        """

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Start copying tensors, wherever they are, to the device, without a graph."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in host memory, of the kind from which a copy to the device is quickest."""

    def event(self, what: object) -> DeviceEvent:
        """Mark the end of the work that has been started on the device so far."""

    def order(self) -> Order:
        """The order of what the calling thread starts on the device now."""

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The default random generators that layers on the device draw from, the device's own last."""

    def memory(self) -> DeviceMemory:
        """How much of the device's memory is used, and how much there is."""

    def arithmetic(self) -> str:
        """A text of all that decides how operations round, besides their inputs: workers with the same text round
        alike.
        """

    def budget(self, pinned: int | None, short: Callable[[int], None]) -> None:
        """Pin at most that many bytes of host memory at a time, or with None as many as there are.

        More :meth:`room` is of the ordinary kind; ``short`` is called with the size of the first that is.
        """

    def repeatable(self) -> None:
        """Have each operation give the same bits whenever it is run, from now on, in the whole process."""
