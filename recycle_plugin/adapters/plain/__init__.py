"""Training in plain torch that survives the loss of workers, without DeepSpeed.

Either a list of layers, a loss, an optimizer and a data source are trained as a pipeline, or a script's own forward and
backward by replicas.  Started by ``python -m recycle_plugin.launch --workers 4 train.py``.
"""

from recycle_plugin.adapters.plain.pipeline import Pipeline
from recycle_plugin.adapters.plain.replicas import Replicas

__all__ = ["Pipeline", "Replicas"]
