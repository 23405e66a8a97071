"""A mover between threads of one process: what is sent is there at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import COPY_S, Copy, Tensors

Hub = dict[str, "ThreadMover"]
"""Those that can be reached, by address."""


class ThreadMover:
    """As runtime.movers.mover.Mover, of those that share ``hub``."""

    def __init__(self, session: Session, hub: Hub) -> None:
        self._session, self._hub = session, hub
        self._arrived: deque[tuple[Datum, Copy, int]] = deque()
        self._heard: set[str] | None = None
        self.address = f"thread://{session.rank}"
        hub[self.address] = self

    def send(self, address: str, datum: Datum, tensors: Copy, valid_from: int) -> None:
        peer = self._hub.get(address)
        if peer is not None:
            peer._deliver(self.address, (datum, tensors, valid_from))

    def _deliver(self, sender: str, arrived: tuple[Datum, Copy, int]) -> None:
        with self._session.changed:
            if self._heard is None or sender in self._heard:
                self._arrived.append(arrived)
                self._session.changed.notify_all()

    def arrivals(self) -> Iterator[tuple[Datum, Tensors, int]]:
        while self._arrived:
            datum, tensors, valid_from = self._arrived.popleft()
            yield datum, tensors.wait(COPY_S), valid_from

    def wait_sent(self, addresses: Iterable[str]) -> None:
        self._session.check()

    def hears(self) -> bool:
        return self.address in self._hub

    def hear_out(self, peers: set[str]) -> bool:
        with self._session.changed:
            self._heard = peers
        return self.hears()

    def keep_only(self, peers: set[str]) -> None:
        pass

    def close(self) -> None:
        self._hub.pop(self.address, None)
