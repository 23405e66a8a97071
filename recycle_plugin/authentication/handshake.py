"""The handshake by which both ends of a connection prove that they know the job's secret, and the seals after it.

    caller                                   answerer
      | MAGIC, a nonce ------------------------>|
      |<------- a nonce, HMAC("answers", nonces)|
      | HMAC("calls", nonces) ----------------->|   followed by the caller's messages

Each proof and each key is an HMAC-SHA256 under the secret, of its purpose, the port's kind and both nonces: none can be
used for another purpose, port, direction or time. All parts have a fixed size, so nothing from a stranger is
interpreted before its proof has arrived, and the whole handshake has one deadline.

Afterwards every message of ours has a *seal*: the beginning of an HMAC, under a key of this connection and direction,
of the message's running number and its bytes. Bulk bytes behind a message (tensors, pieces of logs) have none.

If the job has TLS (tls.py), its handshake comes first and all of the above goes through it. Each proof and key then
also depends on this TLS connection. So proofs relayed between two connections fit neither, even if the relay has a
certificate of the job's ca.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import Coroutine
from contextlib import suppress
from enum import Enum
from typing import NamedTuple, cast

from recycle_plugin.authentication.secret import Secret
from recycle_plugin.authentication.tls import ALERT, RECORD, TlsFailure
from recycle_plugin.authentication.tls_socket import Connection, TlsSocket

MAGIC = b"RPA1"
NONCE = 32  # bytes
PROOF = 32
SEAL = 16  # bytes of a message's seal
HANDSHAKE_S = 10.0  # most time for all of it
TLS_HELLO, TLS_ALERT = b"\x16\x03", b"\x15\x03"  # beginnings of TLS records
ALIKE = "set recycle.tls on all hosts, or on none"
SIGNED = "put the same ca.crt into the folder of recycle.tls on all hosts, and a tls.crt that it has signed"
SHOWN = 64  # most bytes of unexpected data in an error


class Port(Enum):
    """A port's purpose; proofs for one purpose do not count for another."""

    CONTROL = b"control"
    TENSORS = b"boundary tensors"
    STATE = b"state for newcomers"
    LOGS = b"logs"


class Stranger(ConnectionError):
    """The other end of a connection does not know the job's secret; the message says what it did instead. ``silent``:
    it sent nothing. ``advice``: what to change if it belongs to this job after all.
    """

    def __init__(self, done: str, silent: bool = False, advice: str = "") -> None:
        super().__init__(done)
        self.silent, self.advice = silent, advice


class Seal:
    """The seals of one direction of a connection under ``key``, each with the next number."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def of(self, message: bytes | bytearray) -> bytes:
        self._number += 1
        return hmac.digest(self._key, b"%d:" % self._number + message, "sha256")[:SEAL]

    def fits(self, message: bytes | bytearray, seal: bytes | bytearray) -> bool:
        return hmac.compare_digest(self.of(message), bytes(seal))


class Seals(NamedTuple):
    """The seals of a connection, for outgoing and incoming messages; ``datagrams``: the key for the caller's."""

    out: Seal
    into: Seal
    datagrams: bytes


class Proved(NamedTuple):
    """A connection on which both ends have proved to know the secret: the socket to use from now on, and its seals."""

    connection: Connection
    seals: Seals


class _Nonces(NamedTuple):
    """Inputs of the proofs on one connection: both ends' nonces, and the binding to its TLS."""

    secret: Secret
    port: Port
    binding: bytes
    caller: bytes
    answerer: bytes

    def made(self, what: bytes) -> bytes:
        return self.secret.derived(b"|".join((what, self.port.value, self.caller, self.answerer, self.binding)))

    def seals(self, calls: bool) -> Seals:
        from_caller, from_answerer = Seal(self.made(b"from the caller")), Seal(self.made(b"from the answerer"))
        out, into = (from_caller, from_answerer) if calls else (from_answerer, from_caller)
        return Seals(out, into, self.made(b"datagrams"))


class Caller:
    """The calling end: sends ``opening``, receives ANSWER bytes; ``binding``: of its TLS, empty without."""

    def __init__(self, secret: Secret, port: Port, binding: bytes = b"") -> None:
        self._secret, self._port, self._binding, self._nonce = secret, port, binding, secrets.token_bytes(NONCE)
        self.opening = MAGIC + self._nonce

    def proof(self, answer: bytes) -> tuple[bytes, Seals]:
        """Return the proof to send, and the seals from then on. Raises Stranger."""
        nonces = _Nonces(self._secret, self._port, self._binding, self._nonce, answer[:NONCE])
        if not hmac.compare_digest(nonces.made(b"answers"), answer[NONCE:]):
            raise Stranger("it does not know this job's secret")
        return nonces.made(b"calls"), nonces.seals(calls=True)


class Answerer:
    """The called end: sends ``answer`` to the caller's ``nonce``, gets PROOF bytes; ``binding``: as the Caller's."""

    def __init__(self, secret: Secret, port: Port, nonce: bytes, binding: bytes = b"") -> None:
        self._nonces = _Nonces(secret, port, binding, nonce, secrets.token_bytes(NONCE))
        self.answer = self._nonces.answerer + self._nonces.made(b"answers")

    def seals(self, proof: bytes) -> Seals:
        """Return the seals from now on. Raises Stranger."""
        if not hmac.compare_digest(self._nonces.made(b"calls"), proof):
            raise Stranger("it does not know this job's secret")
        return self._nonces.seals(calls=False)


ANSWER = NONCE + PROOF


# --- over sockets ------------------------------------------------------------------------------------


def call(connection: socket.socket, secret: Secret, port: Port, timeout_s: float = HANDSHAKE_S) -> Proved:
    """Do the caller's part on a blocking connection, and change its timeout. Raises Stranger, OSError. A silent other
    end is a plain ConnectionError: a process of this job may be too busy to answer, or about to end.
    """
    try:
        return _without_loop(_called(_Blocking(timeout_s), connection, secret, port))
    except Stranger as stranger:
        if stranger.silent:
            raise ConnectionError(str(stranger)) from None
        raise


def answer(connection: socket.socket, secret: Secret, port: Port, timeout_s: float = HANDSHAKE_S) -> Proved:
    """Do the answerer's part on a blocking connection, and change its timeout. Raises Stranger, OSError."""
    return _without_loop(_answered(_Blocking(timeout_s), connection, secret, port))


async def answer_in_loop(connection: socket.socket, secret: Secret, port: Port) -> Proved:
    """Do the answerer's part on a non-blocking connection in the running event loop. Raises Stranger, OSError."""
    words = _InLoop()
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return await _answered(words, connection, secret, port)
    except TimeoutError:
        raise _late(words.had) from None


class _Words:
    """Input and output of a handshake. ``had``: the received part of the awaited bytes."""

    had = b""

    async def say(self, over: Connection, data: bytes) -> None:
        raise NotImplementedError

    async def some(self, over: Connection, most: int) -> bytes:
        """Return the next bytes, at most ``most``; none at the end."""
        raise NotImplementedError

    async def exactly(self, over: Connection, size: int) -> bytes:
        """Return the next ``size`` bytes. Raises Stranger, OSError."""
        self.had = b""
        while len(self.had) < size:
            try:
                came = await self.some(over, size - len(self.had))
            except TlsFailure as failure:  # the other end has refused this end's certificate
                raise _no_tls(failure) from None
            if not came:
                raise _gone(self.had)
            self.had += came
        return self.had


class _Blocking(_Words):
    """Over a blocking connection, within ``timeout_s`` seconds."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s

    async def say(self, over: Connection, data: bytes) -> None:
        over.settimeout(self._left_s)
        over.sendall(data)

    async def some(self, over: Connection, most: int) -> bytes:
        over.settimeout(self._left_s)
        try:
            return over.recv(most)
        except TimeoutError:
            raise _late(self.had) from None

    @property
    def _left_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())


class _InLoop(_Words):
    """Over a non-blocking connection, in the running event loop."""

    async def say(self, over: Connection, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(cast(socket.socket, over), data)

    async def some(self, over: Connection, most: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(cast(socket.socket, over), most)


def _without_loop(work: Coroutine[None, None, Proved]) -> Proved:
    """Run a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as over:
        return over.value
    raise AssertionError("it waits for an event loop")


async def _called(words: _Words, connection: socket.socket, secret: Secret, port: Port) -> Proved:
    over, binding = await _through_tls(words, connection, secret, calls=True)
    caller = Caller(secret, port, binding)
    with suppress(ConnectionError):  # the other end's last words are still to be read
        await words.say(over, caller.opening)
    proof, seals = caller.proof(await words.exactly(over, ANSWER))
    await words.say(over, proof)
    return Proved(over, seals)


async def _answered(words: _Words, connection: socket.socket, secret: Secret, port: Port) -> Proved:
    over, binding = await _through_tls(words, connection, secret, calls=False)
    magic = await words.exactly(over, len(MAGIC))
    if secret.tls is None and magic.startswith(TLS_HELLO):
        await words.some(over, RECORD)  # read the rest of the hello, else a reset could lose the alert
        await words.say(over, ALERT)
        raise Stranger("it speaks TLS, and recycle.tls is not set here", advice=ALIKE)
    if magic != MAGIC:
        raise Stranger(f"it begins with {magic!r}, which can't be understood")
    answerer = Answerer(secret, port, await words.exactly(over, NONCE), binding)
    await words.say(over, answerer.answer)
    return Proved(over, answerer.seals(await words.exactly(over, PROOF)))


async def _through_tls(
    words: _Words, connection: socket.socket, secret: Secret, calls: bool
) -> tuple[Connection, bytes]:
    """Return the connection, in TLS if the job has it, and its binding to that. Raises Stranger, OSError."""
    if secret.tls is None:
        return connection, b""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        # The caller sends twice in a row: Nagle's algorithm would hold the second back, often for 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end, words.had = secret.tls.end(calls), b""
    while True:
        try:
            said, through = end.shake(words.had)
        except TlsFailure as failure:
            with suppress(OSError):  # it may be closed
                await words.say(connection, failure.parting or (b"" if calls or failure.spoken else ALERT))
            raise _no_tls(failure) from None
        await words.say(connection, said)
        if through:
            return TlsSocket(connection, end), end.binding
        if not (came := await words.some(connection, RECORD)):
            raise _gone(words.had)
        words.had = came


def _no_tls(failure: TlsFailure) -> Stranger:
    if failure.spoken:
        return Stranger(str(failure), advice=SIGNED)
    return Stranger(f"{failure}, which is set here", advice=ALIKE)


def _late(had: bytes) -> Stranger:
    return Stranger(f"it has not proved in time who it is{_beginning(had)}", not had)


def _gone(had: bytes) -> Stranger:
    if had.startswith(TLS_ALERT):
        return Stranger("it asks for TLS, and recycle.tls is not set here", advice=ALIKE)
    return Stranger(f"it disconnected before it had proved who it is{_beginning(had)}", not had)


def _beginning(had: bytes) -> str:
    return f", but {had[:SHOWN]!r}" if had else ""
