"""The port by which a worker's boundary tensors get to its peers, any of whom may be lost at any moment.

A datum travels under its own name, so that the order of arrival does not matter, and it arrives whole or not at all.
It also names its sender's era, by which the receiver's store drops what was computed with weights that have been taken
back since (core/worker/step_store.py).  Who sent it, and in which membership, does not matter: a datum has the same
numbers whoever makes it.  A line that breaks between two live workers is news for the coordinator
(core.messages.protocol.Missing): all meet again, and what was lost on the way is sent once more.

What is known to move tensors so is tested by one suite (tests/runtime/test_mover.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.runtime.device import Copy, Tensors


class Mover(Protocol):
    """Of one worker; ``address``: where its peers find it.  Its methods are called by the thread that trains."""

    address: str

    def send(self, address: str, datum: Datum, tensors: Copy, valid_from: int) -> None:
        """Send ``tensors``, which are in host memory or on their way there (runtime/worker/tiers.py), and may not be
        changed in place afterwards.  It never blocks, so that programs need no matching order of sends and receives;
        what is for a peer that can't be reached is dropped.  A copy that fails, or is not over in time, is an error of
        this worker's, which its next call raises.
        """

    def arrivals(self) -> Iterator[tuple[Datum, Tensors, int]]:
        """What has come since this was asked last, with its sender's era."""

    def wait_sent(self, addresses: Iterable[str]) -> None:
        """Return when the sudden death of this process can't stop any more what was sent to these peers.

        Raises Interrupted when the membership changes.
        """

    def hears(self) -> bool:
        """Whether who comes to this worker now is let in, and may take seconds to find out: where nothing comes, that
        tells whose fault it is.
        """

    def hear_out(self, peers: Collection[str]) -> bool:
        """Take what all but ``peers`` have sent before they went, and nothing of theirs that comes after this.

        False where it shows that nobody is let in here.
        """

    def leave(self, members: Iterable[str]) -> None:
        """Send nothing more to anybody but ``members``; lines to these that are broken are made anew."""

    def close(self) -> None:
        """Stop receiving; what is under way to live peers still gets there, within a second."""
