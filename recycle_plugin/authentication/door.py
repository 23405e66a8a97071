"""A port's door: a caller proves to know the job's secret or is refused; the user is told once for each address.

The resources of strangers are bounded: unproved connections, the time of each, and remembered addresses.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from recycle_plugin.authentication.handshake import Port, Proved, Stranger, answer, answer_in_loop
from recycle_plugin.authentication.secret import Secret

UNPROVED = 256  # most connections at a port that have not yet proved to know the secret
PATIENCE_S = 1.0  # most time for each of them if there are so many
LOOK_S = 0.01  # pause before checking for room again
ADDRESSES = 64  # most addresses that are told apart
LATE_S = 5.0  # how long callers that came during a stop are treated leniently
OTHERS = "other addresses"
Say = Callable[[str, str], None]


class Door:
    """The door of a ``port`` that is called ``place`` ("at worker 3"). ``say`` gets a line on the first stranger from
    an address, and that address.
    """

    def __init__(self, secret: Secret, port: Port, place: str, say: Say) -> None:
        self._secret, self._port, self.place, self._say = secret, port, place, say
        self._lock = threading.Lock()
        self._said: set[str] = set()  # addresses of strangers
        self._late_until = 0.0
        self._unproved: dict[socket.socket, float] = {}  # {connection: when it came}, the oldest first

    def late(self) -> None:
        """Record that this process was stopped or slow, so that callers that gave up meanwhile go unreported."""
        self._late_until = time.monotonic() + LATE_S

    def pause_s(self) -> float:
        """Return the seconds to wait before accepting the next connection, 0 if there is room for it."""
        with self._lock:
            if len(self._unproved) < UNPROVED:
                return 0.0
            oldest, came = next(iter(self._unproved.items()))
            if time.monotonic() - came < PATIENCE_S:
                return LOOK_S
            del self._unproved[oldest]
        with suppress(OSError):  # it has closed by itself
            oldest.shutdown(socket.SHUT_RDWR)
        return 0.0

    def comes(self, connection: socket.socket) -> None:
        """Record that ``connection`` was accepted and has yet to prove that it knows the secret."""
        with self._lock:
            self._unproved[connection] = time.monotonic()

    def lets_in(self, connection: socket.socket, peer: tuple) -> Proved | None:
        """Return a connection that has proved to be of this job, or None for a stranger's; changes its timeout."""
        try:
            return answer(connection, self._secret, self._port)
        except OSError as error:
            self.refuses(peer, error)
            return None
        finally:
            self._proved(connection)

    async def lets_in_loop(self, connection: socket.socket, peer: tuple) -> Proved | None:
        """Do the same as :meth:`lets_in` in an event loop, for a connection that does not block."""
        try:
            return await answer_in_loop(connection, self._secret, self._port)
        except OSError as error:
            self.refuses(peer, error)
            return None
        finally:
            self._proved(connection)

    def refuses(self, peer: tuple, why: OSError | str) -> None:
        """Report the refusal of a caller at ``peer`` (host, port), at most once for each address."""
        if isinstance(why, OSError) and not isinstance(why, Stranger) and time.monotonic() < self._late_until:
            return
        with self._lock:
            address = peer[0] if peer[0] in self._said or len(self._said) < ADDRESSES else OTHERS
            if address in self._said:
                return
            self._said.add(address)
        many = ", one of many addresses," * (address == OTHERS)
        reason = why if isinstance(why, Stranger | str) else f"it has disconnected ({why.strerror})"
        self._say(f"{self.place} a caller at {peer[0]}:{peer[1]}{many} was refused: {reason}", address)

    def _proved(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproved.pop(connection, None)
