"""Data-parallel training of a model whose script runs forward and backward itself."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from recycle_plugin.adapters.plain.backward_calls import watched
from recycle_plugin.adapters.plain.training_job import PlainJob, check_numbers, session_with, settings_of
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.place import meet
from recycle_plugin.runtime.stage.ports import Compute
from recycle_plugin.settings.schema import Settings


class Replicas(PlainJob):
    """A replica of ``module`` on each worker; ``optimizer``, and ``scheduler`` if given, step all replicas alike.

    ``compute(step, replica, micro_batch)`` does what a script's loop does with a micro-batch: forward, loss and
    ``loss.backward()``. It returns the loss. It must depend on its arguments only, since other workers compute the
    micro-batches of a lost replica. Steps count from 1, and each replica has ``micro_batches`` in a step. The first
    call is made twice and must give the same. Layers stay in the training or evaluation mode that the script has set. A
    parameter without a gradient is stepped with zeros, as with DeepSpeed.

    The trained loss is the mean over all micro-batches. ``clip``, ``settings``: as for a Pipeline. ``dcp``: write
    checkpoints in the format of torch.distributed.checkpoint, which a module sharded by ``fully_shard`` always uses.
    Shard it before, among the processes of a replica (:func:`replica_mesh`); the loss is then the mean over these
    processes too. Raises RecycleError or SettingsError for wrong arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: Compute,
        micro_batches: int = 1,
        *,
        scheduler: Any = None,
        clip: float = 0.0,
        dcp: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        chosen = settings_of(settings, split_backward=False)
        check_numbers(micro_batches=micro_batches)
        if chosen.split_backward:
            raise RecycleError(
                "recycle.split_backward: a backward that the script calls is not split; leave it out, or set it to "
                "false"
            )
        line, workers, shards = session_with(chosen), int(os.environ["WORLD_SIZE"]), None
        if not line.view.rank:
            compute = watched(compute, partial(line.note, "warning"))
        if _is_sharded(module):
            from recycle_plugin.adapters.plain.sharded import Shards  # takes half a second to import

            _refuse_log(chosen)
            shards = Shards(line, module, micro_batches)
            compute = shards.computing(compute)
        if workers < 2:
            raise RecycleError(
                "one worker: start at least 2, since a lost one needs another to take its micro-batches: python -m "
                "recycle_plugin.launch --workers 2"
            )
        place = meet(line, Topology(workers, 1, micro_batches)) if shards is None else shards.place
        super().__init__(
            line, chosen, place, module, optimizer, scheduler, None, clip, compute=compute, shards=shards, dcp=dcp
        )
        self._trainer.feed.source = lambda step, micro_batch: None


def _is_sharded(module: nn.Module) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")  # imported if something is sharded; it takes 0.5 s
    return tensor is not None and any(isinstance(each, tensor.DTensor) for each in module.parameters())


def _refuse_log(settings: Settings) -> None:
    if settings.log is not None:
        raise RecycleError(
            "recycle.log with fully_shard: the logs of several workers of one seat can't be replayed yet; leave it out"
        )
