"""Training in plain torch that survives the loss of workers, without DeepSpeed.

A Pipeline trains a list of layers with a loss, an optimizer and a data source. Replicas train a model by the script's
own forward and backward. Start a job with ``python -m recycle_plugin.launch --workers 4 train.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle_plugin.adapters.plain.pipeline import Pipeline
from recycle_plugin.adapters.plain.replicas import Replicas

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Pipeline", "Replicas", "replica_mesh"]


def replica_mesh(shards: int) -> DeviceMesh:
    """Return the one-dimensional mesh of the ``shards`` processes of this replica: ``fully_shard(model,
    mesh=replica_mesh(2))``. Every process calls it before it makes its Replicas. Neighbouring ranks belong to one
    replica. Raises RecycleError if the job's processes can't be divided into such replicas.
    """
    from recycle_plugin.adapters.plain.sharded import replica_mesh  # takes half a second to import

    return replica_mesh(shards)
