"""What a listener does when ``accept`` fails: it goes on, after a pause where there was no room.

A moment without room for one more connection must not make it deaf for good.  Linux reports so whatever is wrong with
the connection that comes, which is gone by then; and EMFILE, ENFILE, ENOBUFS or ENOMEM where this process or its host
has no room: who comes meanwhile waits in the listener's queue.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})  # here, whoever is at the other end
GONE = frozenset(
    {
        errno.ECONNABORTED,
        errno.EINTR,
        errno.EPERM,
        errno.EPROTO,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENONET,
        errno.ETIMEDOUT,
    }
)
PAUSE_S = 0.5  # between two attempts where there is no room


class Refusals:
    """The connections that one listener could not accept; ``say`` gets a line about the first for want of room."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False

    def pause_s(self, error: OSError) -> float:
        """How many seconds to wait before the next attempt, after ``error``."""
        if error.errno in GONE:
            return 0.0
        if not self._said:
            self._said = True
            self._say(
                f"a connection could not be accepted ({os.strerror(error.errno or 0)}); it is tried again every "
                f"{PAUSE_S:g} s, and this is said once"
            )
        return PAUSE_S
