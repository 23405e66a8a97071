"""The secret of the jobs that tests play themselves, and how they prove to know it."""

from __future__ import annotations

import socket
from contextlib import suppress

from recycle_plugin.authentication.handshake import HANDSHAKE_S, Port, Proved, answer, call
from recycle_plugin.authentication.secret import Secret, write_own
from recycle_plugin.runtime.control.connections import ControlWay

SHARED = "a secret that all tests know, and nobody else"
SECRET = Secret(SHARED)
PATIENCE_S = 30.0


def way(address: tuple[str, int], secret: Secret = SECRET) -> ControlWay:
    return ControlWay(tuple(address[:2]), secret)


def written(path) -> str:
    write_own(path, SHARED)
    return str(path)


def called(address: tuple[str, int] | str, port: Port, secret: Secret = SECRET) -> Proved:
    """A connection to a port of a job, on which both ends have authenticated."""
    if isinstance(address, str):
        host, _, number = address.removeprefix("tcp://").rpartition(":")
        address = host, int(number)
    proved = call(socket.create_connection(address, PATIENCE_S), secret, port)
    proved.connection.settimeout(PATIENCE_S)
    return proved


def answered(connection: socket.socket, port: Port, timeout_s: float = HANDSHAKE_S, secret: Secret = SECRET) -> Proved:
    """A connection to a port that the test plays, once both ends have authenticated."""
    proved = answer(connection, secret, port, timeout_s)
    with suppress(OSError):
        proved.connection.settimeout(PATIENCE_S)
    return proved
