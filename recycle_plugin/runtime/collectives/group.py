"""A process group whose membership changes: the torch.distributed backend ``recycle``.

DeepSpeed and user code cache group objects in many places. So the object stays the same over failures, and so do its
logical ``rank()`` and ``size()``. Behind it stand links of the live members, made anew for each membership when they
are first used (runtime/collectives/in_flight.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.asked import ALL, EACH, SUMS, Adjust, Asked, Channel, Make
from recycle_plugin.runtime.collectives.average import BACKEND, scale_sum, widened
from recycle_plugin.runtime.collectives.callers import SCALE, Callers, calling_line, named
from recycle_plugin.runtime.collectives.handles import BaseWork, Finished, PartOfWork, TorchWork
from recycle_plugin.runtime.collectives.in_flight import Flight
from recycle_plugin.runtime.collectives.link import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Operation,
    Receive,
    ReduceScatter,
    Send,
)
from recycle_plugin.runtime.collectives.outcomes import Outcomes
from recycle_plugin.runtime.collectives.seat import SeatLink
from recycle_plugin.runtime.collectives.several import Several
from recycle_plugin.runtime.collectives.staging import in_pieces
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import on_host
from recycle_plugin.runtime.devices.kinds import fetch, kinds, put
from recycle_plugin.runtime.state.touch import touch

Tensors = list[torch.Tensor]
TAKEN = frozenset({"gloo", "nccl", BACKEND})  # backends that this one stands in for
OF_THE_LIVE = (
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.BAND,
    dist.ReduceOp.BOR,
)  # results that nobody divides by the group's size


def takes(backend: str | None) -> bool:
    """Whether ``recycle`` stands in for the backend asked for by this name, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return backend is None or {each.rpartition(":")[2] for each in backend.split(",")} <= TAKEN


def register(session: Session) -> None:
    """Register the backend ``recycle`` with torch.distributed; all groups of this process follow ``session``."""
    callers, outcomes = Callers(session), Outcomes(session)

    def create(options: Any, _backend_options: object = None) -> MemberGroup:
        return MemberGroup(session, callers, outcomes, options)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=[*kinds()])


def check_backend(backend: str) -> None:
    """Raise RecycleError if the script's default process group is not of ``recycle``: others cannot lose members."""
    if backend != BACKEND:
        raise RecycleError(
            f'process groups over {backend} are not supported yet: write "gloo" where your script names a backend, or '
            "leave it out"
        )


class MemberGroup(Several, dist.ProcessGroup):
    """A torch.distributed process group that goes on with its live members when others are lost. ``options``: torch's
    for a new group, with its name and its members' global ranks.
    """

    def __init__(self, session: Session, callers: Callers, outcomes: Outcomes, options: Any) -> None:
        base: Any = super()  # torch's stubs know of no way to be one
        base.__init__(options.group_rank, options.group_size)
        self._name: str = options.group_id
        self._description = ""
        self._callers, self._session = callers, session
        self._rank = options.group_rank
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._flight = Flight(session, outcomes, options.group_id, self._ranks, self._rank, options.timeout)
        self._seat_link = SeatLink(session, self._ranks, self._flight.apart)

    def getBackendName(self) -> str:
        """Return torch.distributed's name of the backend, "recycle"."""
        return BACKEND

    def getGroupName(self) -> str:
        """Return the group's name, by which torch's functional collectives find it."""
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    # --- operations -----------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, options: Any = None) -> dist.Work:
        """torch.distributed's ``all_reduce`` over the live members; an average is divided by those that took part."""
        op: Any = dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
        return self._summed("all_reduce", op, tensors, self._adding("all_reduce", op, tensors))

    def reduce(self, tensors: Tensors, options: Any) -> dist.Work:
        """torch.distributed's ``reduce`` over the live members; raises RecycleError if the root is lost. All members
        run an all-reduce: none can be through while another still needs its part.
        """

        def check() -> None:
            self._place(root, "reduce to")
            adding()

        op, root, is_root = options.reduceOp, options.rootRank, options.rootRank == self._rank
        adding = self._adding("reduce", op, tensors)
        own = tensors if is_root else [tensor.clone() for tensor in tensors]  # an all-reduce changes it
        return self._summed("reduce", op, own, check, is_root)

    def _summed(
        self, called: str, op: Any, tensors: Tensors, check: Callable[[], object], writes: bool = True
    ) -> dist.Work:
        mean = _is_mean(op)
        added = dist.ReduceOp(dist.ReduceOp.SUM) if mean else op  # a mean is divided later, by those that took part
        make, adjust = partial(_reduction, added, mean), self._adjust(op, mean)
        return self._run(Asked(called, make, tensors, check, adjust=adjust, writes=writes, op=added))

    def broadcast(self, tensors: Tensors, options: Any) -> dist.Work:
        """torch.distributed's ``broadcast`` to the live members; raises RecycleError if the root is lost."""

        def make(held: list[torch.Tensor], place: Mapping[int, int]) -> Operation:
            return Broadcast(held, place[root])

        root = options.rootRank
        return self._run(
            Asked("broadcast", make, tensors, lambda: self._place(root, "broadcast from"), writes=root != self._rank)
        )

    def barrier(self, opts: Any = None) -> dist.Work:  # torch passes ``opts`` by name
        """torch.distributed's ``barrier`` of the live members."""
        return self._run(Asked("barrier", lambda *_: Barrier()))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any = None) -> dist.Work:
        """torch.distributed's ``all_gather``; raises RecycleError once a member is lost."""
        return self._whole(
            "all_gather", lambda held, _: AllGather(held, _beside(held, *inputs)), outputs[0], inputs, gives=ALL
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> dist.Work:
        """torch.distributed's ``gather``; raises RecycleError once a member is lost."""

        def make(held: list[torch.Tensor], _: Mapping[int, int]) -> Operation:
            return Gather(held if outputs else [], _beside(held, *inputs) if outputs else held[0], options.rootRank)

        return self._whole("gather", make, outputs[0] if outputs else inputs, inputs, writes=bool(outputs))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> dist.Work:
        """torch.distributed's ``scatter`` to the live members; raises RecycleError if the root is lost. All members get
        all parts: none can be through while another still needs its part.
        """

        def take() -> None:
            with torch.no_grad():
                output.copy_(rows[self._rank])

        (output,), root = outputs, options.rootRank
        own = root == self._rank
        rows = output.new_empty(len(self._ranks), *output.shape)
        if own:
            self._check_parts(inputs[0], output)
            rows = torch.stack(inputs[0]).detach().to(output.device)
        make, check = lambda held, place: Broadcast(held, place[root]), lambda: self._place(root, "scatter from")
        return PartOfWork(
            self._run(Asked("scatter", make, [rows], check, writes=not own, given=(inputs, outputs))), output, take
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> dist.Work:
        """torch.distributed's ``reduce_scatter`` from lists of tensors; raises RecycleError once a member is lost."""
        source = torch.cat([tensor.reshape(-1) for tensor in inputs[0]])
        return self._whole(
            "reduce_scatter",
            partial(_scattered, options.reduceOp, source),
            outputs,
            inputs,
            op=options.reduceOp,
        )

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> dist.Work:
        """torch.distributed's ``all_gather_into_tensor``; raises RecycleError once a member is lost."""

        def make(held: list[torch.Tensor], _: Mapping[int, int]) -> Operation:
            return AllGather([*held[0].view(len(self._ranks), source.numel())], _beside(held, source.reshape(-1)))

        return self._whole("all_gather_into_tensor", make, [output], source, gives=ALL)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, options: Any) -> dist.Work:
        """torch.distributed's ``reduce_scatter_tensor``; raises RecycleError once a member is lost."""
        return self._whole(
            "reduce_scatter_tensor",
            partial(_scattered, options.reduceOp, source.reshape(-1)),
            [output],
            source,
            op=options.reduceOp,
        )

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, incoming: list[int], outgoing: list[int], options: Any
    ) -> dist.Work:
        """torch.distributed's ``all_to_all_single``; raises RecycleError once a member is lost."""
        return self._whole(
            "all_to_all_single",
            lambda held, _: AllToAll(_one(held), _beside(held, source), incoming, outgoing),
            [output],
            source,
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> dist.Work:
        """torch.distributed's ``all_to_all`` of lists of tensors; raises RecycleError once a member is lost."""

        def make(held: list[torch.Tensor], _: Mapping[int, int]) -> Operation:
            flat = torch.cat([each.reshape(-1) for each in held])
            held[:] = [part.view(each.shape) for part, each in zip(flat.split(incoming), held)]
            return AllToAll(flat, _beside(held, source), incoming, [each.numel() for each in inputs])

        incoming = [each.numel() for each in outputs]
        source = torch.cat([each.detach().reshape(-1) for each in inputs])
        return self._whole("all_to_all", make, outputs, inputs)

    # before torch 2.13
    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single
    alltoall_base: Any = all_to_all_single

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> dist.Work:
        """torch.distributed's ``send`` to a logical member; raises RecycleError if that worker is lost."""

        def make(held: list[torch.Tensor], place: Mapping[int, int]) -> Operation:
            return Send(_one(held), place[destination], tag)

        return self._run(
            Asked(
                "send",
                make,
                tensors,
                lambda: self._place(destination, "send to"),
                gives=Channel(self._rank, destination, tag),
                writes=False,
            )
        )

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        """torch.distributed's ``recv`` from a logical member; raises RecycleError if that worker is lost."""

        def make(held: list[torch.Tensor], place: Mapping[int, int]) -> Operation:
            return Receive(_one(held), place[source], tag)

        return self._run(
            Asked(
                "recv",
                make,
                tensors,
                lambda: self._place(source, "receive from"),
                gives=Channel(source, self._rank, tag),
            )
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """torch.distributed's ``recv`` from whichever live member sends first."""
        return self._run(
            Asked("recv", lambda held, _: Receive(_one(held), None, tag), tensors, gives=Channel(None, self._rank, tag))
        )

    def gather_rows(
        self, called: str, rows: torch.Tensor, own: torch.Tensor, check: Callable[[], object] = bool
    ) -> dist.Work:
        """Fill the row of each live member with its ``own``, for ``called``; rows of the lost stay as they are.
        ``rows`` has two dimensions, with one row per logical member. ``check``: as in Asked.
        """

        def make(held: list[torch.Tensor], place: Mapping[int, int]) -> Operation:
            return AllGather([held[0][logical] for logical in place], own)

        return self._run(Asked(called, make, [rows], check, alone=True, given=(own,)))

    # --- among the live members only, whatever the logical size (runtime/stage/block_sums.py) ------------------

    @property
    def lost(self) -> list[int]:
        return [rank for place, rank in enumerate(self._ranks) if place not in self._flight.position]

    def live_position(self) -> tuple[int, int]:
        """Return this member's position among the live ones, and their number."""
        return self._flight.position[self._rank], len(self._flight.position)

    def sum_into(self, flat: torch.Tensor, parts: Sequence[torch.Tensor], factor: float) -> None:
        """Write ``factor`` times the sum over the live members of the concatenated ``parts`` to the 1-D ``flat``. All
        members pass parts of the same sizes, which stay unchanged. After an interruption ``flat`` must not be read.
        """
        in_pieces(self._flight, Asked("all_reduce", _sum, [flat]), flat, parts, factor)

    def exchange(self, target: torch.Tensor, source: torch.Tensor, incoming: list[int], outgoing: list[int]) -> None:
        """Send each live member its part of ``source``, and write what each sends to ``target``.

        Both are 1-D, in host memory; ``incoming`` and ``outgoing`` have the parts' lengths by live position. After an
        interruption ``target`` must not be read.
        """
        if self.live_position()[1] == 1:
            target.copy_(source)
            return
        call = self._flight.begin(
            Asked("an exchange", lambda held, _: AllToAll(held[0], source, incoming, outgoing), [target]), SUMS
        )
        self._flight.finish(call)

    # --- asking ---------------------------------------------------------------------------------------

    def _run(self, asked: Asked) -> BaseWork:
        return self._note(self._begin(asked))

    def _begin(self, asked: Asked) -> BaseWork:
        """Start a call of the script or stock code if it can be right here (runtime/collectives/callers.py)."""
        if self._callers.is_own:
            for tensor in asked.tensors:
                in_pieces(self._flight, asked, tensor.view(-1))
            return Finished()
        if self._session.hooks.seat_group is self and self._callers.in_layer:
            self._seat_link.run(asked)
            return Finished()
        self._callers.admit(asked.called, self._ranks)
        # commits a script's pending parameters first, which may bring another membership
        touch(asked.tensors, asked.given)
        return TorchWork(self._flight, self._flight.begin(asked))

    def _whole(
        self,
        called: str,
        make: Make,
        outputs: Sequence[torch.Tensor],
        *given: Any,
        gives: str = EACH,
        writes: bool = True,
        op: dist.ReduceOp | None = None,
    ) -> dist.Work:
        """Start an operation that needs every logical member and runs for a single one too; positions are logical."""
        line = calling_line()

        def check() -> None:
            if lost := self.lost:
                raise RecycleError(
                    f"torch.distributed.{called} over {named(self._ranks)}, called at {line}, needs every member, and "
                    f"{named(lost)} "
                    f"{'are' if len(lost) > 1 else 'is'} lost; all_reduce and broadcast work among the live, "
                    "recycle_plugin.mean(tensor, group) averages over them"
                )

        return self._run(
            Asked(called, make, outputs, check, alone=True, gives=gives, given=given, writes=writes, op=op)
        )

    def _adding(self, called: str, op: dist.ReduceOp, tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
        """Return the check to make before each try of a reduction."""
        if not _is_mean(op):
            line = "" if self._callers.is_own or any(op == one for one in OF_THE_LIVE) else calling_line()
            scales = op == dist.ReduceOp.SUM
            check = lambda: self._callers.sum_without(called, self._ranks, self._flight.live_ranks(), line, scales)
            return check if line else bool
        whole = next((tensor for tensor in tensors if not tensor.is_floating_point() and not tensor.is_complex()), None)
        if whole is not None:
            raise RecycleError(
                f"torch.distributed.{called} with ReduceOp.AVG of a tensor of {whole.dtype}: whole numbers have no "
                "average of their kind; convert it first"
            )
        return bool

    def _adjust(self, op: dist.ReduceOp, mean: bool) -> Adjust | None:
        """Return the change to each result of a reduction by the number that took part, if any."""
        if mean:
            return torch.Tensor.div_
        scales = self._session.group_sums == SCALE and op == dist.ReduceOp.SUM and not self._callers.is_own
        return partial(scale_sum, size=len(self._ranks)) if scales else None

    def _check_parts(self, parts: Tensors, output: torch.Tensor) -> None:
        """Raise RecycleError if a root's ``parts`` are not what the others wait for: Gloo would end their processes."""
        if [(part.shape, part.dtype) for part in parts] != [(output.shape, output.dtype)] * len(self._ranks):
            raise RecycleError(
                f"torch.distributed.scatter over {named(self._ranks)}, called at {calling_line()}: scatter_list needs "
                f"{len(self._ranks)} tensors like the output, one for each member, lost ones too"
            )

    def _place(self, logical: int, what: str) -> None:
        if logical not in self._flight.position:
            raise RecycleError(f"cannot {what} rank {self._ranks[logical]}: that worker is lost")


def _beside(held: Sequence[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` where an operation's buffers ``held`` are, in host memory or on a device."""
    what, there = "what goes to other workers", held[0]
    if on_host(tensor):
        return tensor if on_host(there) else put(tensor, there.device, what)
    return fetch(tensor, what) if on_host(there) else tensor.detach().contiguous()


def _one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the buffer in one dimension: Gloo compares the first ones, and ends the process if there is none."""
    return _one(tensors).view(-1)


def _sum(held: list[torch.Tensor], place: Mapping[int, int]) -> AllReduce:
    return AllReduce(held, dist.ReduceOp(dist.ReduceOp.SUM))


def _reduction(op: dist.ReduceOp, mean: bool, held: list[torch.Tensor], place: Mapping[int, int]) -> AllReduce:
    """Return the link's operation. A mean is summed in fp32 at least: in fp16 a sum may be infinite where the mean is
    not. Call.held gets the tensors' dtype afterwards.
    """
    if mean:
        held[:] = map(widened, held)
    return AllReduce(held, op)


def _scattered(
    op: dist.ReduceOp, source: torch.Tensor, held: list[torch.Tensor], place: Mapping[int, int]
) -> ReduceScatter:
    """Return the link's operation, as :func:`_reduction`."""
    source = _beside(held, source)
    if _is_mean(op):
        held[:], source = map(widened, held), widened(source)
    return ReduceScatter(_flat(held), source, op)


def _is_mean(op: dist.ReduceOp) -> bool:
    return op == dist.ReduceOp.AVG
