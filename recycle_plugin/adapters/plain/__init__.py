"""Training in plain torch that survives the loss of workers, without DeepSpeed.

Either a list of layers, a loss, an optimizer and a data source are trained as a pipeline, or a script's own forward and
backward by replicas.  Started by ``python -m recycle_plugin.launch --workers 4 train.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle_plugin.adapters.plain.pipeline import Pipeline
from recycle_plugin.adapters.plain.replicas import Replicas

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Pipeline", "Replicas", "replica_mesh"]


def replica_mesh(shards: int) -> DeviceMesh:
    """The mesh, of one dimension, of the ``shards`` processes of this process's replica: ``fully_shard(model,
    mesh=replica_mesh(2))``.

    Every process calls it before it makes its Replicas.  Neighbouring ranks are one replica's.  Raises RecycleError
    where the job's processes can't be dealt out so.
    """
    from recycle_plugin.adapters.plain.sharded import replica_mesh  # half a second's import, which others do without

    return replica_mesh(shards)
