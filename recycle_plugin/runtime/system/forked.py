"""Processes that a script forks from a worker (loaders' workers, pools, whatever a library forks): none is the worker.

A fork has the worker's handlers, its open connections and its session, and no thread but one.  What it did with them,
the job would take for the worker's doing: its end would be the worker's leave, and a connection that it keeps open
hides the worker's death.  So in the fork signals do what they do in any process, connections are closed, and whoever
asks the session for something hears that this is not the worker.

What ``exec`` starts has none of it anyway.
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

# Python's
DEFAULTS: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_inodes: weakref.WeakSet[Inodes] = weakref.WeakSet()


class Inodes:
    """Sockets that a library has opened, which ``found()`` lists by their inodes: forks close them too."""

    def __init__(self, found: Callable[[], Collection[int]]) -> None:
        self.found = found
        _inodes.add(self)


def own(connection: socket.socket) -> socket.socket:
    """Mark ``connection`` as the worker's own, so that forks of the process close it, and return it."""
    _connections.add(connection)
    return connection


def register(cut_off: Callable[[], None]) -> None:
    """Cut each later fork of this process, and forks of these, off from the worker; there ``cut_off()`` is called last.

    A signal that comes to the fork before that waits until it does what it does in any process.
    """
    # what was blocked when this process began to fork; forks of several threads wait for each other
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
        except OSError:  # the listing's own
            pass
