"""The port to a collective group of one generation: connect it, start operations, leave them behind, break it.

A membership change finds operations that wait for a lost member, or for one that has left them. So nothing here blocks
except :meth:`Handle.wait`, which has a deadline, and a caller can leave any operation at any time.

**The buffers of an operation are its own** from :meth:`Link.start` until its handle is over, and forever if it was
left: threads of the link may go on reading and writing them, and they stay allocated. So a caller that may be
interrupted passes copies of tensors that it needs afterwards, and reads the results once the handle has succeeded.

An implementation passes tests/support/link_port.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp

from recycle_plugin.errors import RecycleError, WaitTimeout


class Broken(RuntimeError):
    """A connection of the group has broken, or the group was aborted; the coordinator says who is lost."""


# --- operations. Except for Send and Receive, every member of the link starts the same ones in the same order. Members
# go by their position in the link. Tensors are contiguous, and alike on all members unless said otherwise.


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """Combine ``tensors`` of all members by ``op``, in place on every member."""

    tensors: Sequence[torch.Tensor]
    op: ReduceOp


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """Fill ``tensors`` of all members with those of ``root``."""

    tensors: Sequence[torch.Tensor]
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """Collect every member's ``source`` in ``outputs``, one per member, on all members."""

    outputs: Sequence[torch.Tensor]
    source: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Collect every member's ``source`` in ``outputs`` of ``root``, one per member; empty on other members."""

    outputs: Sequence[torch.Tensor]
    source: torch.Tensor
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class ReduceScatter:
    """Combine every member's ``source`` by ``op``, and write each member's equal part of the result to ``output``."""

    output: torch.Tensor
    source: torch.Tensor
    op: ReduceOp


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Write to ``output`` this member's part of every member's ``source``. ``outgoing`` and ``incoming``: the parts'
    lengths in the first dimension, empty if all are equal. They may differ from member to member.
    """

    output: torch.Tensor
    source: torch.Tensor
    incoming: Sequence[int]
    outgoing: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """Wait until all members have started the barrier."""


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Send ``tensor`` to member ``to``, in order per ``tag``; may be over before it is received."""

    tensor: torch.Tensor
    to: int
    tag: int


@dataclass(frozen=True, slots=True, eq=False)
class Receive:
    """Receive into ``tensor`` from member ``source``; if None, from any member, which the handle then names."""

    tensor: torch.Tensor
    source: int | None
    tag: int


def unheard() -> None:
    """Do nothing: the default for ``launched``."""


Operation = AllReduce | Broadcast | AllGather | Gather | ReduceScatter | AllToAll | Barrier | Send | Receive


class Handle:
    """Something under way on a link, named ``what``; any thread may use it. ``error``: the error it has ended with, if
    any. ``source``: the member whose message a :class:`Receive` got.
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
        """The operation's name in messages."""
        return self._what if isinstance(self._what, str) else self._what()

    def poll(self) -> bool:
        """Return whether it is over, also with an error; False once it was left."""
        return self._over

    def wait(self, timeout_s: float) -> None:
        """Return when it has succeeded. Raises its error, WaitTimeout (it goes on), or RecycleError if it was left."""
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
        """Abandon the operation: its result is not needed. Return False, and change nothing, if it was over or
        abandoned already.
        """
        return self._finish(left=True)

    def when_over(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` once, in any thread, when it is over or left; at once if it already is. It must not block."""
        with self._lock:
            if not self._over and not self._left:
                self._tell.append(tell)
                return
        tell()

    def end(self, error: Exception | None = None, source: int | None = None) -> None:
        """End it, on behalf of the link. Only the first end counts, and none after it was left."""
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

    A member's death breaks the others' operations with that member, unless their tensors are on an accelerator. There,
    or if a member waits for a live one that waits for the dead, nothing may break before somebody aborts.
    """

    generation: int

    @property
    def connected(self) -> bool:
        """Whether all members are connected."""

    def connect(self) -> Handle:
        """Start connecting. The handle is the same at each call, and names the members that have not come."""

    def start(self, operation: Operation, launched: Callable[[], object] = unheard) -> Handle:
        """Start ``operation`` once connected, after all earlier ones.

        ``launched()`` is called, in any thread, once the operation can no longer fail to start; it must not block. The
        handle ends with the operation's error: :class:`Broken`, or the reason that the group cannot run it.
        """

    def abort(self) -> Handle:
        """Break the connections, and return at once. Waits for this link's handles end with :class:`Broken`: here at
        once, elsewhere once they notice. Until the returned handle is over, the device may be stuck.
        """


def among(ranks: Iterable[int]) -> str:
    """Return these ranks in the words of messages."""
    return f"ranks {', '.join(map(str, ranks))}"


def connecting(name: str, ranks: Sequence[int], missing: Callable[[], Sequence[int]]) -> Handle:
    """Return the handle of a link among ``name`` that is being connected. It names the ``ranks`` that are missing()."""

    def what() -> str:
        whole, numbers = f"the connections among {name}", ", ".join(str(ranks.index(rank)) for rank in missing())
        return f"{whole}; missing of {len(ranks)} are number {numbers}" if numbers else whole

    return Handle(what)


def done() -> Handle:
    """Return a handle that is over."""
    handle = Handle("nothing")
    handle.end()
    return handle


def with_values(options: Any, **values: Any) -> Any:
    """Set these attributes on torch's ``options``, and return them."""
    for name, value in values.items():
        setattr(options, name, value)
    return options
