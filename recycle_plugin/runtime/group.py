"""A process group whose membership changes: the torch.distributed backend ``recycle``.

DeepSpeed and user code cache group objects in a dozen places.  The object stays the same over
failures, and so do its ``rank()`` and ``size()``, which are logical; behind it stands a Gloo group
of the live members, rebuilt on the generation's own store prefix when it is first used.

Gloo does not wake a rank that waits for a live peer which has left the collective, and its abort
closes nothing while an operation is pending (measured, torch 2.13).  So each operation runs in a
thread that the worker can walk away from, and the sockets of the abandoned group are shut down,
which ends the blocked thread.  Results of an abandoned operation are lost: what must survive is
reduced into a second buffer.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from datetime import timedelta
from typing import Callable

import torch
import torch.distributed as dist

from recycle_plugin.core.executor import Interrupted
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.session import Session

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
        self._built = -1
        self._inner: dist.ProcessGroupGloo | None = None
        self._sockets: list[int] = []
        self._position: dict[int, int] = {}

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return BACKEND

    # --- operations -----------------------------------------------------------------------------------

    def allreduce(self, tensors, options=None):
        chosen = options if isinstance(options, dist.AllreduceOptions) else _with_op(dist.AllreduceOptions(), options)
        return self._run("an all-reduce", lambda inner: inner.allreduce(tensors, chosen), tensors)

    def broadcast(self, tensors, options):
        root = self._live(options.rootRank, "broadcast from")
        inner_options = dist.BroadcastOptions()
        inner_options.rootRank, inner_options.rootTensor = root, options.rootTensor
        return self._run("a broadcast", lambda inner: inner.broadcast(tensors, inner_options))

    def barrier(self, options=None):
        return self._run("a barrier", lambda inner: inner.barrier(dist.BarrierOptions()))

    def allgather(self, outputs, inputs, options=None):
        self._complete("all_gather")
        return self._run("an all-gather", lambda inner: inner.allgather(outputs, inputs, dist.AllgatherOptions()))

    def gather(self, outputs, inputs, options):
        self._complete("gather")
        return self._run("a gather", lambda inner: inner.gather(outputs, inputs, options))

    def scatter(self, outputs, inputs, options):
        self._complete("scatter")
        return self._run("a scatter", lambda inner: inner.scatter(outputs, inputs, options))

    def reduce(self, tensors, options):
        self._complete("reduce")
        return self._run("a reduce", lambda inner: inner.reduce(tensors, options))

    def send(self, tensors, destination, tag=0):
        peer = self._live(destination, "send to")
        return self._run("a send", lambda inner: inner.send(tensors, peer, tag))

    def recv(self, tensors, source, tag=0):
        peer = self._live(source, "receive from")
        return self._run("a receive", lambda inner: inner.recv(tensors, peer, tag))

    # --- membership -----------------------------------------------------------------------------------

    def _run(self, what: str, start: Callable[[dist.ProcessGroupGloo], dist.Work], overwritten: list[torch.Tensor] = ()) -> Finished:
        """Carry the operation out among the live members.

        A membership change inside a training step breaks it, and the step starts again.  Between
        steps, in the script's own collectives, it is tried again by the members that are left,
        from the values in ``overwritten`` as they were.
        """
        kept = [tensor.clone() for tensor in overwritten] if self._session.between_steps else []
        while True:
            try:
                self._attempt(what, start)
                return Finished()
            except Interrupted:
                if self._session.between_steps is None:
                    raise
                self._session.between_steps()
                for tensor, value in zip(overwritten, kept):
                    tensor.copy_(value)

    def _attempt(self, what: str, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        self._members()
        if len(self._position) > 1:

            def operate() -> None:
                start(self._current()).wait()

            name = f"{what} among ranks {', '.join(map(str, self._live_ranks()))}"
            try:
                self._session.run_interruptibly(name, operate)
            except RuntimeError as error:  # Gloo's word for a broken connection: who is gone comes from the coordinator
                if isinstance(error, RecycleError):
                    raise
                self._session.wait(f"news of a lost worker after {name} failed ({error})", lambda: None, timeout_s=NEWS_TIMEOUT_S)

    def _live_ranks(self) -> tuple[int, ...]:
        generation = self._session.generation
        if generation is None:
            return self._ranks
        live = {member.rank for member in generation.members}
        return tuple(rank for rank in self._ranks if rank in live)

    def _members(self) -> None:
        """Leave the group of an older generation; logical positions of the live members in the new one."""
        if self._built != self._session.number:
            self.retire()
            self._built = self._session.number
            self._position = {self._ranks.index(rank): place for place, rank in enumerate(self._live_ranks())}

    def _live(self, logical: int, what: str) -> int:
        self._members()
        if logical not in self._position:
            raise RecycleError(f"cannot {what} rank {self._ranks[logical]}: that worker is lost")
        return self._position[logical]

    def _complete(self, what: str) -> None:
        self._members()
        if len(self._position) < len(self._ranks):
            raise RecycleError(f"torch.distributed.{what} needs every member of the group, and {len(self._ranks) - len(self._position)} of "
                               f"{len(self._ranks)} are lost; use all_reduce or broadcast, which work among the live ones")

    def _current(self) -> dist.ProcessGroupGloo:
        """The Gloo group of this generation.  Runs in the operation's thread: connecting may block."""
        if self._inner is None:
            store = dist.PrefixStore(f"generation{self._built}", self._store)
            before = _sockets()
            self._inner = dist.ProcessGroupGloo(store, self._position[self._rank], len(self._position), self._timeout)
            self._sockets = sorted(_sockets() - before)
        return self._inner

    def retire(self) -> None:
        """Let go of the present Gloo group, in the background: taking one down costs 0.1 s."""
        inner, self._inner = self._inner, None
        if inner is not None:
            ours = self._session.transport_ports()
            threading.Thread(target=_shut_down, args=(inner, self._sockets, ours), daemon=True).start()


def _with_op(chosen: dist.AllreduceOptions, op: object) -> dist.AllreduceOptions:
    if op is not None:
        chosen.reduceOp = op
    return chosen


def _sockets() -> set[int]:
    """Open TCP sockets of this process, by inode: a descriptor number may be reused."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(descriptor))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add(status.st_ino)
    return found


def _shut_down(inner: dist.ProcessGroupGloo, inodes: list[int], keep_ports: set[int]) -> None:
    """End what still blocks in ``inner``: its sockets are those opened while it connected.

    The transport may have connected to a peer in the same moment; its ports are known and kept.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.fstat(int(descriptor)).st_ino in inodes:
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    if not {connection.getsockname()[1], connection.getpeername()[1]} & keep_ports:
                        connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed meanwhile, or a listener, which nobody waits on
            continue
    del inner
