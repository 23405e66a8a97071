"""The handshake by which both ends of a connection prove that they know the job's secret, and the seals after it.

    caller                                   answerer
      | MAGIC, a nonce ------------------------>|
      |<------- a nonce, HMAC("answers", nonces)|
      | HMAC("calls", nonces) ----------------->|   and what the caller has to say, behind it

Each proof and each key is an HMAC-SHA256 under the secret of what it is for, of the port's kind and of both nonces:
none can be used for another one, for another port, the other way round, or another time.  All parts have a fixed size,
so that nothing of what a stranger says is interpreted before its proof is there, and the whole has one deadline.

Afterwards every message of ours has a *seal*: the beginning of an HMAC, under a key of this connection and direction,
of the message's running number and its bytes.  Bulk bytes behind a message (tensors, pieces of logs) have none.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from enum import Enum
from typing import NamedTuple

from recycle_plugin.runtime.authentication.secret import Secret

MAGIC = b"RPA1"
NONCE = 32  # bytes
PROOF = 32
SEAL = 16  # bytes of a message's seal
HANDSHAKE_S = 10.0  # how long all of it may take


class Port(Enum):
    """What a port is for, which nothing that is proved at another one counts at."""

    CONTROL = b"control"
    TENSORS = b"boundary tensors"
    STATE = b"state for newcomers"
    LOGS = b"logs"


class Stranger(ConnectionError):
    """The other end of a connection does not know the job's secret; the message says what it has done instead.
    ``silent``: it has said nothing.
    """

    def __init__(self, done: str, silent: bool = False) -> None:
        super().__init__(done)
        self.silent = silent


class Seal:
    """The seals of what goes one way over a connection, under ``key``, each of the next number."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def of(self, message: bytes | bytearray) -> bytes:
        """The seal of the next message."""
        self._number += 1
        return hmac.digest(self._key, b"%d:" % self._number + message, "sha256")[:SEAL]

    def fits(self, message: bytes | bytearray, seal: bytes | bytearray) -> bool:
        """Whether ``message`` is the next one, and ``seal`` its."""
        return hmac.compare_digest(self.of(message), bytes(seal))


class Seals(NamedTuple):
    """A connection's: of what goes out of this end, and of what comes; ``datagrams`` is the key for those of the
    caller.
    """

    out: Seal
    into: Seal
    datagrams: bytes


class _Nonces(NamedTuple):
    """Both ends' share in what is proved on one connection."""

    secret: Secret
    port: Port
    caller: bytes
    answerer: bytes

    def made(self, what: bytes) -> bytes:
        return self.secret.derived(b"|".join((what, self.port.value, self.caller, self.answerer)))

    def seals(self, calls: bool) -> Seals:
        from_caller, from_answerer = Seal(self.made(b"from the caller")), Seal(self.made(b"from the answerer"))
        out, into = (from_caller, from_answerer) if calls else (from_answerer, from_caller)
        return Seals(out, into, self.made(b"datagrams"))


class Caller:
    """The end that has made a connection: it sends ``opening``, and is given the ANSWER bytes that come."""

    def __init__(self, secret: Secret, port: Port) -> None:
        self._secret, self._port, self._nonce = secret, port, secrets.token_bytes(NONCE)
        self.opening = MAGIC + self._nonce

    def proof(self, answer: bytes) -> tuple[bytes, Seals]:
        """What is to be sent, and the seals from then on.  Raises Stranger."""
        nonces = _Nonces(self._secret, self._port, self._nonce, answer[:NONCE])
        if not hmac.compare_digest(nonces.made(b"answers"), answer[NONCE:]):
            raise Stranger("it does not know this job's secret")
        return nonces.made(b"calls"), nonces.seals(calls=True)


class Answerer:
    """The end that was called, with the caller's ``nonce``, which has come behind MAGIC: it sends ``answer``, and is
    given the PROOF bytes that come.
    """

    def __init__(self, secret: Secret, port: Port, nonce: bytes) -> None:
        self._nonces = _Nonces(secret, port, nonce, secrets.token_bytes(NONCE))
        self.answer = self._nonces.answerer + self._nonces.made(b"answers")

    def seals(self, proof: bytes) -> Seals:
        """The seals from now on.  Raises Stranger."""
        if not hmac.compare_digest(self._nonces.made(b"calls"), proof):
            raise Stranger("it does not know this job's secret")
        return self._nonces.seals(calls=False)


ANSWER = NONCE + PROOF


# --- over sockets ------------------------------------------------------------------------------------


def call(connection: socket.socket, secret: Secret, port: Port, timeout_s: float = HANDSHAKE_S) -> Seals:
    """Do the caller's part on a connection that blocks; its timeout is changed.  Raises Stranger, and OSError, also
    where the other end says nothing: a process of this job may be too busy for it, or about to end.
    """
    deadline = time.monotonic() + timeout_s
    caller = Caller(secret, port)
    connection.settimeout(timeout_s)
    connection.sendall(caller.opening)
    try:
        proof, seals = caller.proof(_exactly(connection, ANSWER, deadline))
    except Stranger as stranger:
        if stranger.silent:
            raise ConnectionError(str(stranger)) from None
        raise
    connection.sendall(proof)
    return seals


def answer(connection: socket.socket, secret: Secret, port: Port, timeout_s: float = HANDSHAKE_S) -> Seals:
    """Do the answerer's part on a connection that blocks; its timeout is changed.  Raises Stranger, OSError."""
    deadline = time.monotonic() + timeout_s
    _check(_exactly(connection, len(MAGIC), deadline))
    answerer = Answerer(secret, port, _exactly(connection, NONCE, deadline))
    connection.sendall(answerer.answer)
    return answerer.seals(_exactly(connection, PROOF, deadline))


async def answer_in_loop(connection: socket.socket, secret: Secret, port: Port) -> Seals:
    """Do the answerer's part on a connection that does not block, in the running event loop.  Raises Stranger,
    OSError.
    """
    loop = asyncio.get_running_loop()
    had = b""
    try:
        async with asyncio.timeout(HANDSHAKE_S):

            async def exactly(size: int) -> bytes:
                nonlocal had
                had = b""
                while len(had) < size:
                    if not (came := await loop.sock_recv(connection, size - len(had))):
                        raise _gone(had)
                    had += came
                return had

            _check(await exactly(len(MAGIC)))
            answerer = Answerer(secret, port, await exactly(NONCE))
            await loop.sock_sendall(connection, answerer.answer)
            return answerer.seals(await exactly(PROOF))
    except TimeoutError:
        raise _late(had) from None


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    had = b""
    while len(had) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            came = connection.recv(size - len(had))
        except TimeoutError:
            raise _late(had) from None
        if not came:
            raise _gone(had)
        had += came
    return had


def _check(magic: bytes) -> None:
    if magic != MAGIC:
        raise Stranger(f"it begins with {magic!r}, which can't be understood")


def _late(had: bytes) -> Stranger:
    return Stranger(f"it has not said in time who it is{_beginning(had)}", not had)


def _gone(had: bytes) -> Stranger:
    return Stranger(f"it has gone before it has said who it is{_beginning(had)}", not had)


def _beginning(had: bytes) -> str:
    return f", but {had!r}" if had else ""
