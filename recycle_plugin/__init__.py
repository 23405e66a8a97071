"""Fault-tolerant pipeline-parallel training as a plugin for DeepSpeed and Megatron-LM.

Importing this package imports neither torch nor DeepSpeed.  Layers, top to bottom, each importing
only what stands below it::

    adapters/    deepspeed, megatron: one framework each, no algorithm
    runtime/     processes, messages and tensors
    render/      text grid, Gantt picture, trace
    planner/     reroute, schedule, bounds, verify
    core/        vocabulary, dependencies, plan, executor, membership, messages (standard library and msgpack)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__version__ = "0.2.0"


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


def seat_group() -> ProcessGroup:
    """The process group of the workers that hold this process's seat together: those of one stage of one replica.

    For layers of which each of them has a part, as a linear layer cut by its columns or rows: in their forward and
    backward, where no other group may be used, ``torch.distributed.all_reduce(tensor, group=seat_group())`` and the
    like add up what these have.  A member's place in it, ``torch.distributed.get_rank(group)``, is the part that it
    has; that is the same for all replicas.

    Raises RecycleError where each worker holds its seat alone.
    """
    from recycle_plugin.runtime.collectives.seat import seat_group

    return seat_group()
