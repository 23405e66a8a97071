"""What somebody says to a job's ports who does not know its secret."""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_operators import AskLeave
from recycle_plugin.core.messages.from_workers import Exited, Hello, Leaving, SupervisorHeartbeat, Terminate
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.runtime.movers.wire import LANGUAGE, Header, Sender

Place = tuple[str, int]
PATIENCE_S = 20.0
WORKER, SUPERVISOR = Hello(2, "worker", 4711, "elsewhere"), Hello(2, "supervisor", 4711, "elsewhere")
CONTROL: dict[str, bytes] = {
    "a Hello": encode(WORKER),
    "the end of a worker": encode(WORKER) + encode(Exited(0, -9, 0.0)) + encode(Exited(3, -9, 0.0)),
    "a supervisor, and the end of its worker": encode(SUPERVISOR) + encode(Exited(2, -9, 0.0)),
    "a wrong type": encode(WORKER) + encode(SupervisorHeartbeat(2, "no flag")),  # type: ignore[arg-type]
    "a rank that there is not": encode(Hello(99, "worker", 1, "elsewhere")),
    "an operator": encode(Hello(-1, "operator", 1, "elsewhere")) + encode(AskLeave("0.1")),
    "a planned leave": encode(WORKER) + encode(Leaving(0, "I say so")),
    "the job's end": encode(SUPERVISOR) + encode(Terminate(2, "I say so", "elsewhere")),
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


def told(port: int, said: bytes, host: str = "127.0.0.1", patience_s: float = PATIENCE_S) -> bytes:
    """What a port answers to ``said``, until it hangs up or takes no more."""
    answer = b""
    with socket.create_connection((host, port), PATIENCE_S) as stranger, suppress(ConnectionError):
        stranger.settimeout(patience_s)
        stranger.sendall(said)
        try:
            stranger.shutdown(socket.SHUT_WR)
        except OSError as gone:  # it has been hung up on already
            if gone.errno != errno.ENOTCONN:
                raise
        while came := stranger.recv(1 << 16):
            answer += came
    return answer


def listeners(pid: int) -> Iterator[Place]:
    for each in psutil.Process(pid).net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN:
            yield each.laddr.ip, each.laddr.port


def letting_in(places: Iterable[Place], within_s: float = 1.0) -> list[Place]:
    """Of places where somebody listens those where strangers get a connection: at Gloo's they get none once its members
    are connected.
    """
    tried: dict[socket.socket, Place] = {}
    for place in places:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(place)
        tried[stranger] = place
    waiting, until = set(tried), time.monotonic() + within_s
    while waiting and (left_s := until - time.monotonic()) > 0:
        waiting -= set(select.select((), waiting, (), left_s)[1])
    found = [
        place
        for stranger, place in tried.items()
        if stranger not in waiting and not stranger.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    ]
    for stranger in tried:
        stranger.close()
    return found


def forged(step: int) -> bytes:
    """Activations of every micro-batch of a step, of the right shape, that nobody has computed."""
    data = [Datum("act", 0, MicroBatch(replica, index), step) for replica in (0, 1) for index in (0, 1)]
    tensor = struct.pack("<512f", *[1e3] * 512)
    heads = [LANGUAGE.encode(Header(datum, 1 << 40, (("float32", (1, 32, 16)),))) for datum in data]
    return LANGUAGE.encode(Sender("tcp://10.0.0.1:1")) + b"".join(head + tensor for head in heads)


class Runs:
    """Makes the file ``mark`` where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable, tuple]:
        return open, (str(self.mark), "w")
