"""Replicas of a model that ``torch.distributed.fsdp.fully_shard`` shards among the processes of each replica (HSDP).

FSDP2 gathers weights and sums gradients inside a replica, over the group of the processes that hold its seat
(runtime/collectives/seat.py). The trainer sees one process's *shard*: the local part of each parameter as a parameter
of its own, in the same memory. The script's optimizer steps these local parts in place of the sharded parameters, which
is right for optimizers that step each element by itself. So everything that is summed over replicas, stepped, undone,
compared and sent to newcomers is a plain tensor, as in any stage that several processes hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.place import HeldSeat, meet
from recycle_plugin.runtime.control import session
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import own_device
from recycle_plugin.runtime.stage.ports import Compute


def replica_mesh(shards: int) -> DeviceMesh:
    """Return the mesh of this process's replica; see recycle_plugin.adapters.plain.replica_mesh."""
    line, workers = session.of_this_process(), int(os.environ["WORLD_SIZE"])
    if not isinstance(shards, int) or shards < 2:
        raise RecycleError(
            f"replica_mesh({shards!r}): write how many processes share a model, 2 or more; if each has all of it, "
            "leave fully_shard out"
        )
    if workers % shards or workers < 2 * shards:
        raise RecycleError(
            f"{workers} workers for replicas of {shards}: start a multiple of {shards}, and at least {2 * shards}, "
            "since a lost replica needs another to take its micro-batches: python -m recycle_plugin.launch --workers "
            f"{2 * shards}"
        )
    if line.hooks.place is None:
        line.hooks.place = meet(line, Topology(workers // shards, 1, 1), shards)
    if line.hooks.place.shards != shards:
        raise RecycleError(
            f"replica_mesh({shards}) after replica_mesh({line.hooks.place.shards}): all replicas have the same number"
        )
    assert line.hooks.seat_group is not None, "several hold a seat"
    return DeviceMesh.from_group(line.hooks.seat_group, own_device(os.environ.get("DS_ACCELERATOR")).where.type)


class Shards(nn.Module):
    """This process's part of ``inner``, as a module: its layers and buffers, and the local parts of its parameters,
    under their names in ``inner``. Raises RecycleError if ``inner`` is not sharded over this replica's processes, or in
    a way that is not supported.
    """

    inner: nn.Module

    def __init__(self, line: Session, inner: nn.Module, micro_batches: int) -> None:
        super().__init__()
        object.__setattr__(self, "inner", inner)  # not a child, whose parameters' names would get a prefix
        place, self._line = line.hooks.place, line
        if place is None:
            raise RecycleError(
                "fully_shard over a mesh of the script's own: give it the processes of one replica, "
                "mesh=recycle_plugin.adapters.plain.replica_mesh(2)"
            )
        self.place: HeldSeat = replace(place, topology=replace(place.topology, micro_batches=micro_batches))
        self.whole: dict[str, DTensor] = {}
        self.parts: dict[str, torch.Tensor] = {}
        for name, parameter in inner.named_parameters():
            _check(name, parameter, line)
            if isinstance(parameter, DTensor):
                self.whole[name] = parameter
                parameter = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
            self.parts[name] = parameter

    # --- as a module -------------------------------------------------------------------------------

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """The local part of each parameter."""
        return iter(self.parts.items())

    def named_buffers(self, *how: Any, **more: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers, which each process has whole."""
        return self.inner.named_buffers(*how, **more)

    def named_modules(self, *how: Any, **more: Any) -> Iterator[tuple[str, nn.Module]]:
        found: Iterator[tuple[str, nn.Module]] = self.inner.named_modules(*how, **more)
        return found

    # --- what trains it ----------------------------------------------------------------------------

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Have ``optimizer`` step the local parts, and move its state to them."""
        mine = {whole: self.parts[name] for name, whole in self.whole.items()}
        for group in optimizer.param_groups:
            group["params"] = [mine.get(each, each) for each in group["params"]]
        for whole, part in mine.items():
            if whole in optimizer.state:
                optimizer.state[part] = {key: _local(value) for key, value in optimizer.state.pop(whole).items()}

    def computing(self, compute: Compute) -> Compute:
        """Wrap ``compute``: gradients go into the local parts, the loss is averaged over the replica's processes."""

        def computed(step: int, replica: int, micro_batch: int) -> torch.Tensor:
            self._reshard()
            self._check_in_place()
            for whole in self.whole.values():
                whole.grad = None
            with self._line.thread.in_backward():
                loss = compute(step, replica, micro_batch)
            for name, whole in self.whole.items():
                gradient, whole.grad = whole.grad, None
                self.parts[name].grad = None if gradient is None else _local(gradient)
            if not torch.is_tensor(loss) or loss.numel() != 1:
                return loss  # the trainer refuses it
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG, self._line.hooks.seat_group)
            return mean

        return computed

    def _reshard(self) -> None:
        """Drop gathered weights: an evaluation may have left those of an older step."""
        for part in self.inner.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _check_in_place(self) -> None:
        """Raise RecycleError if the module's parameters were replaced, frozen or thawed since Replicas(…) was made."""
        now: dict[str, Any] = dict(self.inner.named_parameters())
        for name, whole in self.whole.items():
            part = self.parts[name]
            if now.get(name) is not whole or whole.to_local().data_ptr() != part.data_ptr():
                raise RecycleError(
                    f"{name} is another tensor than when Replicas(…) was made: move the module, and load it with "
                    "assign=True, before that"
                )
            if whole.requires_grad != part.requires_grad:
                raise RecycleError(
                    f"{name} is frozen or thawed after Replicas(…) was made, which does not work with fully_shard yet: "
                    "do it before"
                )


def _check(name: str, parameter: torch.Tensor, line: Session) -> None:
    """Raise RecycleError for a trained parameter that is not sharded, or not over this replica's mesh and devices."""
    if not isinstance(parameter, DTensor):
        if parameter.requires_grad:
            raise RecycleError(
                f"{name} is trained but not sharded, so its gradients would not be added up inside a replica: call "
                "fully_shard on the whole model too, after its layers, without ignored_params"
            )
        return
    mesh = parameter.device_mesh
    if mesh.ndim != 1 or mesh.get_group() is not line.hooks.seat_group:
        raise RecycleError(
            f"{name} is sharded over another mesh than its replica's: give fully_shard "
            "mesh=recycle_plugin.adapters.plain.replica_mesh(2), of one dimension; the plugin adds up over replicas"
        )
    if not all(isinstance(each, Shard) for each in parameter.placements):
        raise RecycleError(f"{name} is {parameter.placements[0]}, not sharded: leave it to fully_shard")
    if parameter.to_local().is_meta:
        raise RecycleError(f"{name} is on the meta device: call to_empty(), and set the weights, before Replicas(…)")
    if parameter.to_local().device.type != mesh.device_type:
        raise RecycleError(
            f"{name} is kept on {parameter.to_local().device}, apart from where it is computed with: CPU offload is "
            "not supported yet; leave offload_policy out"
        )


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
