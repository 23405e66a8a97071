"""A lossy line of a host (tests/support/hosts.py): a relay between it and the switch that drops and delays frames.

It runs on the switch, as a process of its own: ``python -m tests.support.lossy DEVICE DEVICE LOSS DELAY_S SEED``.
"""

from __future__ import annotations

import heapq
import select
import socket
import sys
import time
from itertools import count
from random import Random

ALL_PROTOCOLS = 3
SOL_PACKET, PACKET_VNET_HDR = 263, 15  # a frame comes with what is left to the device: checksums, segments
LARGEST = 1 << 17


def opened(device: str) -> socket.socket:
    """A socket for all frames of the ``device``."""
    line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    line.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    line.bind((device, ALL_PROTOCOLS))
    return line


def relay(devices: tuple[str, str], loss: float, delay_s: float, seed: int) -> None:
    """Pass frames between two devices, of which the share ``loss`` is dropped and all others come later; for ever."""
    drawn, number = Random(seed), count()
    ends = tuple(map(opened, devices))
    to = {ends[0]: ends[1], ends[1]: ends[0]}
    due: list[tuple[float, int, socket.socket, bytes]] = []
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
        for end in select.select(ends, [], [], wait_s)[0]:
            frame, (_, _, kind, *_) = end.recvfrom(LARGEST)
            if kind != socket.PACKET_OUTGOING and drawn.random() >= loss:
                heapq.heappush(due, (time.monotonic() + delay_s, next(number), to[end], frame))
        while due and due[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(due)
            end.send(frame)


if __name__ == "__main__":
    relay((sys.argv[1], sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
