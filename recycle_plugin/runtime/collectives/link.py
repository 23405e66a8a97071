"""The port to a collective group of one generation: connect it, start operations, leave them behind, break it.

A membership change finds operations that wait for who is gone, or for who has left them.  So nothing here blocks but
:meth:`Handle.wait`, which has a deadline, and what is started can be walked away from at any time.

**The buffers of an operation are its own**, from :meth:`Link.start` until its handle is over, and for ever once it was
left behind: threads of the link may go on reading and writing them.  They stay allocated as long, and nothing else is
touched.  So who may be broken off, and needs a tensor afterwards, gives copies of it, and takes the result from them
when the handle is over well.

An implementation passes tests/runtime/test_link.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ReduceOp

from recycle_plugin.errors import RecycleError, WaitTimeout


class Broken(RuntimeError):
    """A connection of the group is, or the group was aborted: who is lost is for others to say."""


# --- operations: every member of the link starts the same ones in the same order, but for sends and receives
# ------------- Members go by their position in the link.  Tensors are contiguous, and alike on all members where not
# said otherwise.


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """``tensors`` become everybody's, put together by ``op``."""

    tensors: Sequence[torch.Tensor]
    op: ReduceOp


@dataclass(frozen=True, slots=True, eq=False)
class Reduce:
    """... at ``root``; what they become elsewhere is not defined."""

    tensors: Sequence[torch.Tensor]
    op: ReduceOp
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """``tensors`` become those of ``root``, which are only read."""

    tensors: Sequence[torch.Tensor]
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """``outputs``, one a member, become everybody's ``source``."""

    outputs: Sequence[torch.Tensor]
    source: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """... at ``root``; elsewhere there are no ``outputs``."""

    outputs: Sequence[torch.Tensor]
    source: torch.Tensor
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """``output`` becomes this member's one of the ``sources`` of ``root``; elsewhere there are none."""

    output: torch.Tensor
    sources: Sequence[torch.Tensor]
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class ReduceScatter:
    """``output`` becomes this member's part of everybody's ``source``, put together by ``op`` and cut into as many
    parts as there are members.
    """

    output: torch.Tensor
    source: torch.Tensor
    op: ReduceOp


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Each member gets its part of everybody's ``source``, into ``output``; ``outgoing`` and ``incoming`` are the
    parts' lengths in the first dimension, empty where all are equal.  Of any two members' own lengths.
    """

    output: torch.Tensor
    source: torch.Tensor
    incoming: Sequence[int]
    outgoing: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """Nobody is through before all have started it."""


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """It may be over before it is received.  Of one ``tag`` nothing overtakes anything else to the same member."""

    tensor: torch.Tensor
    to: int
    tag: int


@dataclass(frozen=True, slots=True, eq=False)
class Receive:
    """... from member ``source``, None: from any one, whom the handle names."""

    tensor: torch.Tensor
    source: int | None
    tag: int


Operation = (
    AllReduce | Reduce | Broadcast | AllGather | Gather | Scatter | ReduceScatter | AllToAll | Barrier | Send | Receive
)


class Handle:
    """Of something under way, named ``what``.  May be used by any thread.

    ``error``: with which it is over.  ``source``: from which member a :class:`Receive` that is over has something.
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
        return self._what if isinstance(self._what, str) else self._what()

    def poll(self) -> bool:
        """Whether it is over, well or badly.  Never so once it was left behind."""
        return self._over

    def wait(self, timeout_s: float) -> None:
        """Return when it is over well.

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
        """Its result is not wanted any more.  False, and nothing has changed, if it was over already."""
        return self._finish(left=True)

    def when_over(self, tell: Callable[[], object]) -> None:
        """``tell`` is called once, by any thread, when it is over or was left behind; at once where it already is.

        It must not block.
        """
        with self._lock:
            if not self._over and not self._left:
                self._tell.append(tell)
                return
        tell()

    def end(self, error: Exception | None = None, source: int | None = None) -> None:
        """For the link: it is over.  The first end counts, and none once it was left behind."""
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
    """``generation``: of which it is the group.

    A member's death breaks what others have under way with that member itself.  Who waits for a live one that waits for
    the dead may not hear of it before somebody aborts.
    """

    generation: int

    @property
    def connected(self) -> bool: ...

    def connect(self) -> Handle:
        """Meet the other members.  The handle, always the same one, names whoever has not come."""

    def start(self, operation: Operation) -> Handle:
        """Begin ``operation``, once connected, after all that was started before; of the link's threads each sees its
        end.

        An error of the operation's, as :class:`Broken` and what the group can't do, is the handle's.
        """

    def abort(self) -> None:
        """Break the connections: whoever waits for one of its handles gets :class:`Broken`, here at once and elsewhere
        when it is known there.
        """
