"""A worker's place in a job without DeepSpeed's topology: its seat, those it shares it with, and its groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.runtime.collectives.average import BACKEND
from recycle_plugin.runtime.collectives.group import MemberGroup, check_backend
from recycle_plugin.runtime.control.session import Session


@dataclass(frozen=True)
class HeldSeat:
    """The place of a worker in a job of shape ``topology``: ``shard`` of ``seat``, which ``shards`` workers hold
    together. ``peers``: the group of the workers with the same shard of the same stage.
    """

    topology: Topology
    seat: Seat
    peers: MemberGroup
    shards: int = 1
    shard: int = 0


def meet(line: Session, topology: Topology, shards: int = 1) -> HeldSeat:
    """Return the place of this worker by its rank, which counts stages, then replicas, then shards. Collective: all
    workers make all groups.
    """
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    check_backend(dist.get_backend())
    stage, rest = divmod(line.rank, topology.replicas * shards)
    replica, shard = divmod(rest, shards)
    of_stage = topology.replicas * shards
    peers = {
        (of, part): dist.new_group(range(of * of_stage + part, (of + 1) * of_stage, shards))
        for of in range(topology.stages)
        for part in range(shards)
    }
    if shards > 1:
        first = [dist.new_group(range(at, at + shards)) for at in range(0, topology.stages * of_stage, shards)]
        line.hooks.seat_group = first[line.rank // shards]
    return HeldSeat(topology, Seat(replica, stage), peers[stage, shard], shards, shard)


@torch.no_grad()
def make_alike(tensors: Iterable[torch.Tensor], peers: dist.ProcessGroup) -> None:
    """Give all ``peers`` the values of the first of them: the script may have made its layers with any seed."""
    for tensor in tensors:
        dist.broadcast(tensor, src=dist.get_global_rank(peers, 0), group=peers)
