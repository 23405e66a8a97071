"""A newcomer's end of the line from one source (core/worker/catching_up.py: Inlet): a thread that reads and checks.

A damaged item is handed out as such, or asked for again. A damaged frame breaks the line.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable

import torch

from recycle_plugin.authentication.handshake import HANDSHAKE_S, Port, Seal, Seals
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.vocabulary.state_stream import Asked, Item
from recycle_plugin.runtime.catch_up.wire import (
    CHUNK_BYTES,
    FRAMES,
    Arrival,
    Begin,
    Chunk,
    Mark,
    check,
    digest,
    item,
    marker,
)
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.lines.frames import Nonsense, end, fill, peer_at, proved
from recycle_plugin.runtime.movers.wire import DTYPES, raw
from recycle_plugin.runtime.system import forked

CONNECT_S = 10.0  # for the source to answer
ROOM = 256 << 20  # bytes that may wait to be taken; beyond, the source's sending thread waits
ASKED_AT_ONCE = 1000  # units, in one frame


class TcpInlet:
    """The line to the source at ``address`` ("tcp://host:port"), which gets ``arrival`` first; ``secret``: the job's.
    ``changed`` is notified when something has come; ``note`` gets warnings for the user; ``device``: where tensors go.
    """

    def __init__(
        self,
        address: str,
        arrival: Arrival,
        secret: Secret,
        changed: threading.Condition,
        note: Callable[[str], None],
        device: Device = CPU,
    ) -> None:
        self._peer, self._arrival, self._changed, self._note = peer_at(address), arrival, changed, note
        self._device = device
        self._items: deque[tuple[Item, int]] = deque()  # each with its bytes
        self._waiting = 0  # bytes
        self._space = threading.Condition()
        self._talking = threading.Lock()
        self._secret, self._seals = secret, Seals(Seal(b""), Seal(b""), b"")
        self._unsaid: list[object] = [arrival]  # until there is a connection
        self._unsent = bytearray()
        self._opening: socket.socket | None = None  # a connection before its handshake
        self._connection: Connection | None = None
        self._closed = self._over = False
        self.taken = {"state": 0, "sums": 0}  # bytes received
        threading.Thread(target=self._work, name=f"recycle: from {address}", daemon=True).start()

    # --- for who catches up ------------------------------------------------------------------------

    def ask(self, asked: Asked) -> None:
        units = asked.units
        parts = [units[begin : begin + ASKED_AT_ONCE] for begin in range(0, len(units), ASKED_AT_ONCE)] or [()]
        for number, part in enumerate(parts):
            first = number == 0
            self._say(Asked(part, asked.head and first, asked.script and first, asked.leave))

    def items(self) -> Iterable[Item]:
        """Return the items received since the last call, in order."""
        self._say()
        with self._space:
            found = [one for one, _ in self._items]
            self._items.clear()
            self._waiting = 0
            self._space.notify_all()
        return found

    @property
    def broken(self) -> bool:
        """Whether the source is gone, and all its items are handed out."""
        with self._space:
            return self._over and not self._items

    def close(self) -> None:
        with self._space:
            self._closed = True
            self._space.notify_all()
        self._shut()

    # --- the line ----------------------------------------------------------------------------------

    def _say(self, *messages: object) -> None:
        """Send as much as the socket takes at once; the next call sends the rest."""
        with self._talking:
            self._unsaid += messages
            if self._connection is None:
                return
            for message in self._unsaid:
                self._unsent += FRAMES.frame(message, self._seals.out)
            self._unsaid.clear()
            try:
                while self._unsent:
                    del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                pass
            except OSError:  # the reader notices the end
                self._unsent.clear()

    def _work(self) -> None:
        try:
            connection = self._opening = forked.own(socket.create_connection(self._peer, CONNECT_S))
            with connection:
                over, self._seals = proved(connection, self._secret, Port.STATE, HANDSHAKE_S)
                with self._talking:
                    self._connection = over
                self._say()
                while not self._closed:
                    self._take(over)
        except Nonsense as nonsense:
            self._note(f"the stage's state from {self._peer[0]}:{self._peer[1]} can't be read: {nonsense}")
        except (OSError, EOFError):
            pass
        finally:  # also after an error that nobody expects: else the newcomer would wait for it
            with self._space:
                self._over = True
            with self._changed:
                self._changed.notify_all()

    def _take(self, connection: Connection) -> None:
        found = FRAMES.receive(connection, object, self._seals.into)
        if isinstance(found, Mark):
            self._deliver(marker(found), 0)
            return
        if not isinstance(found, Begin):
            raise Nonsense(f"a {type(found).__name__} where an item should begin")
        check(found)
        self._await_space(found.nbytes)
        tensors, whole = [], True
        for part in found.parts:
            tensors.append(self._room(part.shape, DTYPES[part.dtype]))
            whole &= self._read(connection, found, part.name, tensors[-1])
        self.taken["sums" if found.kind == "sums" else "state"] += found.nbytes
        made = item(found, tensors if whole else None)
        if made is not None:
            self._deliver(made, found.nbytes)
        if not whole:
            self._note(f"{found.kind} {found.name}, step {found.step}, was damaged on its way; it is sent again")
        if found.kind in ("head", "script") and not whole:
            self.ask(Asked(head=found.kind == "head", script=found.kind == "script"))

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return self._device.room(shape, dtype)
        except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # torch's own words
            raise Nonsense(f"a tensor of shape {str(shape)[:80]}: {str(error)[:200]}") from None

    def _read(self, connection: Connection, begin: Begin, part: str, tensor: torch.Tensor) -> bool:
        """Read a part's chunks; returns False if one was damaged."""
        whole, data = True, raw(tensor) if tensor.numel() else memoryview(b"")
        for offset in range(0, len(data), CHUNK_BYTES):
            chunk, target = FRAMES.receive(connection, Chunk, self._seals.into), data[offset : offset + CHUNK_BYTES]
            if (chunk.part, chunk.offset, chunk.size) != (part, offset, len(target)):
                raise Nonsense(f"byte {chunk.offset} of {chunk.part[:80]!r} where byte {offset} of {part!r} is next")
            fill(connection, target)
            whole &= digest(begin, part, offset, target) == chunk.digest
        return whole

    def _await_space(self, nbytes: int) -> None:
        with self._space:
            self._space.wait_for(lambda: self._closed or not self._items or self._waiting + nbytes <= ROOM)

    def _deliver(self, one: Item, nbytes: int) -> None:
        with self._space:
            self._items.append((one, nbytes))
            self._waiting += nbytes
        with self._changed:
            self._changed.notify_all()

    def _shut(self) -> None:
        if self._opening is not None:
            end(self._opening)
