"""Which kinds of device there are, and which of them a tensor is on.

An accelerator is driven through what torch offers for all kinds (torch.accelerator, torch.get_device_module), so any of
which torch has streams and events will do.  CUDA is meant; which of them was tried, and how, the documents say.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.accelerator import Accelerator
from recycle_plugin.runtime.devices.host import CPU, HOST, on_host
from recycle_plugin.runtime.devices.port import COPY_S, Device, Order

NVIDIA = "cuda"  # the kind for which there is NCCL


def kinds() -> tuple[str, ...]:
    """The kinds of device that this process can compute on: the host, and the accelerator that torch finds."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (HOST.type,) if found is None else (HOST.type, found.type)


def device_of(where: torch.device) -> Device:
    """The device that tensors on ``where`` are computed on.  Raises RecycleError where this process has none there."""
    if where.type == HOST.type:
        return CPU
    check(where.type)
    index = torch.accelerator.current_device_index() if where.index is None else where.index
    return accelerator_at(torch.device(where.type, index))


@cache
def accelerator_at(where: torch.device) -> Accelerator:
    """The accelerator there: one for each, since its streams and its pinned memory are shared by all threads."""
    return Accelerator(where)


def own_device(asked: str | None) -> Device:
    """The device that this process was ``asked`` by its kind to compute on, or else an accelerator, or else the host.

    Of several accelerators it is the one that the launcher has numbered it for, by LOCAL_RANK.
    """
    kind = asked or kinds()[-1]
    if kind != HOST.type and (count := torch.accelerator.device_count()) > 1:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return device_of(torch.device(kind))


def check(kind: str) -> None:
    """Raise RecycleError where this process can't compute on devices of that kind."""
    if kind not in kinds():
        raise RecycleError(f"the accelerator is {kind}, and torch finds {' and '.join(kinds())} here")


def in_use() -> bool:
    """Whether this process has begun to use an accelerator: from then on it must not be forked.

    It does not ask whether there is one: a process that has asked may not be forked either.
    """
    found = torch.accelerator.current_accelerator()
    return found is not None and torch.get_device_module(found).is_initialized()


def order_of(tensors: Iterable[torch.Tensor]) -> Order:
    """The calling thread's order on the device that ``tensors`` are on; some of them may be in host memory."""
    where = next((tensor.device for tensor in tensors if not on_host(tensor)), HOST)
    return device_of(where).order()


def put(source: torch.Tensor, where: torch.device, what: object) -> torch.Tensor:
    """Return ``source``, of the host and not to be changed any more, on the device at ``where``, for what the calling
    thread starts there from now on.
    """
    (there,) = device_of(where).from_host((source,), what, shared=True).wait(COPY_S)
    return there


def write(target: torch.Tensor, source: torch.Tensor, what: object) -> None:
    """Copy ``source``, of the host and not to be changed any more, to ``target``, wherever that is; for what the
    calling thread starts from now on.
    """
    target.copy_(put(source, target.device, what))


def fetch(tensor: torch.Tensor, what: object, *, shared: bool = True) -> torch.Tensor:
    """Return ``tensor`` in host memory, wherever it is, once it is there; raises WaitTimeout after 300 s."""
    (found,) = device_of(tensor.device).to_host((tensor,), what, shared=shared).wait(COPY_S)
    return found
