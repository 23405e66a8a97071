"""A process that computes on a device.

``context_worker.py cuda burn`` computes until it is killed. ``… cuda serve`` answers requests on its input, one a line:
``compute``, ``allocate``, ``memory``.
"""

from __future__ import annotations

import sys

import torch

from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import Device

SIZE, BLOCK = 256, 64 << 20  # of a square matrix; bytes that are allocated and freed


def main() -> None:
    """Run what the command line asks for."""
    kind, what = sys.argv[1:]
    device = device_of(torch.device(kind))
    matrix = torch.ones(SIZE, SIZE, device=device.where)
    answer(device, matrix, "compute")
    if what == "burn":
        while True:
            matrix = matrix @ matrix / SIZE
    for line in sys.stdin:
        answer(device, matrix, line.strip())


def answer(device: Device, matrix: torch.Tensor, asked: str) -> None:
    """Print the result of a request: a sum that is always the same, or the bytes in use on the whole device."""
    if asked == "compute":
        (total,) = device.to_host([(matrix @ matrix).sum()], asked, shared=True).wait(60)
        number = total.item()
    elif asked == "allocate":
        number = torch.ones(BLOCK, dtype=torch.uint8, device=device.where).sum().item()
        if device.kind != HOST.type:
            torch.get_device_module(device.where).empty_cache()
    else:
        number = device.memory().used
    print(f"{asked} {number:.0f}", flush=True)


if __name__ == "__main__":
    main()
