"""A process group whose membership changes: the torch.distributed backend ``recycle``.

DeepSpeed and user code cache group objects in a dozen places.  The object stays the same over
failures, and so do its ``rank()`` and ``size()``, which are logical; behind it stands a Gloo group
of the live members, rebuilt on the generation's own store prefix when it is first used.

Gloo does not wake a rank that waits for a live peer which has left the collective, and its abort
closes nothing while an operation is pending (measured, torch 2.13).  So each operation runs in a
thread, Gloo's or one of ours, that the worker can walk away from, and the sockets of the abandoned
group are shut down, which ends the blocked thread.  Results of an abandoned operation are lost: what must survive is
reduced into a second buffer.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from datetime import timedelta
from typing import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.protocol import Missing
from recycle_plugin.runtime.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.transport import DEATH_S

Start = Callable[[dist.ProcessGroupGloo, list[torch.Tensor]], dist.Work]
BACKEND = "recycle"
NEWS_TIMEOUT_S = 30.0  # between a broken connection and the coordinator's word of who was lost


def register(session: Session) -> None:
    """Make the backend known to torch.distributed; all groups of this process follow ``session``."""

    def create(options: object, _backend_options: object = None) -> MemberGroup:
        return MemberGroup(
            session, options.store, options.group_rank, options.group_size, tuple(options.global_ranks_in_group), options.timeout
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


class Finished(dist.Work):
    """The handle of an operation that is over by the time it is returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class MemberGroup(dist.ProcessGroup):
    """``size`` logical members with global ranks ``ranks``, of whom the live ones take part."""

    def __init__(self, session: Session, store: dist.Store, rank: int, size: int, ranks: tuple[int, ...], timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._session = session
        self._store = store
        self._rank = rank
        self._ranks = ranks or tuple(range(size))
        self._timeout = timeout
        self._link: Link | None = None
        self._position: dict[int, int] = {}

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return BACKEND

    # --- operations -----------------------------------------------------------------------------------

    def allreduce(self, tensors, options=None):
        chosen = options if isinstance(options, dist.AllreduceOptions) else _with_op(dist.AllreduceOptions(), options)
        return self._run("an all-reduce", lambda inner, held: inner.allreduce(held, chosen), tensors)

    def broadcast(self, tensors, options):
        def start(inner, held):
            inner_options = dist.BroadcastOptions()
            inner_options.rootRank, inner_options.rootTensor = self._live(options.rootRank, "broadcast from"), options.rootTensor
            return inner.broadcast(held, inner_options)

        return self._run("a broadcast", start, tensors, lambda: self._live(options.rootRank, "broadcast from"))

    def barrier(self, opts=None):  # torch passes it by this name
        return self._run("a barrier", lambda inner, _: inner.barrier(dist.BarrierOptions()))

    def allgather(self, outputs, inputs, options=None):
        return self._whole("all_gather", lambda inner, _: inner.allgather(outputs, inputs, AllgatherOptions()))

    def gather(self, outputs, inputs, options):
        return self._whole("gather", lambda inner, _: inner.gather(outputs, inputs, options))

    def scatter(self, outputs, inputs, options):
        return self._whole("scatter", lambda inner, _: inner.scatter(outputs, inputs, options))

    def reduce(self, tensors, options):
        return self._whole("reduce", lambda inner, _: inner.reduce(tensors, options))

    def reduce_scatter(self, outputs, inputs, options):
        return self._whole("reduce_scatter", lambda inner, _: inner.reduce_scatter(outputs, inputs, options))

    def all_gather_single(self, output, source, options=None):
        return self._whole("all_gather_single", lambda inner, _: inner._allgather_base(output, source, AllgatherOptions()))

    def reduce_scatter_single(self, output, source, options):
        return self._whole("reduce_scatter_single", lambda inner, _: inner._reduce_scatter_base(output, source, options))

    def all_to_all_single(self, output, source, incoming, outgoing, options):
        return self._whole("all_to_all_single", lambda inner, _: inner.alltoall_base(output, source, incoming, outgoing, options))

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single  # before torch 2.13

    def send(self, tensors, destination, tag=0):
        def peer():
            return self._live(destination, "send to")

        return self._run("a send", lambda inner, _: inner.send(tensors, peer(), tag), check=peer)

    def recv(self, tensors, source, tag=0):
        def peer():
            return self._live(source, "receive from")

        return self._run("a receive", lambda inner, held: inner.recv(held, peer(), tag), tensors, peer)

    # --- among the live members only, whatever the logical size (runtime/blocks.py) ------------------

    def live_position(self) -> tuple[int, int]:
        """Which of the live members this one is, and how many there are."""
        self._members()
        return self._position[self._rank], len(self._position)

    def exchange(self, target: torch.Tensor, source: torch.Tensor, incoming: list[int], outgoing: list[int]) -> None:
        """Give each live member its part of ``source``, and write what comes from each to ``target``."""
        if self.live_position()[1] == 1:
            target.copy_(source)
            return
        self._run("an exchange", lambda inner, held: inner.alltoall_base(held[0], source, incoming, outgoing, dist.AllToAllOptions()), [target])

    # --- membership -----------------------------------------------------------------------------------

    def _run(self, what: str, start: Start, tensors: Sequence[torch.Tensor] = (), check: Callable[[], object] = bool, alone: bool = False) -> Finished:
        """Carry the operation out among the live members; ``tensors`` are what it writes to.  ``alone``: also where there is only one.

        A membership change inside a training step breaks it, and recovery deals with that.  Between
        steps, in the script's own collectives, the members that are left try again, once ``check``
        has seen that they can.  There each try has copies of its own: an operation that was left
        behind may go on writing.
        """
        while True:
            self._members()
            check()
            own = bool(self._session.between_steps)
            held = [tensor.clone() for tensor in tensors] if own else list(tensors)
            try:
                if alone or len(self._position) > 1:
                    self._attempt(what, lambda inner: start(inner, held))
            except Interrupted:
                if self._session.between_steps is None:
                    raise
                self._session.between_steps()
                continue
            for tensor, value in zip(tensors, held):
                if own:
                    tensor.copy_(value)
            return Finished()

    def _whole(self, name: str, start: Start) -> Finished:
        """An operation that needs every logical member, and has something to do for a single one too."""
        return self._run(name, start, check=lambda: self._complete(name), alone=True)

    def _attempt(self, what: str, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        link = self._link
        name = f"{what} among ranks {', '.join(map(str, self._live_ranks()))}"
        try:
            self._operate(name, link, start)
        except RecycleError:
            raise
        except RuntimeError as error:  # Gloo's word for a broken connection: who is gone comes from the coordinator
            self._await_news(name, error)

    def _await_news(self, name: str, failure: RuntimeError) -> None:
        """Raises Interrupted once it is known who is lost, or, where nobody is, once all meet again over new connections."""
        what, session = f"news of a lost worker after {name} failed", self._session
        try:
            session.wait(what, lambda: None, timeout_s=DEATH_S)
        except WaitTimeout:
            session.send(Missing(session.rank, session.number, name, ""))
        try:
            session.wait(what, lambda: None, timeout_s=NEWS_TIMEOUT_S)
        except WaitTimeout:  # before the start nobody can be told to meet again
            raise RecycleError(f"{name} failed, and after {NEWS_TIMEOUT_S:.0f} s none of them is known to be lost: see to the network between their hosts, "
                               f"or let GLOO_SOCKET_IFNAME name the interface that connects them ({failure})") from failure

    def _operate(self, name: str, link: Link, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        """Connect in a thread of ours; after that Gloo's own thread tells when a collective is through, which saves two changes of thread."""
        if not link.is_connected:
            self._session.run_interruptibly(f"the connections for {name}", link.connected)
        work = start(link.connected())
        try:
            future = work.get_future()
        except RuntimeError:  # Gloo's sends and receives have none
            self._session.run_interruptibly(name, work.wait)
            return
        over: list[bool] = []

        def tell(_: object) -> None:
            with self._session.changed:
                over.append(True)
                self._session.changed.notify_all()

        future.add_done_callback(tell)
        self._session.wait(name, lambda: over or None)
        work.wait()

    def _live_ranks(self) -> tuple[int, ...]:
        generation = self._session.generation
        if generation is None:
            return self._ranks
        live = {member.rank for member in generation.members}
        return tuple(rank for rank in self._ranks if rank in live)

    def _members(self) -> None:
        """Leave the group of an older generation; logical positions of the live members in the new one."""
        number = self._session.number
        if self._link is not None and self._link.generation == number:
            return
        if self._link is not None:
            self._link.abandon()
        self._position = {self._ranks.index(rank): place for place, rank in enumerate(self._live_ranks())}
        store = dist.PrefixStore(f"generation{number}", self._store)
        self._link = Link(number, store, self._position[self._rank], len(self._position), self._session.own_address, self._timeout)

    def _live(self, logical: int, what: str) -> int:
        if logical not in self._position:
            raise RecycleError(f"cannot {what} rank {self._ranks[logical]}: that worker is lost")
        return self._position[logical]

    def _complete(self, what: str) -> None:
        if len(self._position) < len(self._ranks):
            raise RecycleError(f"torch.distributed.{what} needs every member of the group, and {len(self._ranks) - len(self._position)} of "
                               f"{len(self._ranks)} are lost; use all_reduce or broadcast, which work among the live ones")


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


def _with_op(chosen: dist.AllreduceOptions, op: object) -> dist.AllreduceOptions:
    if op is not None:
        chosen.reduceOp = op
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
