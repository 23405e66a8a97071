"""Averages, and sums scaled to a group's size, that stay right after losses."""

from __future__ import annotations

import torch
import torch.distributed as dist

BACKEND = "recycle"  # of groups that lose members (runtime/collectives/group.py)
HALF = (torch.float16, torch.bfloat16)


def mean(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the average of ``tensor`` over the live members of ``group``: a new tensor of the same dtype.
    Half-precision values are summed in fp32. Raises TypeError for integers.
    """
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise TypeError(
            f"recycle_plugin.mean of a tensor of {tensor.dtype}: whole numbers have no average of their kind; convert "
            "it, for instance by .float()"
        )
    total = widened(tensor.detach().clone(memory_format=torch.contiguous_format))
    if dist.is_available() and dist.is_initialized():
        _average(total, group)
    return total.to(tensor.dtype)


def _average(total: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    if dist.get_backend(group) == BACKEND:
        dist.all_reduce(total, dist.ReduceOp.AVG, group)
    else:  # not every backend knows averages
        dist.all_reduce(total, group=group)
        total /= dist.get_world_size(group)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return half-precision values in fp32, others as they are."""
    return tensor.detach().float() if tensor.dtype in HALF else tensor


def scale_sum(total: torch.Tensor, count: int, size: int) -> None:
    """Multiply ``total``, a sum over ``count`` members, by ``size / count`` in place, as if ``size`` members had
    summed. Integers are rounded exactly to the nearest, halves up. Booleans stay as they are.
    """
    if count == size or total.dtype == torch.bool:
        return
    if total.is_floating_point() or total.is_complex():
        wide = torch.complex128 if total.is_complex() else torch.float64
        total.copy_(total.to(wide).mul_(size).div_(count))
        return
    whole = total.to(torch.int64)
    each = whole.div(count, rounding_mode="floor")
    rest = whole - each * count  # small, so that nothing overflows that the result would not
    total.copy_(each * size + (2 * rest * size + count).div(2 * count, rounding_mode="floor"))
