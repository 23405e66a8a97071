"""What a listener does when ``accept`` fails: it goes on, after a pause if there was no room.

A moment without room for one more connection must not make it deaf for good. Linux reports errors of the arriving
connection, which is gone by then. It reports EMFILE, ENFILE, ENOBUFS or ENOMEM if this process or its host has no room;
meanwhile callers wait in the listener's queue.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})  # room here, whoever the caller is
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
PAUSE_S = 0.5  # seconds between two attempts without room


class Refusals:
    """The connections that a listener could not accept. ``say`` gets a line on the first without room."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False

    def pause_s(self, error: OSError) -> float:
        """Return the seconds to wait before the next attempt, after ``error``."""
        if error.errno in GONE:
            return 0.0
        if not self._said:
            self._said = True
            self._say(
                f"a connection could not be accepted ({os.strerror(error.errno or 0)}); it is tried again every "
                f"{PAUSE_S:g} s, and this is said once"
            )
        return PAUSE_S
