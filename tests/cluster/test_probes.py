"""Whoever comes to a job's ports and is none of it: scanners of ports, browsers, other programs that were given the
wrong port.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import struct

import psutil
import pytest

from recycle_plugin.core.messages.encoding import CONTROL, HEAD
from recycle_plugin.runtime.movers.wire import LANGUAGE
from tests.support.cluster import Run
from tests.support.jobs import WRAPPED, after_step, assert_same_training, hold
from tests.support.strangers import letting_in

TLS_HELLO = bytes.fromhex("16030100c1010000bd0303") + os.urandom(190)
DEEP = b"\x91" * 1000 + b"\x01"
SAID = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    TLS_HELLO,
    bytes(64),
    os.urandom(400),
    HEAD.pack(b"RP", CONTROL.version, len(DEEP)) + DEEP,
    HEAD.pack(b"RP", LANGUAGE.version, len(DEEP)) + DEEP,
)
PATIENCE_S = 20.0


def knock(port: int, said: bytes, how: str) -> None:
    """Say it, and go at once, with a reset or without, or once the other end has gone."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as stranger:
        try:
            stranger.sendall(said)
            if how == "reset":
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how == "wait":
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):
                    pass
        except ConnectionError:
            pass
        except OSError as gone:  # reset before the half-close: a timeout is none of these, and fails the test
            if gone.errno != errno.ENOTCONN:
                raise


def ports(pid: int, kind: str) -> set[int]:
    return {
        each.laddr.port
        for each in psutil.Process(pid).net_connections(kind)
        if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }


def transports(run: Run) -> set[int]:
    """What workers listen at: their movers' ports, and Gloo's, which let no stranger in."""
    return set().union(*(ports(pid, "tcp") for pid in run.pids().values()))


@pytest.mark.plain_too(deepspeed=False)
def test_no_port_of_a_job_minds_strangers(launch, reference, tmp_path):
    """Nobody is lost, nothing is printed but lines that say from where what could not be understood has come."""
    run = launch("recycle.progress_timeout_s=100", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(hold(tmp_path)))
    after_step(run, 2)
    assert run.port in ports(run.coordinator_pid(), "tcp")
    others = {port for _, port in letting_in(("127.0.0.1", port) for port in transports(run))}
    for port, said in itertools.product(sorted({run.port} | others), SAID):
        for how in ("leave", "reset", "wait")[: 3 if port == run.port else 2]:  # torch's do not hang up
            knock(port, said, how)
    with socket.socket(type=socket.SOCK_DGRAM) as stranger:
        for said in SAID:
            stranger.sendto(said, ("127.0.0.1", run.port))
    (tmp_path / "go").touch()
    result = run.finish()
    assert_same_training(result, reference())
    assert "Traceback" not in result.output and "never retrieved" not in result.output, result.output[-6000:]
    told = [event["text"].partition(" a caller at ")[0] for event in result.of("stranger")]
    assert sorted(told) == ["at the coordinator", *(f"at worker {rank}" for rank in range(4))], told
