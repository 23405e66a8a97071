"""A port's door: who has connected proves to know the job's secret, or is refused; the user is told once an address.

What strangers may take is bounded: connections that are still to prove who they are, the time that each has for it, and
the addresses that are remembered.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from recycle_plugin.authentication.handshake import Port, Proved, Stranger, answer, answer_in_loop
from recycle_plugin.authentication.secret import Secret

UNPROVED = 256  # connections at one port that are still to prove who they are
PATIENCE_S = 1.0  # how long each of so many may take
LOOK_S = 0.01  # between two looks whether there is room
ADDRESSES = 64  # that are told apart
LATE_S = 5.0  # how long those are let in who have come while nobody looked
OTHERS = "other addresses"
Say = Callable[[str, str], None]


class Door:
    """The door of a ``port`` that is called ``place`` ("at worker 3").

    ``say`` gets a line on the first stranger from an address, and that address.
    """

    def __init__(self, secret: Secret, port: Port, place: str, say: Say) -> None:
        self._secret, self._port, self.place, self._say = secret, port, place, say
        self._lock = threading.Lock()
        self._said: set[str] = set()  # addresses that strangers have come from
        self._late_until = 0.0
        self._unproved: dict[socket.socket, float] = {}  # oldest first, with when it came

    def late(self) -> None:
        """Note that this process was stopped, or slow: who has come meanwhile may have gone since, and is no stranger
        for that.
        """
        self._late_until = time.monotonic() + LATE_S

    def pause_s(self) -> float:
        """How many seconds to wait before the next connection is accepted, 0 where there is room for it."""
        with self._lock:
            if len(self._unproved) < UNPROVED:
                return 0.0
            oldest, came = next(iter(self._unproved.items()))
            if time.monotonic() - came < PATIENCE_S:
                return LOOK_S
            del self._unproved[oldest]
        with suppress(OSError):  # it has gone by itself
            oldest.shutdown(socket.SHUT_RDWR)
        return 0.0

    def comes(self, connection: socket.socket) -> None:
        """Note that ``connection`` was accepted, and is to prove who it is."""
        with self._lock:
            self._unproved[connection] = time.monotonic()

    def lets_in(self, connection: socket.socket, peer: tuple) -> Proved | None:
        """What goes on over a connection that has proved to be from a process of this job; None for a stranger's.  Its
        timeout is changed.
        """
        try:
            return answer(connection, self._secret, self._port)
        except OSError as error:
            self.refuses(peer, error)
            return None
        finally:
            self._proved(connection)

    async def lets_in_loop(self, connection: socket.socket, peer: tuple) -> Proved | None:
        """The same in an event loop, for a connection that does not block."""
        try:
            return await answer_in_loop(connection, self._secret, self._port)
        except OSError as error:
            self.refuses(peer, error)
            return None
        finally:
            self._proved(connection)

    def refuses(self, peer: tuple, why: OSError | str) -> None:
        """Refuse what has come from ``peer``, host and port; it changes nothing."""
        if isinstance(why, OSError) and not isinstance(why, Stranger) and time.monotonic() < self._late_until:
            return
        with self._lock:
            address = peer[0] if peer[0] in self._said or len(self._said) < ADDRESSES else OTHERS
            if address in self._said:
                return
            self._said.add(address)
        many = ", one of many addresses," * (address == OTHERS)
        reason = why if isinstance(why, Stranger | str) else f"it has gone ({why.strerror})"
        self._say(f"{self.place} what comes from {peer[0]}:{peer[1]}{many} was refused: {reason}", address)

    def _proved(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproved.pop(connection, None)
