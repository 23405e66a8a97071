"""The port by which a worker's boundary tensors get to its peers, any of whom may be lost at any moment.

A datum travels under its own name, so that the order of arrival does not matter, and it arrives whole or not at all. It
also carries ``valid_from``, the generation from which its sender's data is valid, by which the receiver's store drops
what was computed with weights that have been taken back since (core/worker/step_store.py).  Who sent it, and in which
membership, does not matter: a datum has the same numbers whoever makes it.  A connection that breaks between two live
workers is reported to the coordinator (core.messages.from_workers.Missing): all come to another barrier, and what was
lost on the way is sent once more.

Every implementation is tested by one suite (tests/runtime/test_mover.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.runtime.devices.port import Copy, Tensors

OF_REPLAYS = "replay"
"""The kind of what workers say to each other of a replay, also by one that is no member yet: it is always let in."""


class Mover(Protocol):
    """Moves one worker's tensors to and from its peers, who find it at ``address``; only the thread that trains calls
    it.
    """

    address: str

    def send(self, address: str, datum: Datum, tensors: Copy, valid_from: int) -> None:
        """Send ``tensors``, which are in host memory, on their way there, or kept where that can begin at any time
        (runtime/worker/tiers.py), and may not be changed in place afterwards.

        It never blocks, so that programs need no matching order of sends and receives; what is for a peer that can't be
        reached is dropped.  ``valid_from``: the generation from which the data is valid.  A copy to the host that
        fails, or is not over in time, is an error of this worker's, which its next call raises.
        """

    def arrivals(self) -> Iterator[tuple[Datum, Tensors, int]]:
        """What has come since this was asked last: datum, tensors, and the generation from which they are valid."""

    def wait_sent(self, addresses: Iterable[str]) -> None:
        """Return when the sudden death of this process can't stop any more what was sent to these peers.

        Raises Interrupted when the membership changes.
        """

    def hears(self) -> bool:
        """Whether this worker's own listener lets peers in, which may take seconds to find out.

        Where nothing arrives, that tells whose fault it is.
        """

    def hear_out(self, peers: Collection[str]) -> bool:
        """Take what peers other than ``peers`` have sent before they went, and nothing of theirs that comes after this.

        False where it turns out that nobody is let in here.
        """

    def listen_to(self, peers: Iterable[str]) -> None:
        """Take from now on also what ``peers`` send, of which some have come back since others were heard out."""

    def keep_only(self, members: Iterable[str]) -> None:
        """Send nothing more to anybody but ``members``; broken connections to these are made anew."""

    def close(self) -> None:
        """Stop receiving; what is under way to live peers still gets there, within a second."""
