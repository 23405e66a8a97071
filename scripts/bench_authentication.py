#!/usr/bin/env python
"""What it costs that processes of a job prove to know its secret, and that they do so in TLS.

scripts/bench_authentication.py                        # 8 and 256 connections to a coordinator, until each is welcomed;
                                                       # and bytes over one connection
scripts/bench_authentication.py --connections 1024 --rounds 20
scripts/bench_step.py change --checkout DIR            # a step, against a checkout from before it
scripts/bench_step.py tls                              # a step in TLS, against one without

Rounds with handshake and seals, and with TLS too, alternate with rounds without: there both ends take the same keys at
once, and no message has a seal.  TLS is with one certificate, of a P-256 key, that has signed itself.  Everything is in
one process, so that the times are of both ends' work and of no network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple
from unittest.mock import patch

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Port, Proved, Seal, Seals, answer, call
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.authentication.tls import Tls
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.lab.experiments.bench_scripts import certificate, script
from recycle_plugin.runtime.control import connections
from recycle_plugin.runtime.control.connections import ControlWay, SocketControl, connect
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.lines.frames import fill
from recycle_plugin.runtime.processes.descriptors import provide

SHARED = "of a benchmark, which nobody need guess"
SECRET = Secret(SHARED)
PATIENCE_S = 60.0
PIECES = 100  # of 1 MiB, that are sent to see how fast a connection is
CALLERS = 8  # threads that connect at the same time, each one connection after the other


def main(arguments: list[str]) -> int:
    found = parser().parse_args(arguments)
    provide(2 * max(found.connections))
    kinds = {"with": SECRET, "without": SECRET, "TLS": Secret(SHARED, Tls(certificate(found.out / "certificate")))}
    measured = {count: compared(count, found.rounds, kinds) for count in found.connections}
    for count, times in measured.items():
        print(f"{count:>5} connections: {compare(count, times, 'with', 'without')}")
        print(f"{count:>5} connections: {compare(count, times, 'TLS', 'with')}")
    rates = {kind: [rate(kinds[kind]) for _ in range(found.rounds)] for kind in ("with", "TLS")}
    for kind, each in rates.items():
        low, middle, high = quantiles(each, n=4)
        print(f"one connection, {kind}: {middle / 1e6:.0f} MB/s (quartiles {low / 1e6:.0f} to {high / 1e6:.0f})")
    (found.out / "authentication.json").write_text(json.dumps(measured | {"bytes_per_s": rates}, indent=1))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--connections", type=int, nargs="+", default=[8, 256], metavar="N")
    made.add_argument("--rounds", type=int, default=15, help="of each kind")
    made.add_argument("--out", type=Path, default=Path("runs/bench_authentication"), metavar="DIR")
    return made


class Round(NamedTuple):
    """Seconds until all were welcomed, and of processor time of both ends meanwhile."""

    took_s: float
    cpu_s: float


def compare(count: int, rounds: dict[str, list[Round]], this: str, that: str) -> str:
    (on, on_cpu), (off, off_cpu) = (map(median, zip(*rounds[kind])) for kind in (this, that))
    low, _, high = quantiles(sorted(a.took_s / b.took_s for a, b in zip(rounds[this], rounds[that])), n=4)
    return (
        f"{on * 1000:.1f} ms {this}, {off * 1000:.1f} ms {that}, {on / off:.2f} times as long (quartiles of the ratios "
        f"{low:.2f} to {high:.2f}); {(on - off) / count * 1e6:.0f} us each, {(on_cpu - off_cpu) / count * 1e6:.0f} us "
        "of them processor time of both ends"
    )


def compared(count: int, rounds: int, kinds: dict[str, Secret]) -> dict[str, list[Round]]:
    """The rounds of each kind, after one that does not count."""
    found: dict[str, list[Round]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, secret in kinds.items():
            with authenticated(kind != "without"):
                one = asyncio.run(started(count, secret))
            if number:
                found[kind].append(one)
    return found


async def started(count: int, secret: Secret) -> Round:
    """Have ``count`` supervisors welcomed by a coordinator that has just begun to listen."""
    coordinator = Coordinator(count, 1, lambda event, now: None, secret)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    await coordinator.start("127.0.0.1", port)
    way, loop = ControlWay(("127.0.0.1", port), secret), asyncio.get_running_loop()
    with ThreadPoolExecutor(CALLERS) as callers:
        began, began_cpu = time.perf_counter(), time.process_time()
        controls = await asyncio.gather(*(loop.run_in_executor(callers, welcomed, way, rank) for rank in range(count)))
        took = Round(time.perf_counter() - began, time.process_time() - began_cpu)
    await coordinator.close()
    for control in controls:
        control.close()
    return took


def rate(secret: Secret) -> float:
    """Bytes in a second over one connection, from memory to memory, in pieces of 1 MiB."""
    data, target = bytearray(1 << 20), bytearray(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        calling = other.submit(lambda: call(socket.create_connection(listener.getsockname()), secret, Port.TENSORS))
        with answer(listener.accept()[0], secret, Port.TENSORS).connection as far, calling.result().connection as near:
            began = time.perf_counter()
            sending = other.submit(lambda: [near.sendall(data) for _ in range(PIECES)])
            for _ in range(PIECES):
                fill(far, memoryview(target))
            sending.result()
            return PIECES * len(data) / (time.perf_counter() - began)


def welcomed(way: ControlWay, rank: int) -> SocketControl:
    control = connect(way, PATIENCE_S)
    control.send(Hello(rank, "supervisor", 1, "h"), PATIENCE_S)
    welcome = control.receive(PATIENCE_S)
    if not isinstance(welcome, Welcome):
        raise SystemExit(f"bench_authentication: connection {rank} was not welcomed: {control.broken}")
    return control


class NoSeal(Seal):
    """Seals that cost nothing, and fit whatever comes."""

    def of(self, message: bytes | bytearray) -> bytes:
        return bytes(16)

    def fits(self, message: bytes | bytearray, seal: bytes | bytearray) -> bool:
        return True


@contextmanager
def authenticated(it_is: bool) -> Iterator[None]:
    """Inside of this context connections authenticate, or do not."""
    none = Seals(NoSeal(b""), NoSeal(b""), b"")

    async def lets_in(door: Door, connection: socket.socket, peer: tuple) -> Proved:
        door._proved(connection)
        return Proved(connection, none)

    if it_is:
        yield
        return
    with (
        patch.object(Door, "lets_in_loop", lets_in),
        patch.object(connections, "call", lambda connection, *given: Proved(connection, none)),
    ):
        yield


if __name__ == "__main__":
    script(main)
