"""The port that carries a worker's boundary tensors to its peers, any of which may be lost at any moment.

A datum travels under its own name, so the order of arrival does not matter, and arrives whole or not at all. It carries
``valid_from``, the generation from which its sender's data is valid. By that the receiver's store drops data computed
with weights that have been taken back since (core/worker/step_store.py). Its sender and membership do not matter: a
datum has the same numbers whichever worker makes it. A broken connection between two live workers is reported to the
coordinator (core.messages.from_workers.Missing). All workers then come to another barrier, and lost data is sent again.

One suite tests every implementation (tests/runtime/test_mover.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.runtime.devices.port import Copy, Tensors

OF_REPLAYS = "replay"
"""The kind of data of a replay, which always comes in, also from a worker that is no member yet."""


class Mover(Protocol):
    """Moves one worker's tensors to and from its peers, which reach it at ``address``; for the training thread only."""

    address: str

    def send(self, address: str, datum: Datum, tensors: Copy, valid_from: int) -> None:
        """Send ``tensors``, which must not be changed in place afterwards. They are in host memory, or on their way
        there, or kept so that the copy can begin at any time (runtime/worker/tiers.py).

        Never blocks, so programs need no matching order of sends and receives. Data for an unreachable peer is dropped.
        ``valid_from``: the generation from which the data is valid. If the copy to the host fails or times out, this
        worker's next call raises.
        """

    def arrivals(self) -> Iterator[tuple[Datum, Tensors, int]]:
        """Yield the data received since the last call: datum, tensors, and the generation from which they are valid."""

    def wait_sent(self, addresses: Iterable[str]) -> None:
        """Return when the data sent to these peers survives this process's death. Raises Interrupted on a new
        membership.
        """

    def hears(self) -> bool:
        """Return whether this worker's own listener lets peers in; may take seconds. If nothing arrives, that shows
        which side is at fault.
        """

    def hear_out(self, peers: Collection[str]) -> bool:
        """Receive all that peers other than ``peers`` have sent, and accept nothing more from them afterwards. Return
        False if it turns out that no peer can connect to this worker.
        """

    def listen_to(self, peers: Iterable[str]) -> None:
        """Accept data from ``peers`` too from now on; some of them have come back since :meth:`hear_out`."""

    def keep_only(self, members: Iterable[str]) -> None:
        """From now on send only to ``members``; broken connections to these are made anew."""

    def close(self) -> None:
        """Stop receiving. Data under way to live peers still arrives, within a second."""
