"""Fault-tolerant pipeline-parallel training as a plugin for DeepSpeed and Megatron-LM.

Importing this package imports neither torch nor DeepSpeed.  Layers, top to bottom, each importing
only what stands below it::

    adapters/    deepspeed, megatron: one framework each, no algorithm
    runtime/     processes, messages and tensors          simulator/  the same loop in virtual time
    render/      text grid, Gantt picture, trace
    planner/     reroute, schedule, bounds, verify
    core/        vocabulary, dependencies, plan, executor, membership, messages (standard library and msgpack)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__version__ = "0.1.0"


def mean(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The mean of ``tensor`` over the live members of ``group`` (None: all ranks), element by element, as a new tensor
    on every one of them.

    To be called between steps, by all live members, in place of ``all_reduce(tensor)`` and a division by
    ``get_world_size()``, which stays as it was when members are lost.  Each live member counts once, whatever it has
    taken over of a lost one's; the loss that ``train_batch`` returns is whole without this.

    ``tensor``: of the same shape, any, and the same dtype, floating-point or complex, on all members; half precision is
    added up in fp32.  The result has its shape, dtype and device, and no gradient.  Works in any job of
    torch.distributed, with the plugin or without; where no process group was made there is one member.

    Raises TypeError for whole numbers and bools, ValueError where this rank is not in ``group``, and RecycleError
    inside a layer, a loss function, or whatever else a training step runs.
    """
    from recycle_plugin.runtime.collectives.average import mean

    return mean(tensor, group)
