"""Speed of a device's copies to and from host memory, alone and while it computes, through the Device port."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch

from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.devices.port import Copy, Device

BYTES, IN_A_ROW, REPEAT, WARM_UP = 64 << 20, 8, 3, 2
WAIT_S = 60.0


def bandwidths(device: Device, size: int = BYTES, products: int = 40, side: int = 4096) -> dict[str, float]:
    """Return GB/s of several copies of ``size`` bytes each way, alone and beside ``products`` of square matrices.

    ``pin_ms``: to allocate ``size`` bytes of new pinned memory; ``compute_ms``: of the products alone;
    ``compute_beside_ms``: of the products beside copies.
    """
    there = torch.ones(size, dtype=torch.uint8, device=device.where)
    begun = time.perf_counter()
    here = device.room((size,), torch.uint8)
    found = {"pin_ms": 1e3 * (time.perf_counter() - begun)}
    here.fill_(1)
    matrix = torch.ones(side, side, device=device.where)

    def compute() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    ways: dict[str, Callable[[], Copy]] = {
        "to_host": lambda: device.to_host([there], "a copy to the host", shared=True),
        "from_host": lambda: device.from_host([here], "a copy from the host", shared=True),
    }
    found["compute_ms"] = 1e3 * _beside(device, compute, None)[0]
    for name, start in ways.items():
        found[f"{name}_gb_s"] = IN_A_ROW * size / _beside(device, None, start)[1] / 1e9
        computing, copying = _beside(device, compute, start)
        found[f"{name}_beside_gb_s"] = IN_A_ROW * size / copying / 1e9
        found[f"{name}_compute_beside_ms"] = 1e3 * computing
    return {name: round(value, 3) for name, value in found.items()}


def _beside(
    device: Device, compute: Callable[[], None] | None, start: Callable[[], Copy] | None
) -> tuple[float, float]:
    """Return median seconds of the work of ``compute``, and of the copies that ``start`` begins beside it."""
    taken = [_once(device, compute, start) for _ in range(WARM_UP + REPEAT)][WARM_UP:]
    computing, copying = (median(column) for column in zip(*taken))
    return computing, copying


def _once(device: Device, compute: Callable[[], None] | None, start: Callable[[], Copy] | None) -> tuple[float, float]:
    device.event("what was before").wait(WAIT_S)
    first: Any = device.event("the products' begin")
    if compute is not None:
        compute()
    last: Any = device.event("the products")
    begun = time.perf_counter()
    with _apart(device):
        for copy in [start() for _ in range(IN_A_ROW)] if start is not None else ():
            copy.wait(WAIT_S)
        device.event("the copies").wait(WAIT_S)
    copying = max(time.perf_counter() - begun, 1e-9)
    last.wait(WAIT_S)
    return last.since(first), copying


def _apart(device: Device) -> AbstractContextManager[object]:
    """Return a context in which copies of the calling thread don't queue behind its work on the device."""
    if device.kind == HOST.type:
        return nullcontext()
    module = torch.get_device_module(device.where)
    return module.stream(module.Stream(device.where))
