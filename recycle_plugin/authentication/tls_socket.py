"""A connection in TLS, with those methods of a socket that the ports of a job use.

The standard library's SSLSocket is not enough. It has no ``sendmsg`` and no flags, so no non-blocking single call; and
its OpenSSL object allows one thread at a time, while here one thread reads and another writes.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import BinaryIO

from recycle_plugin.authentication.tls import RECORD, TlsEnd

PIECE = 1 << 18  # most bytes that are encrypted or read at once


class TlsSocket:
    """TLS over a ``connection`` on which this ``end`` has done its handshake; shutting either down shuts both. Methods
    do, return and raise the same as a socket's. One thread may read while one other writes.
    """

    def __init__(self, connection: socket.socket, end: TlsEnd) -> None:
        self._socket, self._end = connection, end
        self._unsent = memoryview(b"")  # encrypted bytes
        self._promised = 0  # the number of plain bytes in them

    # --- as the socket has it ------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._socket.fileno()

    def gettimeout(self) -> float | None:
        return self._socket.gettimeout()

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def setblocking(self, blocks: bool) -> None:
        self._socket.setblocking(blocks)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._socket.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        return self._socket.getsockopt(level, option, length)

    def getsockname(self) -> tuple:
        return self._socket.getsockname()

    def getpeername(self) -> tuple:
        return self._socket.getpeername()

    def shutdown(self, how: int) -> None:
        """Shut the socket down, without TLS's close message."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket, without TLS's close message."""
        self._socket.close()

    def __enter__(self) -> TlsSocket:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # --- reading -------------------------------------------------------------------------------------

    def recv(self, most: int, flags: int = 0) -> bytes:
        """Return at most ``most`` bytes, none at the end. Raises TlsFailure if the data was tampered with."""
        data = bytearray(min(most, RECORD))
        return bytes(memoryview(data)[: self.recv_into(data, 0, flags)])

    def recv_into(self, target: bytearray | memoryview, most: int = 0, flags: int = 0) -> int:
        """Read into ``target``; with MSG_WAITALL until it is full or the stream ends. Raises as :meth:`recv`."""
        with memoryview(target) as whole, whole[: most or len(whole)] as wanted:
            count = 0
            while True:
                with wanted[count:] as rest:
                    read = self._end.decrypted(rest)
                count += read or 0
                if count == len(wanted) or read == 0 or (count and not flags & socket.MSG_WAITALL):
                    return count
                self._end.feed(self._socket.recv(PIECE, flags & socket.MSG_DONTWAIT))

    # --- writing -------------------------------------------------------------------------------------

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0) -> int:
        """Send some of ``data``, and return the number of its bytes that were sent.

        After BlockingIOError some encrypted bytes may already be on their way: the next call must begin with the same
        bytes, and may have more after them.
        """
        if not self._unsent:
            with memoryview(data) as whole, whole[:PIECE] as piece:
                self._unsent, self._promised = memoryview(self._end.encrypted(piece)), len(piece)
        while self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent, flags) :]
        return self._promised

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        with memoryview(data) as whole:
            begin = 0
            while begin < len(whole):
                with whole[begin:] as rest:
                    begin += self.send(rest)

    def sendmsg(self, parts: Sequence[memoryview], ancillary: Sequence = (), flags: int = 0) -> int:
        """Send some of the first part that is not empty, as :meth:`send` does."""
        return self.send(next((part for part in parts if part), b""), flags)

    def sendfile(self, file: BinaryIO, offset: int, count: int) -> int:
        """Send ``count`` bytes of a file from ``offset`` on, and return how many; fewer if the file ends before."""
        file.seek(offset)
        sent = 0
        while sent < count and (piece := file.read(min(PIECE, count - sent))):
            self.sendall(piece)
            sent += len(piece)
        return sent


Connection = socket.socket | TlsSocket
