"""How fast a device copies to and from host memory, alone and while it computes, through the Device port."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from recycle_plugin.runtime.devices.port import Copy, Device

BYTES, REPEAT, WARM_UP = 64 << 20, 9, 2
WAIT_S = 60.0


def bandwidths(device: Device, size: int = BYTES, products: int = 40, side: int = 4096) -> dict[str, float]:
    """GB/s of copies of ``size`` bytes to the host and back, alone and beside ``products`` of square matrices.

    ``compute_ms`` is what those take alone, ``compute_beside_ms`` beside as many copies each way as fit.
    """
    there = torch.ones(size, dtype=torch.uint8, device=device.where)
    here = device.room((size,), torch.uint8).fill_(1)
    ways: dict[str, Callable[[], Copy]] = {
        "to_host": lambda: device.to_host([there], "a copy to the host", shared=True),
        "from_host": lambda: device.from_host([here], "a copy from the host", shared=True),
    }
    found: dict[str, float] = {}
    for name, start in ways.items():
        seconds = [_copied(device, start) for _ in range(WARM_UP + REPEAT)][WARM_UP:]
        found[f"{name}_gb_s"] = _rate(size, median(seconds))
    found["compute_ms"] = 1e3 * median(_computed(device, products, side, None)[0] for _ in range(3))
    for name, start in ways.items():
        taken, copies, copying = _computed(device, products, side, start)
        found[f"{name}_beside_gb_s"] = _rate(size * copies, copying)
        found[f"{name}_compute_beside_ms"] = 1e3 * taken
    return {name: round(value, 3) for name, value in found.items()}


def _rate(size: int, seconds: float) -> float:
    return size / max(seconds, 1e-9) / 1e9


def _over(device: Device, what: str) -> None:
    """Return when all that was started is done, also copies that came to the device."""
    device.event(what).wait(WAIT_S)


def _copied(device: Device, start: Callable[[], Copy]) -> float:
    _over(device, "what was before")
    begun = time.perf_counter()
    start().wait(WAIT_S)
    _over(device, "a copy")
    return time.perf_counter() - begun


def _computed(device: Device, products: int, side: int, start: Callable[[], Copy] | None) -> tuple[float, int, float]:
    """Seconds of matrix products, and beside them how many copies were over, and after how many seconds the last."""
    matrix = torch.ones(side, side, device=device.where)
    torch.mm(matrix, matrix)
    _over(device, "what was before")
    begun = time.perf_counter()
    first: Any = device.event("the products' begin")
    for _ in range(products):
        torch.mm(matrix, matrix)
    last: Any = device.event("the products")
    copies, copying = 0, 0.0
    while start is not None and (not copies or not last.poll()):
        copy = start()
        _until(copy)
        copies, copying = copies + 1, time.perf_counter() - begun
    last.wait(WAIT_S)
    return last.since(first), copies, copying


def _until(copy: Copy) -> None:
    """Return when the copy is over, without putting the device's work behind it."""
    until = time.monotonic() + WAIT_S
    while not copy.poll() and time.monotonic() < until:
        time.sleep(20e-6)
