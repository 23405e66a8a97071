"""The links of groups (runtime/collectives/link.py) over Gloo, which connects hosts by TCP."""

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
    done,
    unheard,
    with_values,
)
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.system import forked

SO_ATTACH_FILTER = 26  # Linux's, for which Python has no name
# a program of the kernel's packet filters: of each packet it takes nothing
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
FAMILIES = (socket.AF_INET, socket.AF_INET6)  # of Gloo's sockets
NOT_GLOOS = (
    "Cannot use",
    "Invalid scalar type",
    "nsupported",
    "nhandled",
)  # what it says of an operation, a dtype or a device that it does not know


class Rendezvous(dist.Store):
    """Where the members of one link meet: a board at the coordinator (core/coordinator/facts/boards.py), which knows
    who speaks.  Who could change what stands here could stand between the members, and change their sums.

    ``called`` is the link's name in the job, ``ranks`` are its members' in their order, of which the worker of
    ``session`` is one.  To Gloo it is a store, on which each member sets one key for each device, which ends with its
    position.  What is posted there has the ports on which the member's Gloo listens before it: of ``ports``, which were
    opened as its were, those that Gloo names, ``own`` once it has.  ``wanted()`` says whether anybody still waits for
    the link.
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
        """The members that have not come, by their ranks."""
        return next((reading.missing(self.ranks) for reading in self._readings.values()), list(self.ranks))

    def ports_of_all(self) -> set[int]:
        """The ports on which the members listen, once all have come."""
        return {
            int(port)
            for reading in self._readings.values()
            for value in reading.values.values()
            for port in value.partition(b" ")[0].split(b",")
        }

    def set(self, key: str, value: Any) -> None:  # bytes, whatever torch's stubs say
        """Gloo's call: post where this member listens."""
        device, _ = self._place(key)
        listens = _named(self.ports, value)
        self.own.update(listens)
        text = ",".join(map(str, listens)).encode() + b" " + value
        session, board = self._session, self._board(device)
        if len(self.ranks) > 1:
            session.boards.post(board, text, session.view.number)
            self._readings[device] = session.boards.read(board, self.ranks, session.view.number)
        else:  # also a newcomer's, which takes part in no membership yet
            self._readings[device] = Reading()
        self._readings[device].values[session.rank] = text

    def get(self, key: str) -> bytes:
        """Gloo's call: where the member listens whose key that is, once it has come."""
        self.wait([key])
        device, rank = self._place(key)
        return self._readings[device].values[rank].partition(b" ")[2]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Gloo's call: return once these members have come.  Raises WaitTimeout."""
        limit_s = (
            timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or self._session.waiting.timeout_s
        )
        for key in keys:
            device, rank = self._place(key)
            what = f"the members of the link {self._called}"
            self._session.boards.wait(what, self._readings[device], [rank], limit_s, self.wanted)

    def close(self) -> None:
        """Forget it all: the members are connected, or never will be."""
        for device in self._readings:
            self._session.boards.forget(self._board(device))

    def _board(self, device: str) -> str:
        return f"link {self._called}, device {device}"

    def _place(self, key: str) -> tuple[str, int]:
        """The device and the member's rank that one of Gloo's keys names."""
        device, _, position = key.rpartition("/")
        return device, self.ranks[int(position)]


class GlooLink:
    """A link over Gloo among the workers that meet at ``rendezvous``.

    ``name`` is for messages, as "ranks 0, 1"; no other link meets there.

    Gloo does not wake a member that waits for a live one which has left the operation, its abort closes nothing while
    one is pending, and a wait with a deadline breaks the connection (measured, torch 2.13).  So connecting and each
    operation has a thread, Gloo's or one of ours, and :meth:`abort` shuts the group's sockets down, which ends those
    that block.

    Nobody tells which sockets are Gloo's.  They are those opened while it connected that lead to a port on which some
    member's Gloo listens; members tell each other those ports where they meet, before they connect, so that no
    connection of anybody else's is ever shut: not the next generation's either, which may connect at the same time.
    """

    _opening = threading.Lock()  # of a port: whose it is must be clear

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
        self._waiting: list[tuple[Operation, Handle]] = []  # for the connections
        self._running: set[Handle] = set()
        self._opened: set[int] = set()
        self._inodes = forked.Inodes(lambda: self._opened)
        self._ports: set[int] = set()
        self._end: Broken | None = None  # nothing will be started any more
        rendezvous.wanted = lambda: self._end is None

    # --- the port -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the connections to all members stand."""
        return self._group is not None

    def connect(self) -> Handle:
        """Start connecting, once, in a thread; the handle names the members that have not come."""
        with self._lock:
            return self._connect()

    def start(self, operation: Operation, launched: Callable[[], object] = unheard) -> Handle:
        """Start ``operation``, or queue it until the link is connected, which counts as ``launched``; after
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
        """Shut the group's sockets, so that whoever waits on it, here or elsewhere, gets Broken; a thread cleans up."""
        with self._lock:
            ended = self._stop(Broken(f"the connections among {self._name} were given up"))
        for handle in ended:
            handle.end(self._end)
        # which costs 0.1 s
        threading.Thread(target=self._take_down, name="recycle: leaving a group", daemon=True).start()
        return done()

    # --- operations -----------------------------------------------------------------------------------

    def _begin(self, operation: Operation, handle: Handle) -> None:
        self._running.add(handle)
        try:
            work = STARTS[type(operation)](self._group, operation)
        except Exception as error:  # handed to whoever waits, whatever it is
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
        """Wait for ``work``, holding it and its buffers, also where it was left behind."""
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
            self._connecting = Handle(self._who_is_missing)
            if self._end is not None:
                self._connecting.end(self._end)
            else:
                threading.Thread(target=self._meet, name=f"recycle: connecting {self._name}", daemon=True).start()
        return self._connecting

    def _meet(self) -> None:
        try:
            group = self._made()
        except (
            Exception
        ) as error:  # of Gloo's or of the store's; others may have left while this one still connected to them
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
        """Let nothing begin any more; returns the handles that have to be told so."""
        self._end = self._end or error
        ended = [
            *self._running,
            *(handle for _, handle in self._waiting),
            *([self._connecting] if self._connecting else []),
        ]
        self._waiting.clear()
        return ended

    def _who_is_missing(self) -> str:
        whole, meeting = f"the connections among {self._name}", self._rendezvous
        missing = ", ".join(str(meeting.ranks.index(rank)) for rank in meeting.missing())
        return f"{whole}; not there of {len(meeting.ranks)} are number {missing}" if missing else whole

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
        """Options of a group that listens already, and its ports, by the inodes of their sockets; with those that other
        threads have begun to listen on meanwhile.
        """
        with self._opening:
            before = set(_sockets())
            options = _options(self._address, self._timeout)
            return options, {inode: port for inode, port in _sockets().items() if port and inode not in before}

    def _take_down(self) -> None:
        """Shut the sockets, so that every operation on them fails, and let the group go.

        While it still connects, that sees for itself.
        """
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        for inode, connection in _held():
            if inode in self._opened:
                _shut(connection, self._ports)


STARTS: dict[type, Callable[[Any, Any], dist.Work]] = {  # of a ProcessGroupGloo, and of an operation of that type
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
    """Options that have Gloo listen on the interface of ``address``, unless GLOO_SOCKET_IFNAME names others.

    Left alone it looks its host's name up, and many a host's name is its loopback's.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
    chosen = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    chosen._devices = [_device(interface=name) for name in names] or [_device(hostname=address)]
    chosen._threads, chosen._timeout = 2 * len(chosen._devices), timeout
    return chosen


def _device(**where: str) -> Any:
    """Gloo's device there, which connects to all members at once whatever TORCH_GLOO_LAZY_INIT says: nobody who
    connected later would be let in.
    """
    make: Any = dist.ProcessGroupGloo.create_device  # torch's stubs lack it
    try:
        return make(**where, lazy_init=False)
    except TypeError:  # releases that know no other way
        return make(**where)


def let_nobody_in(inodes: Collection[int]) -> None:
    """Have the kernel drop what comes to these listening sockets: the members are connected, and nobody else is to be.

    Gloo keeps the descriptor of whoever connects for good, also of one that has gone, and ends its process where none
    is left (measured, torch 2.13).  Where the kernel has no such filters, all stays as it is.
    """
    program = ctypes.create_string_buffer(DROP_ALL)
    for inode, listener in _held():
        if inode in inodes:
            with suppress(OSError):
                address = ctypes.addressof(program)
                listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, address))


def _named(ports: Collection[int], said: bytes) -> list[int]:
    """Those of ``ports`` that are in the addresses which Gloo has ``said``, as the kernel writes them; all, where none
    is.
    """
    families = [family.to_bytes(2, sys.byteorder) for family in FAMILIES]
    return [port for port in ports if any(family + port.to_bytes(2) in said for family in families)] or [*ports]


def _sockets() -> dict[int, int]:
    """Open sockets of this process: inode (a descriptor's number may be reused) to the port it listens on, or 0."""
    found = {}
    for inode, connection in _held():
        name = connection.getsockname()
        listens = isinstance(name, tuple) and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        found[inode] = name[1] if listens else 0
    return found


def _held() -> Iterator[tuple[int, socket.socket]]:
    """The open sockets of this process, with their inodes, each by a descriptor of its own while it is looked at."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            held = os.dup(int(descriptor))  # a hold on it first: the number may be reused at any time
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
    with suppress(OSError):  # closed by the peer meanwhile, or a listener, which nobody waits on
        if {connection.getsockname()[1], connection.getpeername()[1]} & ports:
            connection.shutdown(socket.SHUT_RDWR)
