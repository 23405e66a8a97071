"""Links (runtime/collectives/link.py) over Gloo, which connects hosts by TCP."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from recycle_plugin.core.worker.whereabouts import Reading
from recycle_plugin.runtime.collectives.link import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Broken,
    Gather,
    Handle,
    Operation,
    Receive,
    ReduceScatter,
    Send,
    connecting,
    done,
    unheard,
    with_values,
)
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.system import forked

SO_ATTACH_FILTER = 26  # Linux's, for which Python has no name
# a kernel packet filter that accepts nothing of any packet
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
FAMILIES = (socket.AF_INET, socket.AF_INET6)  # of Gloo's sockets
NOT_GLOOS = (
    "Cannot use",
    "Invalid scalar type",
    "nsupported",
    "nhandled",
    "ProcessGroupGloo::",
    "Check failed",
    "Split sizes",
)  # in errors of an operation, a dtype or a device that Gloo does not support, and of tensors that do not fit together


class Rendezvous(dist.Store):
    """Where the members of one link meet: a board at the coordinator (core/coordinator/facts/boards.py), which knows
    who posts. Whoever could change a post could stand between the members, and change their sums.

    ``called``: the link's name in the job. ``ranks``: its members' in order. ``wanted()``: whether anybody still waits
    for the link. To Gloo it is a store; each member sets one key per device, which ends with its position. Its posted
    value begins with the ports that its Gloo listens on: those of ``ports`` that Gloo names, kept in ``own``.
    """

    def __init__(self, session: Session, called: str, ranks: Sequence[int]) -> None:
        super().__init__()
        self._session, self._called, self.ranks = session, called, tuple(ranks)
        self._readings: dict[str, Reading] = {}
        self.position = self.ranks.index(session.rank)
        self.ports: Collection[int] = ()
        self.own: set[int] = set()
        self.wanted: Callable[[], bool] = lambda: True

    def missing(self) -> list[int]:
        """Return the ranks of the members that have not come."""
        return next((reading.missing(self.ranks) for reading in self._readings.values()), list(self.ranks))

    def ports_of_all(self) -> set[int]:
        """Return the ports that the members listen on; complete once all have come."""
        return {
            int(port)
            for reading in self._readings.values()
            for value in reading.values.values()
            for port in value.partition(b" ")[0].split(b",")
        }

    def set(self, key: str, value: Any) -> None:  # bytes, whatever torch's stubs say
        """Post where this member listens. Called by Gloo."""
        device, _ = self._place(key)
        listens = _named(self.ports, value)
        self.own.update(listens)
        text = ",".join(map(str, listens)).encode() + b" " + value
        session, board = self._session, self._board(device)
        if len(self.ranks) > 1:
            session.boards.post(board, text, session.view.number)
            self._readings[device] = session.boards.read(board, self.ranks, session.view.number)
        else:  # a group of one may be a newcomer's, which is in no membership yet
            self._readings[device] = Reading()
        self._readings[device].values[session.rank] = text

    def get(self, key: str) -> bytes:
        """Return where the member with this key listens, once it has come. Called by Gloo."""
        self.wait([key])
        device, rank = self._place(key)
        return self._readings[device].values[rank].partition(b" ")[2]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Return once these members have come; raises WaitTimeout. Called by Gloo."""
        limit_s = (
            timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or self._session.waiting.timeout_s
        )
        for key in keys:
            device, rank = self._place(key)
            what = f"the members of the link {self._called}"
            self._session.boards.wait(what, self._readings[device], [rank], limit_s, self.wanted)

    def close(self) -> None:
        """Forget all posts: the members are connected, or never will be."""
        for device in self._readings:
            self._session.boards.forget(self._board(device))

    def _board(self, device: str) -> str:
        return f"link {self._called}, device {device}"

    def _place(self, key: str) -> tuple[str, int]:
        """Return the device and the member's rank that a key of Gloo's names."""
        device, _, position = key.rpartition("/")
        return device, self.ranks[int(position)]


class GlooLink:
    """A link over Gloo among the workers that meet at ``rendezvous``.

    ``name`` is for messages, as "ranks 0, 1". No other link meets at the same place.

    Gloo does not wake a member that waits for a live one which has left the operation. Its abort closes nothing while
    an operation is pending, and a wait with a deadline breaks the connection (measured, torch 2.13). So connecting and
    each operation have a thread, Gloo's or ours, and :meth:`abort` shuts the group's sockets down, which ends the
    blocked ones.

    Nothing says which sockets are Gloo's. They are those opened while it connected that lead to a port on which a
    member's Gloo listens; members tell each other these ports before they connect. So no foreign connection is ever
    shut, nor one of the next generation, which may connect at the same time.
    """

    _opening = threading.Lock()  # to open one port at a time, so that its owner is clear

    def __init__(
        self,
        generation: int,
        rendezvous: Rendezvous,
        name: str,
        address: str,
        timeout: timedelta,
    ) -> None:
        self.generation = generation
        self._rendezvous = rendezvous
        self._address = address
        self._name = name
        self._timeout = timeout
        self._lock = threading.Lock()
        self._group: dist.ProcessGroupGloo | None = None
        self._connecting: Handle | None = None
        self._waiting: list[tuple[Operation, Handle]] = []  # operations that wait for the connections
        self._running: set[Handle] = set()
        self._opened: set[int] = set()
        self._inodes = forked.Inodes(lambda: self._opened)
        self._ports: set[int] = set()
        self._end: Broken | None = None  # set: nothing is started any more
        rendezvous.wanted = lambda: self._end is None

    # --- the port -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._group is not None

    def connect(self) -> Handle:
        """Start connecting, once, in a thread. The handle names the members that have not come."""
        with self._lock:
            return self._connect()

    def start(self, operation: Operation, launched: Callable[[], object] = unheard) -> Handle:
        """Start ``operation``, or queue it until the link is connected, which counts as ``launched``. After
        :meth:`abort` its handle ends as Broken.
        """
        handle = Handle(f"{type(operation).__name__} among {self._name}")
        with self._lock:
            if self._end is None and self._group is None:
                self._connect()
                self._waiting.append((operation, handle))
            elif self._end is None:
                self._begin(operation, handle)
        if self._end is not None:
            handle.end(self._end)
        else:
            launched()
        return handle

    def abort(self) -> Handle:
        """Shut the group's sockets: all that wait on them, here or elsewhere, get Broken. A thread cleans up."""
        with self._lock:
            ended = self._stop(Broken(f"the connections among {self._name} were given up"))
        for handle in ended:
            handle.end(self._end)
        # in a thread, since it takes 0.1 s
        threading.Thread(target=self._take_down, name="recycle: leaving a group", daemon=True).start()
        return done()

    # --- operations -----------------------------------------------------------------------------------

    def _begin(self, operation: Operation, handle: Handle) -> None:
        self._running.add(handle)
        try:
            work = STARTS[type(operation)](self._group, operation)
        except Exception as error:  # the waiting caller gets it
            self._over(handle, error)
            return
        try:
            future = work.get_future()
        except RuntimeError:  # sends and receives have none
            threading.Thread(
                target=self._see_through, args=(work, operation, handle), name=f"recycle: {handle.what}", daemon=True
            ).start()
        else:
            future.add_done_callback(lambda over: self._result_of(over.value, handle))

    def _see_through(self, work: dist.Work, operation: Operation, handle: Handle) -> None:
        """Wait for ``work`` and hold it and its buffers, also after it was left behind."""
        self._result_of(work.wait, handle, work._source_rank if isinstance(operation, Receive) else None)

    def _result_of(self, result: Callable[[], object], handle: Handle, source: Callable[[], int] | None = None) -> None:
        try:
            result()
            self._over(handle, None, source and source())
        except Exception as error:
            self._over(handle, error)

    def _over(self, handle: Handle, error: Exception | None, source: int | None = None) -> None:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NOT_GLOOS):
            error = Broken(str(error))
        self._running.discard(handle)
        handle.end(error, source)

    # --- connections ----------------------------------------------------------------------------------

    def _connect(self) -> Handle:
        if self._connecting is None:
            self._connecting = connecting(self._name, self._rendezvous.ranks, self._rendezvous.missing)
            if self._end is not None:
                self._connecting.end(self._end)
            else:
                threading.Thread(target=self._meet, name=f"recycle: connecting {self._name}", daemon=True).start()
        return self._connecting

    def _meet(self) -> None:
        try:
            group = self._made()
        except Exception as error:  # from Gloo or the store; others may have left while this member connected
            with self._lock:
                ended = self._stop(Broken(str(error)))
            for handle in ended:
                handle.end(self._end)
            return
        with self._lock:
            self._group = group
            if self._end is None:
                for operation, handle in self._waiting:
                    self._begin(operation, handle)
                self._waiting.clear()
        if self._end is not None:  # aborted meanwhile
            self._take_down()
        assert self._connecting is not None, "this thread is begun with it"
        self._connecting.end(self._end)

    def _stop(self, error: Broken) -> list[Handle]:
        """Let nothing start any more; returns the handles to end."""
        self._end = self._end or error
        ended = [
            *self._running,
            *(handle for _, handle in self._waiting),
            *([self._connecting] if self._connecting else []),
        ]
        self._waiting.clear()
        return ended

    def _made(self) -> dist.ProcessGroupGloo:
        before, meeting = set(_sockets()), self._rendezvous
        options, ports = self._listening()
        meeting.ports = ports.values()
        try:
            group = dist.ProcessGroupGloo(meeting, meeting.position, len(meeting.ranks), options)
        finally:
            meeting.close()
        let_nobody_in({inode for inode, port in ports.items() if port in meeting.own})
        self._ports = meeting.ports_of_all()
        self._opened = set(_sockets()) - before
        return group

    def _listening(self) -> tuple[Any, dict[int, int]]:
        """Return options of a group that listens already, and {inode: port} of its sockets. Other threads' sockets that
        began to listen meanwhile are among them.
        """
        with self._opening:
            before = set(_sockets())
            options = _options(self._address, self._timeout)
            return options, {inode: port for inode, port in _sockets().items() if port and inode not in before}

    def _take_down(self) -> None:
        """Shut the group's sockets, so that every operation on them fails, and drop the group. While the group still
        connects this does nothing: the connecting thread calls it again.
        """
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        for inode, connection in _held():
            if inode in self._opened:
                _shut(connection, self._ports)


STARTS: dict[type, Callable[[Any, Any], dist.Work]] = {  # each takes a ProcessGroupGloo and an operation of that type
    AllReduce: lambda group, one: group.allreduce(one.tensors, with_values(dist.AllreduceOptions(), reduceOp=one.op)),
    Broadcast: lambda group, one: group.broadcast(one.tensors, with_values(dist.BroadcastOptions(), rootRank=one.root)),
    AllGather: lambda group, one: group.allgather([one.outputs], [one.source], AllgatherOptions()),
    Gather: lambda group, one: group.gather(
        [one.outputs] if one.outputs else [], [one.source], with_values(dist.GatherOptions(), rootRank=one.root)
    ),
    ReduceScatter: lambda group, one: group._reduce_scatter_base(
        one.output, one.source, with_values(dist.ReduceScatterOptions(), reduceOp=one.op)
    ),
    AllToAll: lambda group, one: group.alltoall_base(
        one.output, one.source, one.incoming, one.outgoing, dist.AllToAllOptions()
    ),
    Barrier: lambda group, one: group.barrier(dist.BarrierOptions()),
    Send: lambda group, one: group.send([one.tensor], one.to, one.tag),
    Receive: lambda group, one: group.recv_anysource([one.tensor], one.tag)
    if one.source is None
    else group.recv([one.tensor], one.source, one.tag),
}


def _options(address: str, timeout: timedelta) -> Any:
    """Return options that have Gloo listen on the interface of ``address``, unless GLOO_SOCKET_IFNAME names others. By
    default Gloo looks up its host's name, which often resolves to the loopback address.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
    chosen = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    chosen._devices = [_device(interface=name) for name in names] or [_device(hostname=address)]
    chosen._threads, chosen._timeout = 2 * len(chosen._devices), timeout
    return chosen


def _device(**where: str) -> Any:
    """Create Gloo's device there, without lazy connections: later ones would be dropped (let_nobody_in)."""
    make: Any = dist.ProcessGroupGloo.create_device  # torch's stubs lack it
    try:
        return make(**where, lazy_init=False)
    except TypeError:  # releases that have only this way
        return make(**where)


def let_nobody_in(inodes: Collection[int]) -> None:
    """Have the kernel drop all packets to these listening sockets, since all members are connected.

    Gloo keeps the descriptor of every caller for good, also after it has gone, and ends its process if it runs out of
    descriptors (measured, torch 2.13). On kernels without such filters nothing changes.
    """
    program = ctypes.create_string_buffer(DROP_ALL)
    for inode, listener in _held():
        if inode in inodes:
            with suppress(OSError):
                address = ctypes.addressof(program)
                listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, address))


def _named(ports: Collection[int], said: bytes) -> list[int]:
    """Return the ``ports`` in the addresses that Gloo has ``said``, in the kernel's encoding; all if none is there."""
    families = [family.to_bytes(2, sys.byteorder) for family in FAMILIES]
    return [port for port in ports if any(family + port.to_bytes(2) in said for family in families)] or [*ports]


def _sockets() -> dict[int, int]:
    """Return {inode: port it listens on, or 0} of this process's open sockets. Descriptor numbers may be reused."""
    found = {}
    for inode, connection in _held():
        name = connection.getsockname()
        listens = isinstance(name, tuple) and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        found[inode] = name[1] if listens else 0
    return found


def _held() -> Iterator[tuple[int, socket.socket]]:
    """Yield (inode, socket) of this process's open sockets; the socket is a duplicate, closed after its turn."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            held = os.dup(int(descriptor))  # first take a hold: the number may be reused at any time
        except OSError:
            continue
        status = os.fstat(held)
        if stat.S_ISSOCK(status.st_mode):
            with socket.socket(fileno=held) as connection:
                yield status.st_ino, connection
        else:
            os.close(held)


def _shut(connection: socket.socket, ports: set[int]) -> None:
    if connection.family not in FAMILIES:
        return  # another library's, opened at the same time
    with suppress(OSError):  # the peer has closed it, or it is a listener, on which nobody waits
        if {connection.getsockname()[1], connection.getpeername()[1]} & ports:
            connection.shutdown(socket.SHUT_RDWR)
