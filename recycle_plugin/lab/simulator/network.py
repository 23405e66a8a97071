"""Networks between workers: latency, bandwidth, and who waits for whom.

Inside a host every worker has a lane of its own each way. Across hosts all workers of a host share its one line out and
its one line in. A line carries one tensor at a time, in order. A tensor takes both its lines at once, for bytes /
bandwidth, and arrives a latency later. Both ways of a line are independent (full duplex).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.profile import Profile, Wire


class Network(Protocol):
    """The network as a virtual world needs it."""

    def arrival(self, now_us: int, sender: Seat, send: Instruction) -> int:
        """Return when what ``send`` hands over at ``now_us`` arrives, in microseconds. Calls are in order of time."""


class Uncontended:
    """A network in which every tensor takes ``costs.transfer``, whatever else is on its way."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def arrival(self, now_us: int, sender: Seat, send: Instruction) -> int:
        """Return when what ``send`` hands over at ``now_us`` arrives, in microseconds."""
        return now_us + self._costs.transfer(sender, _taker(send))


def _taker(send: Instruction) -> Seat:
    assert send.peer is not None, f"{send} goes to nobody"
    return send.peer


class Contended:
    """A network of lines that carry one tensor at a time (see the module). ``host``: of a seat's worker.
    ``boundary_bytes``: size of the activation, and of the gradient, between stages p and p + 1.
    """

    def __init__(
        self, host: Callable[[Seat], Hashable], inside: Wire, across: Wire, boundary_bytes: tuple[int, ...]
    ) -> None:
        self._host, self._inside, self._across, self._bytes = host, inside, across, boundary_bytes
        # when each line is free again
        self._free: defaultdict[Hashable, int] = defaultdict(int)

    def arrival(self, now_us: int, sender: Seat, send: Instruction) -> int:
        """Return when what ``send`` hands over at ``now_us`` arrives, in microseconds. Calls are in order of time."""
        size = self._bytes[sender.stage - (send.op is Op.SEND_GRAD)]
        here, there = self._host(sender), self._host(_taker(send))
        out: Hashable
        into: Hashable
        if here == there:
            link, out, into = self._inside, ("out", sender), ("in", send.peer)
        else:
            link, out, into = self._across, ("out of host", here), ("into host", there)
        start = max(now_us, self._free[out], self._free[into])
        self._free[out] = self._free[into] = start + round(size / link.bytes_per_us)
        return start + link.transfer_us(size)


def between(profile: Profile | None, placement: str, stages: int) -> Callable[[], Network] | None:
    """Return what opens the network between the workers of a job; None if nobody shares a line."""
    return None if profile is None or placement == "alone" else partial(lines, profile, placement, stages)


def lines(profile: Profile, placement: str, stages: int) -> Contended:
    """Return the network of one generation of workers, placed as for ``profile.costs``."""
    host = {"alone": alone, "replica": by_replica, "stage": by_stage}[placement]
    return Contended(host, profile.inside, profile.across, (profile.boundary_bytes,) * (stages - 1))


def by_replica(seat: Seat) -> int:
    """Return the host of ``seat`` if all stages of a replica are on one host."""
    return seat.replica


def by_stage(seat: Seat) -> int:
    """Return the host of ``seat`` if all replicas of a stage are on one host."""
    return seat.stage


def alone(seat: Seat) -> Seat:
    """Return the host of ``seat`` if every worker has its own."""
    return seat
