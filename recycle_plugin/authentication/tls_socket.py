"""A connection over which TLS is spoken, with as much of a socket's face as the ports of a job use.

The standard library's own does not do: it knows no ``sendmsg`` and no flags, so none of a call that does not wait, and
OpenSSL's object under it takes one thread at a time, where here one reads while another one writes.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import BinaryIO

from recycle_plugin.authentication.tls import RECORD, TlsEnd

PIECE = 1 << 18  # bytes that are encrypted at once, or read


class TlsSocket:
    """TLS over a ``connection`` over which this ``end`` of it has done its handshake; shutting either shuts both.

    Methods do, return and raise what the socket's do.  One thread may read, and one write, at a time.
    """

    def __init__(self, connection: socket.socket, end: TlsEnd) -> None:
        self._socket, self._end = connection, end
        self._unsent = memoryview(b"")  # what is encrypted
        self._promised = 0  # how many bytes that was, of those that were to be sent

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

    def getsockname(self) -> tuple:
        return self._socket.getsockname()

    def getpeername(self) -> tuple:
        return self._socket.getpeername()

    def shutdown(self, how: int) -> None:
        """Shut the socket, without TLS's word for it."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket, without TLS's word for it."""
        self._socket.close()

    def __enter__(self) -> TlsSocket:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # --- reading -------------------------------------------------------------------------------------

    def recv(self, most: int, flags: int = 0) -> bytes:
        """At most so many bytes; none at the end.  Raises TlsFailure where something else has come than was sent."""
        data = bytearray(min(most, RECORD))
        return bytes(memoryview(data)[: self.recv_into(data, 0, flags)])

    def recv_into(self, target: bytearray | memoryview, most: int = 0, flags: int = 0) -> int:
        """Read into ``target``; with MSG_WAITALL into all of it, but at the end.  Raises as :meth:`recv`."""
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
        """Send some of ``data``, and return how many bytes of it.

        Where that raises BlockingIOError some may be on their way, encrypted as they are: whoever goes on has to come
        with the same bytes again, and maybe more behind them.
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
        """Send so many bytes of a file from ``offset`` on; less, which is returned, where it ends before."""
        file.seek(offset)
        sent = 0
        while sent < count and (piece := file.read(min(PIECE, count - sent))):
            self.sendall(piece)
            sent += len(piece)
        return sent


Connection = socket.socket | TlsSocket
