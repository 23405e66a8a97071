"""The port to a collective group of one generation: connect it, start operations, leave them behind, break it.

A membership change finds operations that wait for who is gone, or for who has left them.  So nothing here blocks but
:meth:`Handle.wait`, which has a deadline, and what is started can be walked away from at any time.

**The buffers of an operation are its own**, from :meth:`Link.start` until its handle is over, and for ever once it was
left behind: threads of the link may go on reading and writing them.  They stay allocated as long, and nothing else is
touched.  So a caller that may be broken off, and needs a tensor afterwards, gives copies of it, and takes the result
from them when the handle has succeeded.

An implementation passes tests/support/link_port.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp

from recycle_plugin.errors import RecycleError, WaitTimeout


class Broken(RuntimeError):
    """A connection of the group has broken, or the group was aborted; who is lost, the coordinator says."""


# --- operations: every member of the link starts the same ones in the same order, but for sends and receives
# ------------- Members go by their position in the link.  Tensors are contiguous, and alike on all members where not
# said otherwise.


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """Combine ``tensors`` of all members by ``op``, in place, so that every member has the result."""

    tensors: Sequence[torch.Tensor]
    op: ReduceOp


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """Fill ``tensors`` of all members with those of ``root``, which are only read."""

    tensors: Sequence[torch.Tensor]
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """Collect everybody's ``source`` in ``outputs``, one for each member, on every member."""

    outputs: Sequence[torch.Tensor]
    source: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Collect everybody's ``source`` in ``outputs`` of ``root``, one for each member; elsewhere ``outputs`` is
    empty.
    """

    outputs: Sequence[torch.Tensor]
    source: torch.Tensor
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class ReduceScatter:
    """Combine everybody's ``source`` by ``op``, and give each member, as ``output``, its part of the result.

    There are as many equal parts as members.
    """

    output: torch.Tensor
    source: torch.Tensor
    op: ReduceOp


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Give each member its part of everybody's ``source``, in ``output``.

    ``outgoing`` and ``incoming`` are the parts' lengths in the first dimension, empty where all are equal; they may
    differ from member to member.
    """

    output: torch.Tensor
    source: torch.Tensor
    incoming: Sequence[int]
    outgoing: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """Wait until all members have started it."""


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Send ``tensor`` to member ``to``; it may be over before it is received.

    With one ``tag`` nothing overtakes anything else to the same member.
    """

    tensor: torch.Tensor
    to: int
    tag: int


@dataclass(frozen=True, slots=True, eq=False)
class Receive:
    """Receive into ``tensor`` from member ``source``, or with None from any one, whom the handle then names."""

    tensor: torch.Tensor
    source: int | None
    tag: int


def unheard() -> None:
    """What is called where nobody wants to know that an operation was launched."""


Operation = AllReduce | Broadcast | AllGather | Gather | ReduceScatter | AllToAll | Barrier | Send | Receive


class Handle:
    """Something under way on a link, named ``what``; any thread may use it.

    ``error`` is the one with which it is over, if any; ``source`` the member from which a :class:`Receive` has come.
    """

    def __init__(self, what: Callable[[], str] | str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._over = self._left = False
        self._tell: list[Callable[[], object]] = []
        self.error: Exception | None = None
        self.source: int | None = None

    @property
    def what(self) -> str:
        """What it is, in words, as messages name it."""
        return self._what if isinstance(self._what, str) else self._what()

    def poll(self) -> bool:
        """Whether it is over, well or badly; never so once it was left behind."""
        return self._over

    def wait(self, timeout_s: float) -> None:
        """Return when it has succeeded.

        Raises its error, WaitTimeout past the deadline (it goes on), RecycleError where it was left behind.
        """
        if not self._over and not self._left:
            over = threading.Event()
            self.when_over(over.set)
            if not over.wait(timeout_s) and not self._left:
                raise WaitTimeout(f"waited {timeout_s:g} s for {self.what}")
        if self._left:
            raise RecycleError(f"{self.what} was left behind")
        if self.error is not None:
            raise self.error

    def leave(self) -> bool:
        """Abandon it: its result is not wanted any more.  Returns False, and changes nothing, if it was over
        already.
        """
        return self._finish(left=True)

    def when_over(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` once, in any thread, when it is over or left behind; at once where it already is.

        ``tell`` must not block.
        """
        with self._lock:
            if not self._over and not self._left:
                self._tell.append(tell)
                return
        tell()

    def end(self, error: Exception | None = None, source: int | None = None) -> None:
        """Called by the link: it is over.  Only the first end counts, and none once it was left behind."""
        self._finish(error, source)

    def _finish(self, error: Exception | None = None, source: int | None = None, left: bool = False) -> bool:
        with self._lock:
            if self._over or self._left:
                return False
            self.error, self.source, self._left, self._over = error, source, left, not left
            tell, self._tell = self._tell, []
        for one in tell:
            one()
        return True


class Link(Protocol):
    """A collective group of the members of one ``generation``.

    A member's death breaks what others have under way with that member itself, unless their tensors are on an
    accelerator.  There, and if a member waits for a live one, which in turn waits for the dead, it may not hear of it
    before somebody aborts.
    """

    generation: int

    @property
    def connected(self) -> bool:
        """Whether the connections to all members stand."""

    def connect(self) -> Handle:
        """Start connecting to the other members.  The handle, always the same one, names whoever has not come."""

    def start(self, operation: Operation, launched: Callable[[], object] = unheard) -> Handle:
        """Begin ``operation`` once connected, after all that was started before.

        ``launched()`` is called, in any thread, once it can't fail to begin any more; it must not block.  The handle
        ends with the operation's error: :class:`Broken`, or what says that the group can't do it.
        """

    def abort(self) -> Handle:
        """Break the connections: whoever waits for one of its handles gets :class:`Broken`, here at once and elsewhere
        as soon as it is known there.  Returns at once; until the handle is over, the device may be stuck.
        """


def done() -> Handle:
    """What is over from the beginning."""
    handle = Handle("nothing")
    handle.end()
    return handle


def with_values(options: Any, **values: Any) -> Any:
    """One of torch's objects of options, with these values."""
    for name, value in values.items():
        setattr(options, name, value)
    return options
