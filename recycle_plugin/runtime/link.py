"""The Gloo group of one generation, which can be left while it connects or waits."""

from __future__ import annotations

import os
import socket
import stat
import threading
from datetime import timedelta

import torch.distributed as dist

from recycle_plugin.runtime.errors import RecycleError


class Link:
    """The Gloo group of one generation, connected by whichever operation is first, in that operation's thread.

    An operation that was left behind may connect, or wait, after its generation has passed: it has
    this object to itself, so it can't meet the next generation's group.

    Which sockets are Gloo's nobody tells.  They are those opened while it connected that lead to a
    port on which some member's Gloo listens; members tell each other those ports through the store,
    so that no connection of anybody else's is ever shut: not the next generation's either, which may connect at the same time.

    Gloo gets a connection to the store of its own: while it waits there for a peer, and it may do so long after its
    generation has passed, nobody else can use that connection.
    """

    _opening = threading.Lock()  # of a port: whose it is must be clear

    def __init__(self, generation: int, store: dist.Store, position: int, members: int, address: str, timeout: timedelta) -> None:
        self.generation = generation
        self._store = store
        self._address = address
        self._position = position
        self._members = members
        self._timeout = timeout
        self._lock = threading.Lock()
        self._group: dist.ProcessGroupGloo | None = None
        self._opened: set[int] = set()
        self._abandoned = False

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def connected(self) -> dist.ProcessGroupGloo:
        with self._lock:
            if self._group is None:
                self._connect()
            if self._abandoned:
                self._shut_down()
                raise RecycleError("this membership has passed")
            return self._group

    def _connect(self) -> None:
        before = set(_sockets())
        options, ports = self._listening()
        try:
            self._group = dist.ProcessGroupGloo(self._store.clone(), self._position, self._members, options)
        except RuntimeError as error:
            if self._abandoned:  # so have the others, one of them while this one still connected to it
                raise RecycleError("this membership has passed") from error
            raise
        self._opened = set(_sockets()) - before
        self._store.set(f"listening{self._position}", ",".join(map(str, ports)))

    def _listening(self) -> tuple[dist.ProcessGroupGloo._Options, list[int]]:
        """Options of a group that listens already, and where."""
        with self._opening:
            before = set(_sockets())
            options = _options(self._address, self._timeout)
            return options, [port for inode, port in _sockets().items() if port and inode not in before]

    def abandon(self) -> None:
        """End what still blocks in here, in the background: taking a Gloo group down costs 0.1 s."""
        self._abandoned = True
        threading.Thread(target=self._take_down, name="recycle: leaving a group", daemon=True).start()

    def _take_down(self) -> None:
        if self._lock.acquire(timeout=0.1):  # otherwise it is still connecting, and sees for itself
            if self._group is not None:
                self._shut_down()
            self._lock.release()

    def _shut_down(self) -> None:
        """Shut the sockets, so that every operation on them fails, and let the group go."""
        keys = [f"listening{position}" for position in range(self._members)]
        ports = {port for key in keys if self._store.check([key]) for port in self._store.get(key).decode().split(",")}
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                held = os.dup(int(descriptor))  # a hold on it first: the number may be reused at any time
            except OSError:
                continue
            status = os.fstat(held)
            if stat.S_ISSOCK(status.st_mode) and status.st_ino in self._opened:
                _shut(socket.socket(fileno=held), ports)
            else:
                os.close(held)
        self._group = None


def _options(address: str, timeout: timedelta) -> dist.ProcessGroupGloo._Options:
    """Gloo listens on the interface of ``address``, unless GLOO_SOCKET_IFNAME names others.  Left alone it looks its host's name up, and many a host's name is its loopback's."""
    chosen = dist.ProcessGroupGloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo.create_device
    chosen._devices = [make(interface=name) for name in names] or [make(hostname=address)]
    chosen._threads, chosen._timeout = 2 * len(chosen._devices), timeout
    return chosen


def _sockets() -> dict[int, int]:
    """Open sockets of this process: inode (a descriptor's number may be reused) to the port it listens on, or 0."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            held = os.dup(int(descriptor))
        except OSError:
            continue
        status = os.fstat(held)
        if stat.S_ISSOCK(status.st_mode):
            with socket.socket(fileno=held) as connection:
                name = connection.getsockname()
                listens = isinstance(name, tuple) and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                found[status.st_ino] = name[1] if listens else 0
        else:
            os.close(held)
    return found


def _shut(connection: socket.socket, ports: set[str]) -> None:
    with connection:
        try:
            if {str(connection.getsockname()[1]), str(connection.getpeername()[1])} & ports:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed by the peer meanwhile, or a listener, which nobody waits on
