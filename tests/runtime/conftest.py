"""A coordinator that the test plays itself, for one worker's session."""

from __future__ import annotations

import socket
import threading
from typing import Callable

import pytest

from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Generation, Welcome, decode, encode
from recycle_plugin.core.roster import Member
from recycle_plugin.runtime.session import Session


class FakeCoordinator:
    """Accepts sessions; what they say lands in ``heard``, and ``tell`` speaks to all of them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._connections: list[socket.socket] = []
        self.heard: list[object] = []
        self.news = threading.Condition()

    def session(self, rank: int, wait_timeout_s: float = 10.0, ended_early: Callable[[Session], None] | None = None) -> Session:
        """A session of this process."""
        made: list[Session] = []
        thread = threading.Thread(target=lambda: made.append(Session(self.address, rank, wait_timeout_s, ended_early)))
        thread.start()
        self.accept()
        thread.join(10)
        return made[0]

    def accept(self) -> None:
        """Welcome the next session, from whichever process it comes."""
        self._listener.settimeout(60)
        connection, _ = self._listener.accept()
        lines = connection.makefile("rb")
        decode(lines.readline())
        connection.sendall(encode(Welcome(1, "job")))
        self._connections.append(connection)
        threading.Thread(target=self._hear, args=(lines,), daemon=True).start()

    def _hear(self, lines) -> None:
        try:
            for line in lines:
                with self.news:
                    self.heard.append(decode(line))
                    self.news.notify_all()
        except OSError:
            pass

    def tell(self, message: object) -> None:
        for connection in self._connections:
            connection.sendall(encode(message))

    def hear(self, kind: type) -> list[object]:
        """All messages of this kind, once there is one."""
        with self.news:
            assert self.news.wait_for(lambda: any(isinstance(one, kind) for one in self.heard), 30), f"no {kind.__name__}"
            return [one for one in self.heard if isinstance(one, kind)]

    def close(self) -> None:
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)  # close() alone would leave the line open while the reader has it
            except OSError:
                pass
            connection.close()
        self._listener.close()


@pytest.fixture
def coordinator():
    fake = FakeCoordinator()
    yield fake
    fake.close()


def generation(number: int, ranks: list[int], from_step: int = 0, addresses: dict[int, str] | None = None) -> Generation:
    members = tuple(Member(rank, Seat(rank, 0), (addresses or {}).get(rank, f"tcp://127.0.0.1:{rank + 1}"), "h") for rank in ranks)
    return Generation(number, members, from_step, "test", 0.0)
