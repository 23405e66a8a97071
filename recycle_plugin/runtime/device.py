"""The port to what tensors are computed on: copies to and from host memory, events, random numbers, memory.

Nothing else names a kind of device; a test checks it.  Work on a device may go on after the call that has started it;
what stands here is what that changes for others.

**Copies** are started and go on by themselves.  Whoever gives a tensor says whether its memory may be ``shared``: then
nobody changes it before the copy is over, nor afterwards while the copy is of use, and on a device that is the host
there is no copy at all.  Otherwise the giver may change it as soon as the call returns, and the copy has memory of its
own.  Who needs what:

* boundary tensors, for peers and for the store (tiers.py): shared.  A stage gives nothing that an optimizer, a layer or
  the next forward writes to (worker/stage.py copies such), and what is in a store is not changed in place.  So they are
  sent from where they were made, by any thread;
* what has come from a peer, for the stage: shared.  Layers get copies of it (boundary.py);
* a script's batches, kept (batches.py) or given to layers (boundary.py): not shared, since loaders and layers write to
  them;
* bytes for hashes and for other workers (state.py), and single numbers: shared, since they are read before the thread
  goes on;
* a checkpoint that is written in the background: not shared, since training goes on meanwhile.

**Events** tell when work is done.  An instruction that computes waits for the one behind its work
(worker/operations.py), so that traces and a worker's pace (core/worker/stopwatch.py), which the host's clock measures,
are of the work and not of its start, and a device that hangs is found at the instruction that it hangs in, by name.
That costs the device the time until the host has started the next instruction; copies go on meanwhile.  A worker's
beats (heart.py) say what its thread is at, and need no device.

An implementation passes tests/runtime/test_device.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from recycle_plugin.errors import RecycleError

Tensors = tuple[torch.Tensor, ...]
COPY_S = 300.0  # how long a copy may take that its thread waits for
HOST = torch.device("cpu")  # where memory is that other processes, files and networks can be given


class Copy(Protocol):
    """Of tensors, under way.  May be used by any thread.  ``nbytes``: of all."""

    @property
    def nbytes(self) -> int: ...

    def poll(self) -> bool:
        """Whether it is over, well or badly."""

    def wait(self, timeout_s: float) -> Tensors:
        """The tensors.  Raises its error, WaitTimeout past the deadline (it goes on).

        Those on the device are for what it computes from now on: a device with an order of its own may return them
        earlier, and put that behind the copy.
        """


class DeviceEvent(Protocol):
    """Behind the work that was started before it."""

    def poll(self) -> bool:
        """Whether it has happened, or never will."""

    def wait(self, timeout_s: float) -> None:
        """Return when it has.  Raises what the work has failed with, WaitTimeout past the deadline."""

    def since(self, earlier: Any) -> float:
        """Seconds between two of a device that have happened."""


class DeviceMemory(NamedTuple):
    """In bytes; ``used`` by whatever process."""

    used: int
    total: int


class Device(Protocol):
    """``where`` tensors are made that it computes with; ``kind``: what torch.autocast calls it.

    May be used by any thread.

    ``what``: named by a wait that passes its deadline; it is made a text then.
    """

    where: torch.device
    kind: str

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Copies in host memory, contiguous and without a graph; of such as are on the host already too."""

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Copies on the device, without a graph; of such as are there already too."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """In host memory, from which a copy is quickest."""

    def event(self, what: object) -> DeviceEvent: ...

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The default ones that layers on it draw from, the device's own last."""

    def memory(self) -> DeviceMemory: ...

    def arithmetic(self) -> str:
        """What decides how its operations round, besides their inputs: workers with the same text round alike."""


class There(NamedTuple):
    """A copy that is over well."""

    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def poll(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> Tensors:
        return self.tensors


class Done(NamedTuple):
    """An event that has happened, ``at`` seconds."""

    at: float

    def poll(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        pass

    def since(self, earlier: Done) -> float:
        return self.at - earlier.at


class Cpu:
    """The host itself: its work is done when a call returns.

    Its memory is the machine's, which other workers use too.
    """

    where, kind = HOST, HOST.type
    generators = (torch.default_generator,)

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        given = (tensor.detach() if shared else tensor.detach().clone() for tensor in tensors)
        return There(tuple(tensor.contiguous() if tensor.layout is torch.strided else tensor for tensor in given))

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        return There(tuple(tensor.detach().to(HOST, copy=not shared) for tensor in tensors))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=HOST)

    def event(self, what: object) -> DeviceEvent:
        return Done(time.perf_counter())

    def memory(self) -> DeviceMemory:
        found = psutil.virtual_memory()
        return DeviceMemory(found.total - found.available, found.total)

    def arithmetic(self) -> str:
        return (
            f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        )


CPU = Cpu()
DEVICES: Mapping[str, Callable[[torch.device], Device]] = {HOST.type: lambda where: CPU}


def device_of(where: torch.device) -> Device:
    """The one that tensors on ``where`` are computed on.  RecycleError where it is of a kind that is not supported."""
    check(where.type)
    return DEVICES[where.type](where)


def check(kind: str) -> None:
    """Raises RecycleError where there is no device of that kind."""
    if kind not in DEVICES:
        raise RecycleError(
            f"the accelerator is {kind}: process groups that lose members work over Gloo on the CPU only yet (NCCL "
            "comes later)"
        )


def supports(asked: str | None) -> bool:
    """Whether this process runs on a device that is supported: on the kind it was ``asked`` to, or on what torch
    finds.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (asked or (HOST.type if found is None else found.type)) in DEVICES


def in_use() -> bool:
    """Whether this process has begun to use an accelerator: from then on it must not be forked."""
    return torch.cuda.is_initialized()


def on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == HOST.type


def fetch(tensor: torch.Tensor, what: object, *, shared: bool = True) -> torch.Tensor:
    """``tensor`` in host memory, wherever it is."""
    (found,) = device_of(tensor.device).to_host((tensor,), what, shared=shared).wait(COPY_S)
    return found
