"""Fault-tolerant pipeline-parallel training as a plugin for DeepSpeed and Megatron-LM.

Importing this package imports neither torch nor DeepSpeed. ``recycle docs architecture`` has its folders and layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__version__ = "0.2.0"


def mean(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the mean of ``tensor`` over the live members of ``group`` (None: all ranks), element by element.

    Call it between steps, on all live members, instead of ``all_reduce(tensor)`` and a division by
    ``get_world_size()``, which does not change when members are lost. Each live member counts once, even if it has
    taken over a lost member's work. The loss that ``train_batch`` returns is complete without this.

    ``tensor``: of any shape, with the same shape and the same floating-point or complex dtype on all members; half
    precision is added up in fp32. The result is a new tensor on every member, of the same shape, dtype and device,
    without gradient. Works in any job of torch.distributed, with the plugin or without; without a process group there
    is one member.

    Raises TypeError for whole numbers and bools, ValueError if this rank is not in ``group``, and RecycleError within a
    training step, for instance inside a layer or a loss function.
    """
    from recycle_plugin.runtime.collectives.average import mean

    return mean(tensor, group)


def seat_group() -> ProcessGroup:
    """Return the process group of the workers that hold this process's seat together (one stage of one replica).

    It is for layers that are divided among these workers, for instance a linear layer cut by columns or rows. In their
    forward and backward no other group may be used; ``torch.distributed.all_reduce(tensor, group=seat_group())`` and
    similar calls combine the members' parts. A member's part is ``torch.distributed.get_rank(group)``, the same in all
    replicas.

    Raises RecycleError if each worker holds its seat alone.
    """
    from recycle_plugin.runtime.collectives.seat import seat_group

    return seat_group()
