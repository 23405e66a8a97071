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

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, NamedTuple, Sequence, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.protocol import Missing
from recycle_plugin.runtime.average import BACKEND
from recycle_plugin.runtime.callers import Callers, calling_line, named
from recycle_plugin.runtime.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.link import Link
from recycle_plugin.runtime.outcomes import Outcomes
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.touch import touch
from recycle_plugin.runtime.transport import DEATH_S

Start = Callable[[dist.ProcessGroupGloo, list[torch.Tensor]], dist.Work]
Options = TypeVar("Options", dist.AllreduceOptions, dist.ReduceOptions)
OF_THE_LIVE = (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR)  # nobody divides these by the group's size
ALL, EACH, NOTHING = "all", "each", "nothing"
NOT_GLOOS = ("Cannot use", "Invalid scalar type", "nsupported", "nhandled")  # what it says of an operation, a dtype or a device that it does not know
NEWS_TIMEOUT_S = 30.0  # between a broken connection and the coordinator's word of who was lost


def register(session: Session) -> None:
    """Make the backend known to torch.distributed; all groups of this process follow ``session``."""
    callers, outcomes = Callers(session), Outcomes(session)

    def create(options: object, _backend_options: object = None) -> MemberGroup:
        outcomes.meet_at(options.store)
        return MemberGroup(session, callers, outcomes, options)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


class Finished(dist.Work):
    """The handle of an operation that is over by the time it is returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Underway(dist.Work):
    """The handle of an operation that ``finish`` waits for."""

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None


class Way(NamedTuple):
    """From one member to another, whose other end has the global rank ``rank``."""

    name: str
    rank: int


@dataclass(frozen=True)
class Operation:
    """``called``: the function of torch.distributed; ``start`` begins it, given copies of ``tensors``, what it ``writes`` to, or here only reads; ``given``:
    whatever else the caller has given it.

    ``check`` sees before each try whether it can be right; ``alone``: there is something to do for a single member too; ``divide``: the result is,
    by how many took part; ``gives``: the same to ALL members, to both ends of a Way, to EACH its own, or NOTHING that the script waits for.
    """

    called: str
    start: Start
    tensors: Sequence[torch.Tensor] = ()
    check: Callable[[], object] = bool
    alone: bool = False
    divide: bool = False
    gives: str | Way = ALL
    given: Sequence[Any] = ()
    writes: bool = True


@dataclass
class Try:
    """Of an operation, over ``link``, which writes to ``held``; ``work``: where it has begun already."""

    link: Link
    held: list[torch.Tensor]
    work: dist.Work | None = None


class MemberGroup(dist.ProcessGroup):
    """Of the live ones of its logical members; ``options`` are torch's for a new group, with its name and its members' global ranks."""

    def __init__(self, session: Session, callers: Callers, outcomes: Outcomes, options: object) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._session, self._callers, self._outcomes = session, callers, outcomes
        self._name, self._store, self._timeout = options.group_id, options.store, options.timeout
        self._rank = options.group_rank
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._link: Link | None = None
        self._position: dict[int, int] = {}

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return BACKEND

    # --- operations -----------------------------------------------------------------------------------

    def allreduce(self, tensors, options=None):
        op = options.reduceOp if isinstance(options, dist.AllreduceOptions) else dist.ReduceOp.SUM if options is None else options
        chosen, check = _added(dist.AllreduceOptions(), op), self._adding("all_reduce", op, tensors)
        return self._run(Operation("all_reduce", lambda inner, held: inner.allreduce(held, chosen), tensors, check, divide=_is_mean(op)))

    def reduce(self, tensors, options):
        def check():
            self._live(options.rootRank, "reduce to")
            adding()

        def start(inner, held):
            chosen = _added(dist.ReduceOptions(), options.reduceOp)
            chosen.rootRank, chosen.rootTensor = self._position[options.rootRank], options.rootTensor
            return inner.reduce(held, chosen)

        adding, is_root = self._adding("reduce", options.reduceOp, tensors), options.rootRank == self._rank
        own = tensors if is_root else [tensor.clone() for tensor in tensors]  # Gloo adds up in everybody's
        return self._run(Operation("reduce", start, own, check, divide=_is_mean(options.reduceOp), gives=ALL if is_root else EACH))

    def broadcast(self, tensors, options):
        def start(inner, held):
            inner_options = dist.BroadcastOptions()
            inner_options.rootRank, inner_options.rootTensor = self._live(options.rootRank, "broadcast from"), options.rootTensor
            return inner.broadcast(held, inner_options)

        writes = options.rootRank != self._rank
        return self._run(Operation("broadcast", start, tensors, lambda: self._live(options.rootRank, "broadcast from"), writes=writes))

    def barrier(self, opts=None):  # torch passes it by this name
        return self._run(Operation("barrier", lambda inner, _: inner.barrier(dist.BarrierOptions())))

    def allgather(self, outputs, inputs, options=None):
        return self._whole("all_gather", lambda inner, _: inner.allgather(outputs, inputs, AllgatherOptions()), outputs, inputs)

    def gather(self, outputs, inputs, options):
        return self._whole("gather", lambda inner, _: inner.gather(outputs, inputs, options), outputs, inputs)

    def scatter(self, outputs, inputs, options):
        return self._whole("scatter", lambda inner, _: inner.scatter(outputs, inputs, options), outputs, inputs)

    def reduce_scatter(self, outputs, inputs, options):
        return self._whole("reduce_scatter", lambda inner, _: inner.reduce_scatter(outputs, inputs, options), outputs, inputs)

    def all_gather_single(self, output, source, options=None):
        return self._whole("all_gather_into_tensor", lambda inner, _: inner._allgather_base(output, source, AllgatherOptions()), output, source)

    def reduce_scatter_single(self, output, source, options):
        return self._whole("reduce_scatter_tensor", lambda inner, _: inner._reduce_scatter_base(output, source, options), output, source)

    def all_to_all_single(self, output, source, incoming, outgoing, options):
        return self._whole("all_to_all_single", lambda inner, _: inner.alltoall_base(output, source, incoming, outgoing, options), output, source)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single  # before torch 2.13

    def send(self, tensors, destination, tag=0):
        def peer():
            return self._live(destination, "send to")

        way = Way(f"{self._rank} to {destination}, {tag}", self._ranks[destination])
        return self._begin(Operation("send", lambda inner, held: inner.send(held, peer(), tag), tensors, peer, gives=way, writes=False))

    def recv(self, tensors, source, tag=0):
        def peer():
            return self._live(source, "receive from")

        way = Way(f"{source} to {self._rank}, {tag}", self._ranks[source])
        return self._begin(Operation("recv", lambda inner, held: inner.recv(held, peer(), tag), tensors, peer, gives=way))

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
        def start(inner, held):
            return inner.alltoall_base(held[0], source, incoming, outgoing, dist.AllToAllOptions())

        self._carry_out(Operation("an exchange", start, [target], gives=NOTHING))

    # --- membership -----------------------------------------------------------------------------------

    def _run(self, operation: Operation) -> Finished:
        """What the script asks for, or stock code, if it can be right where it is called (runtime/callers.py)."""
        self._admit(operation)
        return self._carry_out(operation)

    def _admit(self, operation: Operation) -> None:
        self._callers.admit(operation.called, self._ranks)
        touch(operation.tensors, operation.given)  # a script's parameters are committed first, which may bring another membership

    def _begin(self, operation: Operation) -> Underway:
        """... whose end is waited for later: two that send to each other both do so before either receives."""
        self._admit(operation)
        self._members()
        operation.check()
        begun = Try(self._link, [tensor.clone() for tensor in operation.tensors])

        def start(inner: dist.ProcessGroupGloo) -> dist.Work:
            begun.work = operation.start(inner, begun.held)
            return Finished()

        try:
            self._attempt(operation.called, start)
        except Interrupted:
            if self._session.between_steps is None:
                raise
            self._session.between_steps()
        return Underway(lambda: self._carry_out(operation, begun))

    def _carry_out(self, operation: Operation, last: Try | None = None) -> Finished:
        """Among the live members.  ``last``: where it has begun.

        A membership change inside a training step breaks it, and recovery deals with that.  Between steps, in the script's own
        collectives, the members that are left take the result from who has it, or try again.  There each try has copies of its own: an
        operation that was left behind may go on writing.
        """
        while True:
            self._members()
            own = bool(self._session.between_steps)
            try:
                held = self._elsewhere(operation) if last is not None and last.link is not self._link else None
                if held is None:
                    operation.check()
                    if last is None or last.link is not self._link:
                        last = Try(self._link, [tensor.clone() for tensor in operation.tensors] if own else list(operation.tensors))
                    held = self._tried(operation, last)
            except Interrupted:
                if self._session.between_steps is None:
                    raise
                self._session.between_steps()
                continue
            self._hand_over(operation, held, own)
            return Finished()

    def _tried(self, operation: Operation, this: Try) -> list[torch.Tensor]:
        if operation.alone or len(self._position) > 1:
            self._attempt(operation.called, lambda inner: this.work or operation.start(inner, this.held))
        if operation.divide:
            with torch.no_grad():
                for tensor in this.held:
                    tensor.div_(len(self._position))
        return this.held

    def _elsewhere(self, operation: Operation) -> list[torch.Tensor] | None:
        """A membership change has cut off a try: what the operation has come to on others, None where nobody is through with it."""
        if operation.gives == NOTHING:
            return None
        others = self._live_ranks()
        if isinstance(operation.gives, Way):
            others = tuple(rank for rank in others if rank == operation.gives.rank)
        return self._outcomes.of_next(self._line_of(operation), operation.called, others) if others else None

    def _line_of(self, operation: Operation) -> str:
        """What is counted together: nothing overtakes anything else on it."""
        return f"{self._name} {operation.gives.name}" if isinstance(operation.gives, Way) else self._name

    def _hand_over(self, operation: Operation, held: list[torch.Tensor], own: bool) -> None:
        """The caller has the result; for whom a loss cuts off from that of a script's ``own`` collective there is a copy."""
        with torch.no_grad():
            for tensor, value in zip(operation.tensors, held) if operation.writes else ():  # else autograd would take the tensor for changed
                if value is not tensor:
                    tensor.copy_(value)
        if own and operation.gives != NOTHING and len(self._ranks) > 1:
            self._outcomes.add(self._line_of(operation), None if operation.gives == EACH else held)

    def _whole(self, called: str, start: Start, *given: Any) -> Finished:
        """An operation that needs every logical member, and has something to do for a single one too."""
        return self._run(Operation(called, start, check=lambda: self._complete(called), alone=True, gives=EACH, given=given))

    def _adding(self, called: str, op: dist.ReduceOp, tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
        """What is to be seen to before each try of a reduction."""
        if not _is_mean(op):
            return bool if any(op == one for one in OF_THE_LIVE) else lambda: self._callers.sum_without(called, self._ranks, self._live_ranks())
        whole = next((tensor for tensor in tensors if not tensor.is_floating_point() and not tensor.is_complex()), None)
        if whole is not None:
            raise RecycleError(f"torch.distributed.{called} with ReduceOp.AVG of a tensor of {whole.dtype}: whole numbers have no average of their kind; convert it first")
        return bool

    def _attempt(self, what: str, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        link = self._link
        name = f"{what} among ranks {', '.join(map(str, self._live_ranks()))}"
        try:
            self._operate(name, link, start)
        except RecycleError:
            raise
        except RuntimeError as error:  # Gloo's word for a broken connection too: who is gone comes from the coordinator
            if any(words in str(error) for words in NOT_GLOOS):
                raise
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
        if self._session.generation is None:
            return self._ranks
        return tuple(rank for rank in self._ranks if rank in self._session.roster.ranks)

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

    def _complete(self, called: str) -> None:
        if len(self._position) < len(self._ranks):
            lost = [rank for place, rank in enumerate(self._ranks) if place not in self._position]
            raise RecycleError(f"torch.distributed.{called} over {named(self._ranks)}, called at {calling_line()}, needs every member, and {named(lost)} "
                               f"{'are' if len(lost) > 1 else 'is'} lost; all_reduce and broadcast work among the live, recycle_plugin.mean(tensor, group) averages over them")


def _is_mean(op: dist.ReduceOp) -> bool:
    return op == dist.ReduceOp.AVG


def _added(options: Options, op: dist.ReduceOp) -> Options:
    """``options`` with ``op``; an average is a sum that is divided here, by how many took part."""
    options.reduceOp = dist.ReduceOp.SUM if _is_mean(op) else op
    return options
