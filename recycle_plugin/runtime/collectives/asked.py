"""A collective as its caller asked for it, and while it is under way (runtime/collectives/in_flight.py)."""

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
    """A direction from logical member ``source`` (None: any member) to ``target``, for messages with ``tag``."""

    source: int | None
    target: int
    tag: int

    @property
    def name(self) -> str:
        """The name under which messages of the channel are counted."""
        return f"{self.source} to {self.target}, {self.tag}"


class Asked(NamedTuple):
    """A collective as its caller asked for it.

    * ``called``: the function of torch.distributed.
    * ``make(held, place)``: builds the link's operation on ``held``, copies of ``tensors`` in host memory (for links in
      ON_DEVICE: on the device), which it may replace, also by ones of a wider dtype. ``place`` has the position in the
      link of each logical member that takes part.
    * ``check``: called before each try; raises RecycleError if the result could not be right.
    * ``alone``: whether the operation runs for a single member too.
    * ``adjust(tensor, count)``: changes each result in place, after ``count`` members took part.
    * ``gives``: the same result to ALL members, its own to EACH, or a message to the ends of a :class:`Channel`.
    * ``given``: the other arguments of the call. ``writes``: ``tensors`` get the results. ``op``: the reduction, if
      any.
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
        """Whether the call gives this member a result. The root of a broadcast gets the value that it gives to all."""
        return self.writes or self.gives == ALL


@dataclass(eq=False)
class Call:
    """A collective under way on the link ``link``.

    * ``number``: its place among the script's collectives of one group or channel; None if it is not counted (yet).
    * ``lasts``: it survives a membership change.
    * ``order``: it follows its caller's earlier work on the device, and any thread writes its result in that order.
    * ``asking``: the logical members alive when it was asked for; of these ``members`` take part in the present try.
    * ``handle``: of the present try, None between tries; ``connecting``: that of its link.
    * ``over``: it has ``error``, or results in ``held``, for a receive from logical member ``source``.
    * ``handed``: the caller's tensors have the results. ``kept``: its record for a newcomer.
    * ``fetched``: the member that was asked for the result, and the reading for its answer.
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
        """True if the call or its present try is over, else None, as ``Waiting.until`` expects."""
        handle = self.handle
        return True if self.over or (handle is not None and handle.poll()) else None
