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
* a checkpoint that is written in the background: not shared, since training goes on meanwhile.

**Events** tell when work is done.  An instruction that computes waits for the one behind its work
(runtime/stage/operations.py), so that traces and compute times (core/worker/stopwatch.py), which the host's clock
measures, are of the work and not of its start, and a device that hangs is found at the instruction that it hangs in, by
name. That costs the device the time until the host has started the next instruction; copies go on meanwhile.  A
worker's heartbeats (runtime/control/heartbeats.py) say what its thread is at, and need no device.

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


class DeviceMemory(NamedTuple):
    """A device's memory in bytes; ``used`` counts all processes."""

    used: int
    total: int


class Device(Protocol):
    """What a worker computes on, for any thread.

    ``where`` is where tensors are made that it computes with, ``kind`` its name for torch.autocast.  Methods' ``what``
    is named by a wait that passes its deadline; only then is it made a text.
    """

    where: torch.device
    kind: str

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Start copying tensors, wherever they are, to host memory, contiguous and without a graph."""

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Start copying tensors, wherever they are, to the device, without a graph."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in host memory, of the kind from which a copy to the device is quickest."""

    def event(self, what: object) -> DeviceEvent:
        """Mark the end of the work that has been started on the device so far."""

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The default random generators that layers on the device draw from, the device's own last."""

    def memory(self) -> DeviceMemory:
        """How much of the device's memory is used, and how much there is."""

    def arithmetic(self) -> str:
        """A text of all that decides how operations round, besides their inputs: workers with the same text round
        alike.
        """


class There(NamedTuple):
    """A copy that has succeeded already."""

    tensors: Tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
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


class Cpu:
    """The host itself as a device: its work is done when a call returns.

    Its memory is the machine's, which other workers use too.
    """

    where, kind = HOST, HOST.type
    generators = (torch.default_generator,)

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Detached tensors, contiguous; copies where their memory may not be shared."""
        given = (tensor.detach() if shared else tensor.detach().clone() for tensor in tensors)
        return There(tuple(tensor.contiguous() if tensor.layout is torch.strided else tensor for tensor in given))

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        """Detached tensors on the host; copies where their memory may not be shared."""
        return There(tuple(tensor.detach().to(HOST, copy=not shared) for tensor in tensors))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in host memory."""
        return torch.empty(shape, dtype=dtype, device=HOST)

    def event(self, what: object) -> DeviceEvent:
        """An event that has happened now."""
        return Done(time.perf_counter())

    def memory(self) -> DeviceMemory:
        """The machine's memory, used by all processes and in total."""
        found = psutil.virtual_memory()
        return DeviceMemory(found.total - found.available, found.total)

    def arithmetic(self) -> str:
        """The torch version, the CPU capability that torch uses, and its number of threads."""
        return (
            f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        )


CPU = Cpu()
DEVICES: Mapping[str, Callable[[torch.device], Device]] = {HOST.type: lambda where: CPU}


def device_of(where: torch.device) -> Device:
    """The device that tensors on ``where`` are computed on.  Raises RecycleError where its kind is not supported."""
    check(where.type)
    return DEVICES[where.type](where)


def check(kind: str) -> None:
    """Raise RecycleError where devices of that kind are not supported."""
    if kind not in DEVICES:
        raise RecycleError(
            f"the accelerator is {kind}: process groups that lose members work over Gloo on the CPU only yet (NCCL "
            "comes later)"
        )


def supports(asked: str | None) -> bool:
    """Whether this process runs on a supported device: on the kind it was ``asked`` to, or on what torch finds."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (asked or (HOST.type if found is None else found.type)) in DEVICES


def in_use() -> bool:
    """Whether this process has begun to use an accelerator: from then on it must not be forked."""
    return torch.cuda.is_initialized()


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in host memory."""
    return tensor.device.type == HOST.type


def fetch(tensor: torch.Tensor, what: object, *, shared: bool = True) -> torch.Tensor:
    """Return ``tensor`` in host memory, wherever it is, once it is there; raises WaitTimeout after 300 s."""
    (found,) = device_of(tensor.device).to_host((tensor,), what, shared=shared).wait(COPY_S)
    return found
