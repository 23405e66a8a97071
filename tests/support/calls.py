"""The calls of torch.distributed that docs/collectives.md tells of: each as a function that a rank of three runs.

What a call gives is made comparable (lists and numbers), so that the same function says what stock torch gives over
Gloo.  Torch's other public names are in tests/runtime/test_calls.py, which compares both with torch's own lists.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.nn.functional as differentiable
from torch.distributed.distributed_c10d import _coalescing_manager

LARGE = 1 << 18  # numbers: more than the system's buffers hold
LOST = 2  # the rank that dies, of three


@dataclass(frozen=True)
class Call:
    """``do(rank)`` makes the call, and returns what it has given; ``of`` is torch's name for it, and ``how`` it is
    called.  ``stock``: what says what it is to give, where torch's own can't over Gloo.
    """

    of: str
    do: Callable[[int], Any]
    how: str = ""
    stock: Callable[[int], Any] | None = None

    @property
    def name(self) -> str:
        return f"`{self.of}`, {self.how}" if self.how else f"`{self.of}`"

    @property
    def needs_the_lost(self) -> bool:
        """Whether it can't be made without the one that dies."""
        return "the lost one" in self.how


def numbers(rank: int, length: int = 3) -> torch.Tensor:
    return torch.arange(float(length)) + 10 * rank + 1


def ranks() -> int:
    return dist.get_world_size()


def listed(*tensors: torch.Tensor) -> list:
    return [tensor.tolist() for tensor in tensors]


def zeros(count: int, length: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(length) for _ in range(count)]


def by_rank(does: Callable[..., Any]) -> Callable[..., Callable[[int], Any]]:
    return lambda *given, **named: lambda rank: does(rank, *given, **named)


@by_rank
def in_place(rank: int, call: Callable[[torch.Tensor], Any], length: int = 3) -> list:
    held = numbers(rank, length)
    work = call(held)
    if work is not None:
        work.wait()
    return listed(held)


@by_rank
def given(rank: int, call: Callable[[int], Any]) -> list:
    result = call(rank)
    return listed(*(result if isinstance(result, (list, tuple)) else [result]))


# --- of tensors ----------------------------------------------------------------------------------------


def all_gather(rank: int) -> list:
    held = zeros(ranks())
    dist.all_gather(held, numbers(rank))
    return listed(*held)


def all_gather_coalesced(rank: int) -> list:
    held = [[torch.zeros(3), torch.zeros(2)] for _ in range(ranks())]
    dist.all_gather_coalesced(held, [numbers(rank), numbers(rank, 2)])
    return [listed(*each) for each in held]


@by_rank
def all_gather_into(rank: int, call: Callable[..., Any]) -> list:
    held = torch.zeros(3 * ranks())
    call(held, numbers(rank))
    return held.tolist()


@by_rank
def gather_to(rank: int, root: int) -> list:
    held = zeros(ranks()) if rank == root else None
    dist.gather(numbers(rank), held, dst=root)
    return listed(*held or [])


@by_rank
def scatter_from(rank: int, root: int) -> list:
    held = torch.zeros(3)
    dist.scatter(held, [numbers(10 + to) for to in range(ranks())] if rank == root else None, src=root)
    return held.tolist()


@by_rank
def reduce_to(rank: int, root: int) -> list:
    held = numbers(rank)
    dist.reduce(held, root)
    return held.tolist() if rank == root else []  # elsewhere it is not defined


def reduce_scatter(rank: int) -> list:
    held = torch.zeros(2)
    dist.reduce_scatter(held, [numbers(rank + to, 2) for to in range(ranks())])
    return held.tolist()


@by_rank
def reduce_scatter_from(rank: int, call: Callable[..., Any]) -> list:
    held = torch.zeros(2)
    call(held, numbers(rank, 2 * ranks()))
    return held.tolist()


def all_to_all(rank: int) -> list:
    held = zeros(ranks())
    dist.all_to_all(held, [numbers(rank + to) for to in range(ranks())])
    return listed(*held)


def all_to_all_uneven(rank: int) -> list:
    """Over Gloo torch's takes tensors of one size only."""
    held = [torch.zeros(1 + source) for source in range(ranks())]
    dist.all_to_all(held, [numbers(rank, 1 + rank)] * ranks())
    return torch.cat(held).tolist()


@by_rank
def all_to_all_single(rank: int, given: Callable[[int], torch.Tensor]) -> list:
    """Rank r sends 1 + r numbers to each."""
    parts = [1 + source for source in range(ranks())]
    held = torch.zeros(sum(parts))
    dist.all_to_all_single(held, given(rank), parts, [1 + rank] * ranks())
    return held.tolist()


@by_rank
def coalesced(rank: int, call: Callable[[int], Any], **named: Any) -> list:
    """Two calls inside of torch's manager."""
    with _coalescing_manager(**named) as manager:
        held = [call(rank), call(rank + 1)]
    if named.get("async_ops"):
        manager.wait()
    return listed(*held)


def gathered_single(rank: int) -> torch.Tensor:
    held = torch.zeros(3 * ranks())
    dist.all_gather_into_tensor(held, numbers(rank))
    return held


def scattered_single(rank: int) -> torch.Tensor:
    held = torch.zeros(2)
    dist.reduce_scatter_tensor(held, numbers(rank, 2 * ranks()))
    return held


def summed(rank: int) -> torch.Tensor:
    held = numbers(rank)
    dist.all_reduce(held)
    return held


def averaged(rank: int) -> list:
    return listed(summed(rank) / ranks())


def all_reduce_coalesced(rank: int) -> list:
    held = [numbers(rank), numbers(rank, 2)]
    dist.all_reduce_coalesced(held)
    return listed(*held)


# --- of objects ----------------------------------------------------------------------------------------


def all_gather_object(rank: int) -> list:
    held: list = [None] * ranks()
    dist.all_gather_object(held, {"of": "x" * (5 * rank + 1)})
    return held


@by_rank
def gather_object_to(rank: int, root: int) -> list | None:
    held: list | None = [None] * ranks() if rank == root else None
    dist.gather_object({"of": "x" * (5 * rank + 1)}, held, dst=root)
    return held


@by_rank
def broadcast_objects_from(rank: int, root: int) -> list:
    held = [f"of {rank}", rank]
    dist.broadcast_object_list(held, src=root)
    return held


@by_rank
def scatter_objects_from(rank: int, root: int) -> list:
    held: list = [None]
    dist.scatter_object_list(held, [f"to {to}" for to in range(ranks())] if rank == root else None, src=root)
    return held


# --- from one to another -------------------------------------------------------------------------------


@by_rank
def between(rank: int, source: int, target: int, sending: Callable[..., Any], receiving: Callable[..., Any]) -> list:
    """One message of a megabyte; who is neither end does nothing."""
    held = numbers(source, LARGE) if rank == source else torch.zeros(LARGE)
    work = sending(held, target) if rank == source else receiving(held, source) if rank == target else None
    if isinstance(work, dist.Work):
        work.wait()
    return held[:2].tolist() if rank == target else []


@by_rank
def from_anyone(rank: int, source: int) -> list:
    """The lower live rank receives what rank ``source`` sends to it."""
    held = torch.zeros(3)
    if rank == source:
        dist.send(numbers(rank), 0)
    return [dist.recv(held), held.tolist()] if rank == 0 else []


@by_rank
def symmetric(rank: int, first: str) -> list:
    """Ranks 0 and 1 send each other a megabyte at once, each starting the ``first`` operation before the other one."""
    if rank > 1:
        return []
    held, own = torch.zeros(LARGE), numbers(rank, LARGE)
    starts = {"isend": lambda: dist.isend(own, 1 - rank), "irecv": lambda: dist.irecv(held, 1 - rank)}
    works = [starts.pop(first)(), *(start() for start in starts.values())]
    for work in works:
        work.wait()
    return held[:2].tolist()


@by_rank
def batched(rank: int, peers: tuple[int, ...]) -> list:
    if rank not in peers:
        return []
    place, held = peers.index(rank), torch.zeros(LARGE)
    asked = [
        dist.P2POp(dist.isend, numbers(rank, LARGE), peers[(place + 1) % len(peers)]),
        dist.P2POp(dist.irecv, held, peers[place - 1]),
    ]
    for work in dist.batch_isend_irecv(asked):
        work.wait()
    return held[:2].tolist()


@by_rank
def objects_between(rank: int, source: int, target: int) -> list:
    held = ["a", rank] if rank == source else [None, None]
    if rank == source:
        dist.send_object_list(held, target)
    elif rank == target:
        dist.recv_object_list(held, source)
    return held if rank == target else []


# --- handles, groups and checkpoints -------------------------------------------------------------------


@by_rank
def handled(rank: int, ask: Callable[[dist.Work, torch.Tensor], Any]) -> Any:
    held = numbers(rank)
    return ask(dist.all_reduce(held, async_op=True), held)


def chained(work: dist.Work, held: torch.Tensor) -> list:
    doubled = work.get_future().then(lambda future: [2 * tensor for tensor in future.value()])
    return listed(*doubled.wait(), held)


def waited(work: dist.Work, then: Callable[[dist.Work], Any]) -> Any:
    work.wait()
    return then(work)


def source_rank(rank: int) -> list:
    if rank == 1:
        dist.send(numbers(rank), 0)
    if rank:
        return []
    held = torch.zeros(3)
    work = dist.irecv(held)
    work.wait()
    return [work.source_rank(), held.tolist()]


@by_rank
def saved(rank: int, call: str) -> list:
    """Save a state that all have alike; what is there is read by rank 0 alone."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    future = getattr(checkpoint, call)({"weight": torch.arange(4.0)}, checkpoint_id=folder[0])
    if future is not None and hasattr(future, "result"):
        future.result()
    dist.barrier()
    if rank:
        return []
    found = {"weight": torch.zeros(4)}
    checkpoint.load(found, checkpoint_id=folder[0], no_dist=True)
    return [*listed(found["weight"]), sorted(path.name for path in Path(folder[0]).iterdir())[:1]]


def loaded(rank: int) -> list:
    folder = [tempfile.mkdtemp()]
    if rank == 0:
        checkpoint.save({"weight": torch.arange(4.0)}, checkpoint_id=folder[0], no_dist=True)
    dist.broadcast_object_list(folder, src=0)
    found = {"weight": torch.zeros(4)}
    checkpoint.load(found, checkpoint.FileSystemReader(folder[0]))  # torch takes this one by its place, too
    return listed(found["weight"])


def world() -> Any:
    return dist.group.WORLD


TENSORS = [
    Call("all_reduce", in_place(dist.all_reduce), "SUM"),
    Call("all_reduce", in_place(lambda held: dist.all_reduce(held, dist.ReduceOp.AVG)), "AVG", averaged),
    Call("all_reduce", in_place(lambda held: dist.all_reduce(held, dist.ReduceOp.MAX)), "MAX"),
    Call("all_reduce", in_place(lambda held: dist.all_reduce(held, async_op=True)), "`async_op=True`"),
    Call("all_reduce_coalesced", all_reduce_coalesced),
    Call("reduce", reduce_to(0), "to a live member"),
    Call("reduce", reduce_to(LOST), "to the lost one"),
    Call("broadcast", in_place(lambda held: dist.broadcast(held, 0)), "from a live member"),
    Call("broadcast", in_place(lambda held: dist.broadcast(held, LOST)), "from the lost one"),
    Call("all_gather", all_gather),
    Call("all_gather_coalesced", all_gather_coalesced),
    Call("all_gather_into_tensor", all_gather_into(lambda *given: dist.all_gather_into_tensor(*given))),
    Call("all_gather_single", all_gather_into(lambda *given: dist.all_gather_single(*given))),
    Call("gather", gather_to(0), "to a live member"),
    Call("gather", gather_to(LOST), "to the lost one"),
    Call("scatter", scatter_from(0), "from a live member"),
    Call("scatter", scatter_from(LOST), "from the lost one"),
    Call("reduce_scatter", reduce_scatter),
    Call("reduce_scatter_tensor", reduce_scatter_from(lambda *given: dist.reduce_scatter_tensor(*given))),
    Call("reduce_scatter_single", reduce_scatter_from(lambda *given: dist.reduce_scatter_single(*given))),
    Call("all_to_all", all_to_all),
    Call("all_to_all", all_to_all_uneven, "of unequal sizes",
         all_to_all_single(lambda rank: numbers(rank, 1 + rank).repeat(ranks()))),
    Call("all_to_all_single", all_to_all_single(lambda rank: numbers(rank, ranks() * (1 + rank)))),
    Call("barrier", lambda rank: dist.barrier()),
    Call("monitored_barrier", lambda rank: dist.monitored_barrier(timeout=timedelta(seconds=20))),
    Call("_coalescing_manager", coalesced(summed), "of `all_reduce`"),
    Call("_coalescing_manager", coalesced(summed, async_ops=True), "of `all_reduce`, `async_ops=True`"),
    Call("_coalescing_manager", coalesced(summed, device=torch.device("cpu")), "of `all_reduce`, with a device",
         coalesced(summed)),
    Call("_coalescing_manager", coalesced(gathered_single), "of `all_gather_into_tensor`"),
    Call("_coalescing_manager", coalesced(scattered_single), "of `reduce_scatter_tensor`"),
]  # fmt: skip
OBJECTS = [
    Call("all_gather_object", all_gather_object),
    Call("gather_object", gather_object_to(0), "to a live member"),
    Call("gather_object", gather_object_to(LOST), "to the lost one"),
    Call("broadcast_object_list", broadcast_objects_from(0), "from a live member"),
    Call("broadcast_object_list", broadcast_objects_from(LOST), "from the lost one"),
    Call("scatter_object_list", scatter_objects_from(0), "from a live member"),
    Call("scatter_object_list", scatter_objects_from(LOST), "from the lost one"),
]
MESSAGES = [
    Call("send", between(0, 1, dist.send, dist.recv), "between live members"),
    Call("send", between(0, LOST, dist.send, dist.recv), "to the lost one"),
    Call("recv", between(LOST, 0, dist.send, dist.recv), "from the lost one"),
    Call("recv", from_anyone(1), "without a source, a live member sends"),
    Call("isend", symmetric("isend"), "to each other, before `irecv`"),
    Call("irecv", symmetric("irecv"), "from each other, before `isend`"),
    Call("isend", between(0, LOST, dist.isend, dist.recv), "to the lost one"),
    Call("irecv", between(LOST, 0, dist.send, dist.irecv), "from the lost one"),
    Call("batch_isend_irecv", batched((0, 1)), "between live members"),
    Call("batch_isend_irecv", batched((0, 1, LOST)), "around a ring with the lost one"),
    Call("send_object_list", objects_between(0, 1), "between live members"),
    Call("send_object_list", objects_between(0, LOST), "to the lost one"),
    Call("recv_object_list", objects_between(LOST, 0), "from the lost one"),
]
HANDLES = [
    Call("Work.wait", handled(lambda work, held: [work.wait(), *listed(held)])),
    Call("Work.wait", handled(lambda work, held: [work.wait(timedelta(seconds=20)), *listed(held)]), "with a timeout"),
    Call("Work.is_completed", handled(lambda work, held: waited(work, lambda one: one.is_completed()))),
    Call("Work.is_success", handled(lambda work, held: waited(work, lambda one: one.is_success()))),
    Call("Work.exception", handled(lambda work, held: waited(work, lambda one: one.exception()))),
    Call("Work.result", handled(lambda work, held: waited(work, lambda one: listed(*one.result())))),
    Call("Work.get_future", handled(lambda work, held: listed(*work.get_future().wait(), held)), "`.wait()`"),
    Call("Work.get_future", handled(chained), "`.then(…)`"),
    Call("Work.synchronize", handled(lambda work, held: waited(work, lambda one: [one.synchronize(), *listed(held)]))),
    Call("Work.source_rank", source_rank),
]
FUNCTIONAL = [
    Call("functional.all_reduce", given(lambda rank: functional.all_reduce(numbers(rank), "sum", world()))),
    Call("functional.all_reduce_coalesced",
         given(lambda rank: functional.all_reduce_coalesced([numbers(rank), numbers(rank, 2)], "sum", world()))),
    Call("functional.broadcast", given(lambda rank: functional.broadcast(numbers(rank), 0, world())),
         "from a live member"),
    Call("functional.broadcast", given(lambda rank: functional.broadcast(numbers(rank), LOST, world())),
         "from the lost one"),
    Call("functional.all_gather_tensor", given(lambda rank: functional.all_gather_tensor(numbers(rank), 0, world()))),
    Call("functional.all_gather_into_tensor_coalesced",
         given(lambda rank: functional.all_gather_into_tensor_coalesced([numbers(rank), numbers(rank, 2)], world()))),
    Call("functional.reduce_scatter_tensor",
         given(lambda rank: functional.reduce_scatter_tensor(numbers(rank, 2 * ranks()), "sum", 0, world()))),
    Call("functional.reduce_scatter_tensor_coalesced",
         given(lambda rank: functional.reduce_scatter_tensor_coalesced(
             [numbers(rank, 2 * ranks())], "sum", [0], world()))),
    Call("functional.all_to_all_single",
         given(lambda rank: functional.all_to_all_single(numbers(rank, ranks()), None, None, world()))),
    Call("functional.permute_tensor", given(lambda rank: functional.permute_tensor(
        numbers(rank), [(place + 1) % ranks() for place in range(ranks())], world()))),
]  # fmt: skip
DIFFERENTIABLE = [
    Call("nn.functional.all_reduce", given(lambda rank: differentiable.all_reduce(numbers(rank)))),
    Call("nn.functional.broadcast", given(lambda rank: differentiable.broadcast(numbers(rank), 0)),
         "from a live member"),
    Call("nn.functional.reduce", given(lambda rank: differentiable.reduce(numbers(rank), 0) * (rank == 0)),
         "to a live member"),
    Call("nn.functional.all_gather", given(lambda rank: differentiable.all_gather(numbers(rank)))),
    Call("nn.functional.gather", given(lambda rank: differentiable.gather(numbers(rank), 0)), "to a live member"),
    Call("nn.functional.scatter", given(lambda rank: differentiable.scatter(
        [numbers(10 + to) for to in range(ranks())], 0)), "from a live member"),
    Call("nn.functional.reduce_scatter", given(lambda rank: differentiable.reduce_scatter(
        torch.zeros(2), [numbers(rank + to, 2) for to in range(ranks())]))),
    Call("nn.functional.all_to_all", given(lambda rank: differentiable.all_to_all(
        zeros(ranks()), [numbers(rank + to) for to in range(ranks())]))),
    Call("nn.functional.all_to_all_single", given(lambda rank: differentiable.all_to_all_single(
        torch.zeros(ranks()), numbers(rank, ranks())))),
]  # fmt: skip
CHECKPOINTS = [
    Call("checkpoint.save", saved("save")),
    Call("checkpoint.async_save", saved("async_save")),
    Call("checkpoint.load", loaded),
]
CALLS = TENSORS + OBJECTS + MESSAGES + HANDLES + FUNCTIONAL + DIFFERENTIABLE + CHECKPOINTS
