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

Where the job has TLS (tls.py), its handshake comes first, all of the above goes through it, and each proof and key is
also one of this TLS connection: who has a certificate of the job's ca, and passes on between two connections what is
proved, has proofs that fit neither.
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
HANDSHAKE_S = 10.0  # how long all of it may take
TLS_HELLO, TLS_ALERT = b"\x16\x03", b"\x15\x03"  # how what TLS says begins
ALIKE = "set recycle.tls on all hosts, or on none"
SIGNED = "put the same ca.crt into the folder of recycle.tls on all hosts, and a tls.crt that it has signed"
SHOWN = 64  # bytes of what has come instead


class Port(Enum):
    """What a port is for, which nothing that is proved at another one counts at."""

    CONTROL = b"control"
    TENSORS = b"boundary tensors"
    STATE = b"state for newcomers"
    LOGS = b"logs"


class Stranger(ConnectionError):
    """The other end of a connection does not know the job's secret; the message says what it has done instead.
    ``silent``: it has said nothing.  ``advice``: what to do where it may be of this job all the same.
    """

    def __init__(self, done: str, silent: bool = False, advice: str = "") -> None:
        super().__init__(done)
        self.silent, self.advice = silent, advice


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


class Proved(NamedTuple):
    """A connection on which both ends have proved to know the secret: what to talk over from now on, and its seals."""

    connection: Connection
    seals: Seals


class _Nonces(NamedTuple):
    """Both ends' share in what is proved on one connection, and what its TLS is bound to."""

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
    """The end that has made a connection: it sends ``opening``, and is given the ANSWER bytes that come.  ``binding``:
    that of its TLS, none without.
    """

    def __init__(self, secret: Secret, port: Port, binding: bytes = b"") -> None:
        self._secret, self._port, self._binding, self._nonce = secret, port, binding, secrets.token_bytes(NONCE)
        self.opening = MAGIC + self._nonce

    def proof(self, answer: bytes) -> tuple[bytes, Seals]:
        """What is to be sent, and the seals from then on.  Raises Stranger."""
        nonces = _Nonces(self._secret, self._port, self._binding, self._nonce, answer[:NONCE])
        if not hmac.compare_digest(nonces.made(b"answers"), answer[NONCE:]):
            raise Stranger("it does not know this job's secret")
        return nonces.made(b"calls"), nonces.seals(calls=True)


class Answerer:
    """The end that was called, with the caller's ``nonce``, which has come behind MAGIC: it sends ``answer``, and is
    given the PROOF bytes that come.  ``binding``: that of its TLS, none without.
    """

    def __init__(self, secret: Secret, port: Port, nonce: bytes, binding: bytes = b"") -> None:
        self._nonces = _Nonces(secret, port, binding, nonce, secrets.token_bytes(NONCE))
        self.answer = self._nonces.answerer + self._nonces.made(b"answers")

    def seals(self, proof: bytes) -> Seals:
        """The seals from now on.  Raises Stranger."""
        if not hmac.compare_digest(self._nonces.made(b"calls"), proof):
            raise Stranger("it does not know this job's secret")
        return self._nonces.seals(calls=False)


ANSWER = NONCE + PROOF


# --- over sockets ------------------------------------------------------------------------------------


def call(connection: socket.socket, secret: Secret, port: Port, timeout_s: float = HANDSHAKE_S) -> Proved:
    """Do the caller's part on a connection that blocks; its timeout is changed.  Raises Stranger, and OSError, also
    where the other end says nothing: a process of this job may be too busy for it, or about to end.
    """
    try:
        return _without_loop(_called(_Blocking(timeout_s), connection, secret, port))
    except Stranger as stranger:
        if stranger.silent:
            raise ConnectionError(str(stranger)) from None
        raise


def answer(connection: socket.socket, secret: Secret, port: Port, timeout_s: float = HANDSHAKE_S) -> Proved:
    """Do the answerer's part on a connection that blocks; its timeout is changed.  Raises Stranger, OSError."""
    return _without_loop(_answered(_Blocking(timeout_s), connection, secret, port))


async def answer_in_loop(connection: socket.socket, secret: Secret, port: Port) -> Proved:
    """Do the answerer's part on a connection that does not block, in the running event loop.  Raises Stranger,
    OSError.
    """
    words = _InLoop()
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return await _answered(words, connection, secret, port)
    except TimeoutError:
        raise _late(words.had) from None


class _Words:
    """What is said in a handshake; ``had`` is what has come of what is awaited."""

    had = b""

    async def say(self, over: Connection, data: bytes) -> None:
        raise NotImplementedError

    async def some(self, over: Connection, most: int) -> bytes:
        """What comes next, at most so many bytes; none at the end."""
        raise NotImplementedError

    async def exactly(self, over: Connection, size: int) -> bytes:
        """The next so many bytes.  Raises Stranger, OSError."""
        self.had = b""
        while len(self.had) < size:
            try:
                came = await self.some(over, size - len(self.had))
            except TlsFailure as failure:  # the other end has refused this one's certificate
                raise _no_tls(failure) from None
            if not came:
                raise _gone(self.had)
            self.had += came
        return self.had


class _Blocking(_Words):
    """Over a connection that blocks, within ``timeout_s`` seconds."""

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
    """In the running event loop, over a connection that does not block."""

    async def say(self, over: Connection, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(cast(socket.socket, over), data)

    async def some(self, over: Connection, most: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(cast(socket.socket, over), most)


def _without_loop(work: Coroutine[None, None, Proved]) -> Proved:
    """What ``work`` returns, which waits for nothing in an event loop."""
    try:
        work.send(None)
    except StopIteration as over:
        return over.value
    raise AssertionError("it waits for an event loop")


async def _called(words: _Words, connection: socket.socket, secret: Secret, port: Port) -> Proved:
    over, binding = await _through_tls(words, connection, secret, calls=True)
    caller = Caller(secret, port, binding)
    with suppress(ConnectionError):  # what the other end has said before it went is still to be read
        await words.say(over, caller.opening)
    proof, seals = caller.proof(await words.exactly(over, ANSWER))
    await words.say(over, proof)
    return Proved(over, seals)


async def _answered(words: _Words, connection: socket.socket, secret: Secret, port: Port) -> Proved:
    over, binding = await _through_tls(words, connection, secret, calls=False)
    magic = await words.exactly(over, len(MAGIC))
    if secret.tls is None and magic.startswith(TLS_HELLO):
        await words.some(over, RECORD)  # the rest of it, or what is said here would get lost
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
    """The connection and what it is bound to: in TLS, once that has done its handshake, or as it is, and to nothing.

    Raises Stranger, OSError.
    """
    if secret.tls is None:
        return connection, b""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        # the caller says two things in a row, of which the second would wait for an acknowledgement, 40 ms mostly
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end, words.had = secret.tls.end(calls), b""
    while True:
        try:
            said, through = end.shake(words.had)
        except TlsFailure as failure:
            with suppress(OSError):  # it may have gone
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
    return Stranger(f"it has not said in time who it is{_beginning(had)}", not had)


def _gone(had: bytes) -> Stranger:
    if had.startswith(TLS_ALERT):
        return Stranger("it asks for TLS, and recycle.tls is not set here", advice=ALIKE)
    return Stranger(f"it has gone before it has said who it is{_beginning(had)}", not had)


def _beginning(had: bytes) -> str:
    return f", but {had[:SHOWN]!r}" if had else ""
