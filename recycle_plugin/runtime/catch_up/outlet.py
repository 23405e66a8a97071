"""A source's end of the line to one newcomer (core/worker/serving.py: Outlet): a queue, and a thread that sends.

The training thread appends and never waits. The queue is bounded: units are read only if there is room; sums come with
each step, and the newcomer is given up if too many wait.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

from recycle_plugin.authentication.handshake import Seals
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Item, Marker, Sums, Unit
from recycle_plugin.runtime.catch_up.rate import Rate
from recycle_plugin.runtime.catch_up.served import Served
from recycle_plugin.runtime.catch_up.wire import FRAMES, Begin, Chunk, begun, chunks, digest, mark
from recycle_plugin.runtime.devices.kinds import order_of
from recycle_plugin.runtime.devices.port import Order
from recycle_plugin.runtime.lines.frames import Nonsense, end
from recycle_plugin.runtime.state.stage_state import raw

ROOM = 256 << 20  # bytes of units that may wait: a long instruction leaves no other moment to copy
STEPS = 2  # whose sums may wait whatever their size
LINGER_S = 10.0  # for the last data to arrive
LOOK_S = 1.0  # between two checks whether a blocked line has to end


class TcpOutlet:
    """The line to ``newcomer``, which may connect later (:meth:`take`). ``note`` gets warnings for the user, ``tell``
    the account at the end.
    """

    def __init__(
        self,
        newcomer: WorkerId,
        rate: Rate,
        note: Callable[[str], None],
        tell: Callable[[WorkerId, Served], None],
    ) -> None:
        self.newcomer, self._rate, self._note = newcomer, rate, note
        self._served, self._tell, self._told = Served(), tell, False
        self._changed = threading.Condition()
        self._queue: deque[tuple[Item, Order]] = deque()  # the first one is being sent
        self._units = 0  # bytes of waiting units
        self._sums: deque[tuple[int, int]] = deque()  # (step, bytes) of waiting sums, and of units that are sent again
        self._connection: Connection | None = None
        self._seals: Seals  # of the connection
        self._received = bytearray()
        self._until: float | None = None  # deadline, once closed
        self._broken = False

    # --- for who trains ----------------------------------------------------------------------------

    def asked(self) -> Iterable[Asked]:
        found: list[Asked] = []
        try:
            while self._connection is not None and not self._broken:
                data = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
                if not data:
                    raise EOFError
                self._received += data
                while (message := FRAMES.taken(self._received, self._seals.into)) is not None:
                    if not isinstance(message, Asked):
                        raise Nonsense(f"a {type(message).__name__} instead of what is wanted")
                    found.append(message)
        except BlockingIOError:
            pass
        except Nonsense as nonsense:
            self._end(f"it has sent an unreadable message: {nonsense}")
        except (OSError, EOFError):
            self._end()
        return found

    def send(self, item: Item) -> None:
        """Queue one item behind all others; if the newcomer is too far behind with sums the line ends."""
        order = order_of(_tensors(item))
        with self._changed:
            if self._broken or self._until is not None:
                return
            self._queue.append((item, order))
            if isinstance(item, Unit) and not item.again:
                self._units += _weight(item)
            elif isinstance(item, Sums | Unit):
                self._sums.append((item.step, _weight(item)))
            self._changed.notify_all()
            waiting = sum(weight for _, weight in self._sums)
            too_slow = waiting > ROOM and len({step for step, _ in self._sums}) > STEPS
        if too_slow:
            self._end(f"it reads updates too slowly: {waiting} bytes of more than {STEPS} steps wait for it")

    def has_room(self, waiting: bool) -> bool:
        """Return whether something may be read for this newcomer; ``waiting``: this worker has nothing else to do."""
        return self._units < ROOM and self._rate.may_copy(waiting)

    def copied(self, seconds: float) -> None:
        """Count the seconds that copying for this newcomer has taken."""
        self._served.copied(seconds, self._rate.copied(seconds))

    @property
    def broken(self) -> bool:
        return self._broken

    def close(self) -> None:
        """End the line once its sent data has arrived, within 10 s."""
        with self._changed:
            self._until = time.monotonic() + LINGER_S
            self._changed.notify_all()
        if self._connection is None:
            self._end()
        self._tell_once()

    # --- the line ----------------------------------------------------------------------------------

    def take(self, connection: Connection, seals: Seals) -> bool:
        """Send over ``connection`` with ``seals`` from now on; False if there is one already, or the line has ended."""
        with self._changed:
            if self._connection is not None or self._broken:
                return False
            connection.setblocking(False)  # first: with a timeout Python would wait for data that may not come
            self._connection, self._seals = connection, seals
        threading.Thread(target=self._work, name=f"recycle: to {self.newcomer}", daemon=True).start()
        return True

    def _work(self) -> None:
        connection = self._connection
        assert connection is not None, "it was taken"
        try:
            while self._say_next(connection):
                pass
            self._end()
        except OSError:
            self._end()
        except Exception as error:  # of the device; the trainer meets it by itself
            self._end(str(error)[:200])
        finally:
            connection.close()

    def _say_next(self, connection: Connection) -> bool:
        """Send the next item and drop it; returns False if there are no more."""
        entry = self._next()
        if entry is not None:
            self._say(connection, *entry)
            self._sent(entry[0])
        return entry is not None

    def _next(self) -> tuple[Item, Order] | None:
        """Return the next item, which stays in the queue; None if there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._broken or self._until is not None)
            return self._queue[0] if self._queue and not self._broken else None

    def _sent(self, item: Item) -> None:
        if isinstance(item, Unit):
            item.value.release()
        with self._changed:
            if self._queue:
                self._queue.popleft()
            if isinstance(item, Unit) and not item.again:
                self._units -= _weight(item)
            elif isinstance(item, Sums | Unit) and self._sums:
                self._sums.popleft()

    def _say(self, connection: Connection, item: Item, order: Order) -> None:
        if isinstance(item, Marker):
            self._write(connection, [memoryview(FRAMES.frame(mark(item), self._seals.out))])
            return
        order.join()
        for begin, tensors in begun(item):
            self._write(connection, [memoryview(FRAMES.frame(begin, self._seals.out))])
            for part, tensor in zip(begin.parts, tensors, strict=True):
                for offset, piece in chunks(part, tensor):
                    self._say_chunk(connection, begin, part.name, offset, piece)

    def _say_chunk(self, connection: Connection, begin: Begin, part: str, offset: int, piece: torch.Tensor) -> None:
        began = time.thread_time()
        data = raw(piece)
        chunk = Chunk(part, offset, data.nbytes, digest(begin, part, offset, data))
        self._write(connection, [memoryview(FRAMES.frame(chunk, self._seals.out)), data.data])
        if begin.kind != "sums":  # sums are not slowed down: each step brings as many again
            busy_s = time.thread_time() - began
            rest_s = self._rate.rest_s(busy_s)
            self._served.sent(chunk.size, busy_s, rest_s, self._rate.alone())
            with self._changed:
                self._changed.wait_for(lambda: self._broken, rest_s)

    def _write(self, connection: Connection, parts: list[memoryview]) -> None:
        """Write all of it; raises OSError if the line ends meanwhile."""
        while parts:
            if self._broken or (self._until is not None and time.monotonic() > self._until):
                raise ConnectionAbortedError
            try:
                count = connection.sendmsg(parts)
            except BlockingIOError:
                _await_room(connection)
                continue
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if count:
                parts[0] = parts[0][count:]

    def _end(self, why: str = "") -> None:
        with self._changed:
            first, self._broken = not self._broken, True
            self._queue.clear()
            self._sums.clear()
            self._units = 0
            self._changed.notify_all()
            connection = self._connection
        if first and why:
            self._note(f"the state is no longer sent to {self.newcomer}, which is catching up: {why}")
        if connection is not None and first:
            end(connection)
        self._tell_once()

    def _tell_once(self) -> None:
        with self._changed:
            first, self._told = not self._told, True
        if first and self._served.bytes:
            self._tell(self.newcomer, self._served)


def _await_room(connection: Connection) -> None:
    """Return once the socket takes something, or after 1 s."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    poll.poll(1000 * LOOK_S)


def _tensors(item: Item) -> list[torch.Tensor]:
    if isinstance(item, Unit) and item.value is not None:
        return [*item.value.tensors.values()]
    return [tensor for values in item.values.values() for tensor in values] if isinstance(item, Sums) else []


def _weight(item: Item) -> int:
    return sum(tensor.nbytes for tensor in _tensors(item))
