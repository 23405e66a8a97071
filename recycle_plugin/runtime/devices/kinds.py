"""The kinds of device, and the device that a tensor is on.

An accelerator is driven through torch's interfaces for all kinds (torch.accelerator, torch.get_device_module), so any
kind with streams and events will do. It is meant for CUDA; the documents say which kinds were tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache

import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.accelerator import Accelerator
from recycle_plugin.runtime.devices.host import CPU, HOST, on_host
from recycle_plugin.runtime.devices.port import COPY_S, Device, Order

NVIDIA = "cuda"  # the kind that NCCL serves


def kinds() -> tuple[str, ...]:
    """Return the kinds of device that this process can compute on: the host, and torch's accelerator."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (HOST.type,) if found is None else (HOST.type, found.type)


def device_of(where: torch.device) -> Device:
    """Return the device for tensors on ``where``; raises RecycleError if this process has none there."""
    if where.type == HOST.type:
        return CPU
    check(where.type)
    index = torch.accelerator.current_device_index() if where.index is None else where.index
    return accelerator_at(torch.device(where.type, index))


@cache
def accelerator_at(where: torch.device) -> Accelerator:
    """Return the accelerator there: one object each, since all threads share its streams and pinned memory."""
    return Accelerator(where)


def own_device(asked: str | None) -> Device:
    """Return the device of the kind ``asked`` for; by default an accelerator, else the host. Of several accelerators it
    is the one with the launcher's number, LOCAL_RANK.
    """
    kind = asked or kinds()[-1]
    if kind != HOST.type and (count := torch.accelerator.device_count()) > 1:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return device_of(torch.device(kind))


def check(kind: str) -> None:
    """Raise RecycleError if this process cannot compute on devices of this kind."""
    if kind not in kinds():
        raise RecycleError(f"the accelerator is {kind}, and torch finds {' and '.join(kinds())} here")


def in_use() -> bool:
    """Return whether this process has begun to use an accelerator, so that it must not be forked. This does not test
    for an accelerator: after such a test a process must not be forked either.
    """
    found = torch.accelerator.current_accelerator()
    return found is not None and torch.get_device_module(found).is_initialized()


def order_of(tensors: Iterable[torch.Tensor]) -> Order:
    """Return the calling thread's order on the device of ``tensors``; some of them may be in host memory."""
    where = next((tensor.device for tensor in tensors if not on_host(tensor)), HOST)
    return device_of(where).order()


def put(source: torch.Tensor, where: torch.device, what: object) -> torch.Tensor:
    """Copy host tensor ``source``, which must not change any more, to ``where``, for this thread's later work."""
    (there,) = device_of(where).from_host((source,), what, shared=True).wait(COPY_S)
    return there


def write(target: torch.Tensor, source: torch.Tensor, what: object) -> None:
    """Copy host tensor ``source``, which must not change any more, to ``target``, for this thread's later work."""
    # a tensor of inference mode may be waited for outside of it
    with torch.inference_mode() if target.is_inference() else nullcontext():
        target.copy_(put(source, target.device, what))


def fetch(tensor: torch.Tensor, what: object, *, shared: bool = True) -> torch.Tensor:
    """Return ``tensor`` in host memory, once it is there; raises WaitTimeout after 300 s."""
    (found,) = device_of(tensor.device).to_host((tensor,), what, shared=shared).wait(COPY_S)
    return found
