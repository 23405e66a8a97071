"""Pure torch: a list of layers, a loss, an optimizer and a data source, trained as a pipeline that survives the loss of
workers; or a script's own forward and backward, trained by replicas that do.  Needs no DeepSpeed.

Started by ``python -m recycle_plugin.launch --workers 4 train.py``.
"""

from recycle_plugin.adapters.plain.pipeline import Pipeline
from recycle_plugin.adapters.plain.replicas import Replicas

__all__ = ["Pipeline", "Replicas"]
