#!/usr/bin/env python
"""The cost of the standby on another host, by the network's delay: nothing that the coordinator decides goes out before
the standby has it. A small job in plain torch, a worker on each of four network namespaces, with the standby and
without, in turns. The kernel's netem is not needed: a process between the hosts holds each packet back.

scripts/bench_standby.py                                    # 0, 1, 5 and 20 ms each way, three rounds of 200 steps
scripts/bench_standby.py --delays-ms 5 --rounds 1 --steps 50

Prints the medians over rounds of the median interval between commits, with the least and the most round. Needs root.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.cluster import ForkServer
from tests.support.hosts import MORE, Hosts, HostsRun
from tests.support.jobs import PLAIN, Shape
from tests.support.launching import launching

PATIENCE_S = 90.0
SETTLED = 10  # steps that are not counted
ALONE = "import recycle_plugin.core.coordinator.succession as them; them.LEAST = 99\n"  # hosts that a standby needs
ETHTOOL, OFFLOADS = 0x8946, (0x15, 0x17, 0x1F, 0x24, 0x2C)  # checksums in and out, TSO, GSO, GRO: frames as on a wire
ALL, OUTGOING, FRAME = 3, 4, 1 << 16  # ETH_P_ALL; a packet that this host has sent
CLONE_NEWNET = 0x40000000


class Delayed(Hosts):
    """Hosts between which each packet takes ``delay_s`` seconds more, each way."""

    def __init__(self, names: tuple[str, ...], delay_s: float) -> None:
        super().__init__(names)
        self._delay_s, self._pid = delay_s, 0

    def open(self) -> None:
        super().open()
        for name in self.names:
            self._on("switch", "set", name, "nomaster")
        self._pid = os.fork()
        if self._pid == 0:
            try:
                for name in self.names:
                    _enter(self.pid(name))
                    _send_frames_whole("eth0")
                _enter(self.pid("switch"))
                _carry(self.names, self._delay_s)
            finally:
                os._exit(1)

    def close(self) -> None:
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)
        super().close()


def _enter(pid: int) -> None:
    with open(f"/proc/{pid}/ns/net") as host:
        if ctypes.CDLL(None).setns(host.fileno(), CLONE_NEWNET):
            raise OSError(f"can't enter the network namespace of process {pid}")


def _send_frames_whole(device: str) -> None:
    with socket.socket() as any_one:
        for command in OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(any_one, ETHTOOL, struct.pack("16sP8x", device.encode(), value.buffer_info()[0]))


def _carry(names: tuple[str, ...], delay_s: float) -> None:
    """Carry each frame to its host, or if unknown to all others, after ``delay_s``."""
    ports = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL)) for _ in names]
    for port, name in zip(ports, names, strict=True):
        port.bind((name, ALL))
    behind: dict[bytes, socket.socket] = {}
    waiting: list[tuple[float, int, bytes, list[socket.socket]]] = []
    count = 0
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], left_s)[0]:
            frame, (_, _, kind, *_) = port.recvfrom(FRAME)
            if kind == OUTGOING:
                continue
            behind[frame[6:12]] = port
            to = [behind[frame[:6]]] if frame[:6] in behind else [each for each in ports if each is not port]
            count += 1
            heapq.heappush(waiting, (time.monotonic() + delay_s, count, frame, to))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, frame, to = heapq.heappop(waiting)
            for each in to:
                each.send(frame)


def step_s(server: ForkServer, folder: Path, hosts: Hosts, steps: int, standby: bool) -> float:
    """The median interval between commits of one job, once it has settled and the standby, if any, is in step."""
    with launching(server, folder, partial(HostsRun, hosts), PLAIN) as launch:
        more = {} if standby else {"PYTHONPATH": alone(folder.parent)}
        run = launch(f"steps={steps}", shape=Shape(len(hosts.names), 1), **more)
        result = run.finish()
        for launcher in run.others.values():
            launcher.wait(PATIENCE_S)
    assert result.code == 0, result.output[-3000:]
    terms = [each["time"] for each in result.of("standby") if each.get("address")]
    assert bool(terms) == standby, result.output[-3000:]
    commits = [each["time"] for each in result.of("committed") if each["step"] > SETTLED]
    counted = [each for each in commits if each > max(terms, default=0.0)]
    return median(after - before for before, after in pairwise(counted))


def alone(folder: Path) -> str:
    """PYTHONPATH of a job without a standby on another host."""
    (folder / "alone").mkdir(exist_ok=True)
    (folder / "alone" / "sitecustomize.py").write_text(ALONE)
    return os.pathsep.join([str(folder / "alone"), os.environ.get("PYTHONPATH", "")])


@contextmanager
def servers(folder: Path) -> Iterator[dict[bool, ForkServer]]:
    """Fork servers of jobs with a standby on another host, and without."""
    with ExitStack() as stack:
        made = {}
        for standby, more in ((True, {}), (False, {"PYTHONPATH": alone(folder)})):
            place = folder / f"server{standby}"
            place.mkdir()
            made[standby] = ForkServer(place, "plain", **more)
            stack.callback(made[standby].stop)
        yield made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 1.0, 5.0, 20.0], metavar="MS")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, servers(Path(name)) as started:
        for delay_ms in given.delays_ms:
            found: dict[bool, list[float]] = {True: [], False: []}
            for number in range(given.rounds):
                for standby in (False, True):
                    hosts = Delayed(MORE, delay_ms / 1000)
                    try:
                        hosts.open()
                        folder = Path(name, f"{delay_ms}-{number}-{standby}")
                        found[standby].append(step_s(started[standby], folder, hosts, given.steps, standby))
                    finally:
                        hosts.close()
            for standby, each in found.items():
                words = "with the standby" if standby else "without"
                figures = f"{1e3 * median(each):.1f} ms [{1e3 * min(each):.1f}, {1e3 * max(each):.1f}]"
                print(f"{delay_ms:g} ms each way, {words}: {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
