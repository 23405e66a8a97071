"""Keeps processes that a script forks from a worker (loaders' workers, pools, a library's forks) from acting as it.

A fork has the worker's handlers, open connections and session, and only one thread. The job would take its actions for
the worker's: its end would be the worker's leave, and a connection that it keeps open would hide the worker's death. So
in a fork signals have their default handlers, connections are closed, and calls of the session fail with the reason.
What ``exec`` starts inherits none of this.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

# Python's defaults
DEFAULTS: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_inodes: weakref.WeakSet[Inodes] = weakref.WeakSet()


class Inodes:
    """Sockets that a library has opened; ``found()`` returns their inodes. Forks close them too."""

    def __init__(self, found: Callable[[], Collection[int]]) -> None:
        self.found = found
        _inodes.add(self)


def own(connection: socket.socket) -> socket.socket:
    """Mark ``connection`` as the worker's own, which forks of the process close, and return it."""
    _connections.add(connection)
    return connection


def register(cut_off: Callable[[], None]) -> None:
    """Cut each later fork of this process, and forks of forks, off from the worker; ``cut_off()`` is called last in the
    fork. A signal that reaches the fork before that waits until the default handlers are set.
    """
    # The signal masks of this process when it began to fork. Forks of several threads wait for each other.
    masks: list[set[int | signal.Signals]] = []
    turn = threading.Lock()

    def begin() -> None:
        turn.acquire()
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, DEFAULTS))

    def end() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())
        turn.release()

    def become_nobody() -> None:
        for number, default in DEFAULTS.items():
            signal.signal(number, default)
        for connection in list(_connections):
            connection.close()
        _close({inode for each in list(_inodes) for inode in each.found()})
        cut_off()
        end()

    os.register_at_fork(before=begin, after_in_parent=end, after_in_child=become_nobody)


def _close(inodes: Collection[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")) if inodes else ():
        try:
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode) and status.st_ino in inodes:
                os.close(descriptor)
        except OSError:  # the listing's own descriptor
            pass
