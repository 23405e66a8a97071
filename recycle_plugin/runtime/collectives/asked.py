"""A collective as it was asked for, and while it is under way (runtime/collectives/in_flight.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from recycle_plugin.core.worker.whereabouts import Reading
from recycle_plugin.runtime.collectives.link import Handle, Operation
from recycle_plugin.runtime.collectives.startup import Kept
from recycle_plugin.runtime.devices.port import Order

ALL, EACH = "all", "each"
SCRIPT, SUMS = "", " sums"  # links through host memory
SCRIPT_ON_DEVICE, SUMS_ON_DEVICE = " on accelerators", " sums on accelerators"
OF_SCRIPT, ON_DEVICE = (SCRIPT, SCRIPT_ON_DEVICE), (SCRIPT_ON_DEVICE, SUMS_ON_DEVICE)
Make = Callable[[list[torch.Tensor], Mapping[int, int]], Operation]
Adjust = Callable[[torch.Tensor, int], object]


class Channel(NamedTuple):
    """One direction between two members: from logical member ``source`` (None: from anyone) to ``target``, messages
    with ``tag``.
    """

    source: int | None
    target: int
    tag: int

    @property
    def name(self) -> str:
        """The name under which the channel's messages are counted."""
        return f"{self.source} to {self.target}, {self.tag}"


@dataclass(frozen=True, eq=False)
class Asked:
    """A collective as it was asked for.

    ``called`` is the function of torch.distributed; ``make`` gives the link's operation on copies of ``tensors``,
    which it changes, or with ``writes`` False only reads; they are in host memory, wherever the tensors are, but
    for what goes over a link ON_DEVICE. Its second argument has the position in the link of each logical member
    that takes part. ``given``: whatever else the caller has given it. ``op``: how it combines what members give, if
    it does. ``check`` is called
    before each try, and raises RecycleError where the result could not be right. ``alone``: there is something to
    do for a single member too. ``adjust(tensor, count)`` changes each result in place, once ``count`` members took
    part. ``gives``: the same result to ALL members, to EACH its own, or to both ends of a :class:`Channel`.
    """

    called: str
    make: Make
    tensors: Sequence[torch.Tensor] = ()
    check: Callable[[], object] = bool
    alone: bool = False
    adjust: Adjust | None = None
    gives: str | Channel = ALL
    given: Sequence[Any] = ()
    writes: bool = True
    op: ReduceOp | None = None

    @property
    def has_result(self) -> bool:
        """Whether it gives this member anything: the root of a broadcast has what it gives to all."""
        return self.writes or self.gives == ALL


@dataclass(eq=False)
class Call:
    """A collective under way on the link ``link``.

    ``number`` counts the script's collectives of one group or channel, None where nobody counts this one; ``lasts``: it
    survives a membership change.  It is behind what its caller had started on the device before it, and its result is
    written in that ``order`` too, whichever thread, on whichever stream, comes to do so.  ``asking``: the logical
    members who were there when it was asked for, of whom ``members`` take part in the present try.  ``handle`` is that
    of the present try, None while there is none, and ``connecting`` its link's.  Once ``over`` it has ``error``, or
    results in ``held``, which for a receive came from rank ``source``; ``handed``: the caller's tensors have them.
    ``kept``: for a newcomer.  ``fetched``: the result that another member was asked for, and which one that is.
    """

    asked: Asked
    link: str
    number: int | None
    lasts: bool
    order: Order
    asking: frozenset[int] = frozenset()
    members: Sequence[int] = ()
    handle: Handle | None = None
    connecting: Handle | None = None
    held: list[torch.Tensor] = field(default_factory=list)
    over: bool = False
    handed: bool = False
    error: BaseException | None = None
    source: int | None = None
    kept: Kept | None = None
    fetched: tuple[int, Reading] | None = None

    @property
    def has_news(self) -> bool | None:
        """True where the present try, or all of it, is over, and None while it is not, as Waiting.until asks."""
        handle = self.handle
        return True if self.over or (handle is not None and handle.poll()) else None
