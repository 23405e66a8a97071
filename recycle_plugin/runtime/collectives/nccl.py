"""Links (runtime/collectives/link.py) over NCCL: tensors stay on their accelerator.

A wait for a lost member is a kernel, which only an abort ends. An abort ends all kernels of the group with garbage in
their outputs, and the events behind them happen all the same (measured). Therefore:

* A handle succeeds only if the host has seen the operation's event while the link was intact: :meth:`NcclLink.abort`
  marks the link before it aborts. So whoever writes state must wait for the handle, not for a stream. Another member
  may still have aborted earlier: see runtime/collectives/confirmed.py.
* Each link has a thread that launches and polls, and one that aborts: several groups aborted one after the other never
  end (measured). No other thread calls NCCL, and nobody does so under a lock.
* The call that makes a group holds a lock that an abort needs (measured), for up to ``nccl_door.LIMIT`` seconds. Then
  it is given up and repeated: its work goes on, and in between an abort has its turn.
* Each link has a stream of its own, and NCCL's have another priority: torch reuses streams after 32 of a priority. Two
  links on one stream would wait for each other's peers.
* Until the handle that :meth:`NcclLink.abort` returns is over, the device may be stuck. Recovery waits for that, with a
  deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions

from recycle_plugin.core.worker.whereabouts import Reading
from recycle_plugin.errors import RecycleError, WaitTimeout
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
    ReduceScatter,
    connecting,
    done,
    unheard,
    with_values,
)
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.accelerator import LONGEST_S, Lane, StreamEvent

ABORT_S = 20.0  # for the end of a group; took 0.1 to 0.5 s on one H200
THIN_CTAS = 2  # with these each end took 41 MiB
IN_PROGRESS = "NCCL timeout in"  # in torch's error of a call past its deadline
DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
OPS: tuple[Any, ...] = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
# of a store, a position, the number of members and a timeout
GroupMade = Callable[[dist.Store, int, int, timedelta], Any]


def takes(dtype: torch.dtype, op: ReduceOp | None) -> bool:
    """Whether NCCL carries this dtype, and reduces it by ``op`` as Gloo does; it adds booleans differently."""
    return dtype in DTYPES and (op is None or (dtype is not torch.bool and any(op == one for one in OPS)))


def process_group(store: dist.Store, position: int, members: int, timeout: timedelta, most_ctas: int = 0) -> Any:
    """Return torch's NCCL group, whose communicators can be aborted at any moment, also while they are made.
    ``most_ctas``: limit on a kernel's blocks, each of which takes memory; 0: NCCL's choice.
    """
    kind: Any = dist.ProcessGroupNCCL  # only builds with NCCL have it
    options = kind.Options()
    options.config.blocking, options._timeout = 0, timeout
    options.is_high_priority_stream = True  # of another pool than those of lanes, which wait for it
    if most_ctas:
        options.config.max_ctas = most_ctas
    return kind(store, position, members, options)


def thin_group(store: dist.Store, position: int, members: int, timeout: timedelta) -> Any:
    """Return a group for two that takes little memory, since a worker has many."""
    return process_group(store, position, members, timeout, THIN_CTAS)


class Meeting(dist.Store):
    """Where the members of one link meet: boards at the coordinator, which knows who posts.

    ``called``: the link's name in the job. ``ranks``: its members' in order. ``wanted()``: whether anybody still waits
    for the link. To NCCL it is a store, on which the first member sets the group's id.
    """

    def __init__(self, session: Session, called: str, ranks: Sequence[int]) -> None:
        super().__init__()
        self._session, self._called, self.ranks = session, called, tuple(ranks)
        self.position = self.ranks.index(session.rank)
        self._here: Reading | None = None
        self._keys: dict[str, Reading] = {}
        self.wanted: Callable[[], bool] = lambda: True

    def come(self, timeout: timedelta) -> None:
        """Post that this member is there, and return once all are; raises WaitTimeout."""
        if len(self.ranks) > 1:
            self._post("members", b"")
            self._here = self._read("members", self.ranks)
            self._await(self._here, self.ranks, timeout.total_seconds())
        else:  # a group of one may be a newcomer's, which is in no membership yet
            self._here = Reading()
            self._here.values[self._session.rank] = b""

    def missing(self) -> list[int]:
        """Return the ranks of the members that have not come."""
        return list(self.ranks) if self._here is None else self._here.missing(self.ranks)

    def set(self, key: str, value: Any) -> None:  # bytes, whatever torch's stubs say
        """Post the group's id. Called by NCCL at the first member."""
        if len(self.ranks) > 1:
            self._post(key, value)
        self._keys[key] = Reading()
        self._keys[key].values[self.ranks[0]] = value

    def get(self, key: str) -> bytes:
        """Return the group's id, once the first member has posted it. Called by NCCL."""
        self.wait([key])
        return self._keys[key].values[self.ranks[0]]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Return once these keys are set; raises WaitTimeout. Called by NCCL."""
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else self._session.waiting.timeout_s
        for key in keys:
            if key not in self._keys:
                self._keys[key] = self._read(key, self.ranks[:1])
            self._await(self._keys[key], self.ranks[:1], limit_s)

    def close(self) -> None:
        """Forget all posts: the members are connected, or never will be."""
        for key in ("members", *self._keys):
            self._session.boards.forget(self._board(key))

    def _post(self, key: str, value: bytes) -> None:
        self._session.boards.post(self._board(key), value, self._session.view.number)

    def _read(self, key: str, ranks: Sequence[int]) -> Reading:
        return self._session.boards.read(self._board(key), ranks, self._session.view.number)

    def _await(self, reading: Reading, ranks: Sequence[int], limit_s: float) -> None:
        what = f"the members of the link {self._called}"
        self._session.boards.wait(what, reading, ranks, limit_s, lambda: self.wanted())

    def _board(self, key: str) -> str:
        return f"link {self._called}, NCCL's {key}"


@dataclass(eq=False)
class Begun:
    """An operation that follows ``mark`` on the device. Once launched it has ``over``, and ``launched()`` is called."""

    operation: Operation
    handle: Handle
    mark: Any
    launched: Callable[[], object] = unheard
    over: StreamEvent | None = None


class NcclLink:
    """A link over NCCL among the workers that meet at ``meeting``; its kernels run in the order of ``lane``. ``name``
    is for messages, as "ranks 0, 1"; no other link meets at the same place. ``make`` makes NCCL's group.
    """

    def __init__(
        self, generation: int, meeting: Meeting, name: str, lane: Lane, timeout: timedelta, make: GroupMade
    ) -> None:
        self.generation = generation
        self._meeting, self._name, self._lane, self._timeout, self._make = meeting, name, lane, timeout, make
        self._changed = threading.Condition()
        self._connecting: Handle | None = None
        self._thread: threading.Thread | None = None
        self._group: Any = None
        self._made = self.connected = False  # ``_made``: something of NCCL's may exist; ``connected``: it has been used
        self._waiting: deque[Begun] = deque()
        self._launched: deque[Begun] = deque()
        self._end: Broken | None = None  # set: whatever ends from now on may be garbage
        self._down = done()
        meeting.wanted = lambda: self._end is None

    # --- the port -------------------------------------------------------------------------------------

    def connect(self) -> Handle:
        """Start connecting, once, in the link's thread. The handle names the members that have not come."""
        with self._changed:
            if self._connecting is None:
                self._connecting = connecting(self._name, self._meeting.ranks, self._meeting.missing)
                if self._end is None:
                    self._thread = threading.Thread(target=self._run, name=f"recycle: NCCL, {self._name}", daemon=True)
                    self._thread.start()
        if self._end is not None:
            self._connecting.end(self._end)
        return self._connecting

    def start(self, operation: Operation, launched: Callable[[], object] = unheard) -> Handle:
        """Queue ``operation`` behind the caller's earlier work on the device; after :meth:`abort` it ends as Broken."""
        begun = Begun(operation, Handle(f"{type(operation).__name__} among {self._name}"), self._lane.mark(), launched)
        if type(operation) not in STARTS:
            begun.handle.end(RecycleError(f"{begun.handle.what}: messages between two go through the host's memory"))
            return begun.handle
        self.connect()
        with self._changed:
            if self._end is None:
                self._waiting.append(begun)
                self._changed.notify_all()
        if self._end is not None:
            begun.handle.end(self._end)
        return begun.handle

    def abort(self) -> Handle:
        """End all operations as Broken, here at once, and on the device in a thread of its own. The handle is over once
        nothing of the link is stuck on the device.
        """
        return self._give_up(Broken(f"the connections among {self._name} were given up"))

    def _give_up(self, error: Broken) -> Handle:
        with self._changed:
            first, ended = self._end is None, [one.handle for one in (*self._waiting, *self._launched)]
            self._end = self._end or error
            self.connected, stuck = False, self._made and (not self.connected or bool(self._launched))
            if self._connecting is not None:
                ended.append(self._connecting)
            if first and stuck:
                self._down = Handle(f"the end of NCCL's group among {self._name}")
            self._waiting.clear()
            self._changed.notify_all()
        for handle in ended:
            handle.end(self._end)
        if first and not self._made:
            self._lane.leave()
        elif first:
            threading.Thread(target=self._take_down, name=f"recycle: leaving {self._name}", daemon=True).start()
        return self._down

    # --- the link's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._lane.take_thread()
            self._meet()
        except Exception as error:  # of NCCL, the device or the boards; the waiting callers get it
            self._give_up(Broken(str(error)))
            return
        while self._end is None:
            with self._changed:
                if not self._waiting and self._end is None:
                    self._changed.wait(LONGEST_S if self._launched else None)
                begun = self._waiting.popleft() if self._waiting else None
                if begun is not None:
                    self._launched.append(begun)
            if begun is not None:
                self._launch(begun)
            self._look()

    def _meet(self) -> None:
        """Make the group, and use it once: it is connected only after that."""
        self._meeting.come(self._timeout)
        with self._changed:
            if self._end is not None:
                raise self._end
            self._made = True
        meeting = self._meeting
        self._group = self._make(meeting, meeting.position, len(meeting.ranks), self._timeout)
        first = Begun(Barrier(), Handle(f"the first sum among {self._name}"), self._lane.mark())
        with self._changed:
            self._launched.append(first)
        self._start_first(first)
        while not first.handle.poll():
            self._look()
            with self._changed:
                if self._end is not None:
                    raise self._end
                self._changed.wait(LONGEST_S)
        first.handle.wait(0)
        meeting.close()
        with self._changed:
            if self._end is not None:
                raise self._end
            self.connected = True
        assert self._connecting is not None, "this thread is begun with it"
        self._connecting.end()

    def _start_first(self, begun: Begun) -> None:
        """Start the first sum, whose call makes the group. Repeat while the group is being made; raise if the link has
        ended.
        """
        until = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                return self._start(begun)
            except dist.DistBackendError as error:
                if IN_PROGRESS not in str(error) or time.monotonic() > until:
                    raise

    def _start(self, begun: Begun) -> None:
        with self._lane.behind(begun.mark):
            if self._end is not None:
                raise self._end
            for work in STARTS[type(begun.operation)](self._group, begun.operation, self._lane.where):
                work.wait()  # in the lane's order; does not block the host
            begun.over = self._lane.event(begun.handle.what)

    def _launch(self, begun: Begun) -> None:
        try:
            self._start(begun)
        except Exception as error:  # without tags the next operation would meet the one that the others have begun
            broken = Broken(str(error))
            begun.handle.end(broken if isinstance(error, dist.DistError) else error)
            self._give_up(broken)
            return
        begun.launched()

    def _look(self) -> None:
        """End the handles of finished operations. It reads the link's end after the event, as aborts set it before."""
        while self._launched and (over := self._launched[0].over) is not None and over.poll():
            error: Exception | None = None
            try:
                over.wait(0)
            except Exception as failed:  # the device's
                error = failed
            with self._changed:
                if self._end is not None:
                    return  # its handle has ended; its tensors stay until the device is done
                begun = self._launched.popleft()
            begun.handle.end(error)

    # --- the thread that aborts -----------------------------------------------------------------------

    def _take_down(self) -> None:
        try:
            self._lane.take_thread()
            if self._group is not None:
                self._group.abort()
            assert self._thread is not None, "it has made the group"
            self._thread.join(ABORT_S)
            if self._thread.is_alive():
                raise WaitTimeout(f"waited {ABORT_S:g} s for a call of NCCL's among {self._name} to return")
            self._lane.event(self._down.what).wait(ABORT_S)
        except Exception as error:  # whoever waits for the abort's end gets it
            self._down.end(error)
            return
        self._launched.clear()
        self._group = None
        self._lane.leave()
        self._down.end()


Works = list[Any]
STARTS: dict[type, Callable[[Any, Any, torch.device], Works]] = {  # of a group, an operation, and its tensors' device
    AllReduce: lambda group, one, where: [
        group.allreduce([tensor], with_values(dist.AllreduceOptions(), reduceOp=one.op)) for tensor in one.tensors
    ],
    Broadcast: lambda group, one, where: [
        group.broadcast([tensor], with_values(dist.BroadcastOptions(), rootRank=one.root)) for tensor in one.tensors
    ],
    AllGather: lambda group, one, where: [group.allgather([one.outputs], [one.source], AllgatherOptions())],
    Gather: lambda group, one, where: [
        group.gather(
            [one.outputs] if one.outputs else [], [one.source], with_values(dist.GatherOptions(), rootRank=one.root)
        )
    ],
    ReduceScatter: lambda group, one, where: [
        group._reduce_scatter_base(one.output, one.source, with_values(dist.ReduceScatterOptions(), reduceOp=one.op))
    ],
    AllToAll: lambda group, one, where: [
        group.alltoall_base(one.output, one.source, [*one.incoming], [*one.outgoing], dist.AllToAllOptions())
    ],
    Barrier: lambda group, one, where: [group.allreduce([torch.zeros(1, device=where)], dist.AllreduceOptions())],
}
