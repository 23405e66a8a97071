"""A coordinator that the test plays itself, for one worker's session."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace

from recycle_plugin.authentication.handshake import Port
from recycle_plugin.core.coordinator.facts.boards import Boards
from recycle_plugin.core.coordinator.facts.key_values import KeyValues
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import Generation, Welcome
from recycle_plugin.core.messages.from_workers import Hello, Post, ReadBoard, StoreCall, WantResult
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from recycle_plugin.runtime.control.connections import SocketControl
from recycle_plugin.runtime.control.framed import Control
from recycle_plugin.runtime.control.in_process import InProcess
from recycle_plugin.runtime.control.session import Session
from tests.support.secret import SECRET, answered

PATIENCE_S = 60.0


class FakeCoordinator:
    """Welcomes sessions, of workers of this ``incarnation``; what they say lands in ``heard``, and ``tell`` speaks to
    all of them.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self._incarnation = incarnation
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._controls: list[Control] = []
        self._closed = False
        self._hearing: list[threading.Thread] = []
        self.heard: list[object] = []
        self.sessions: dict[int, Session] = {}  # of this process, by rank
        self.news = threading.Condition()
        self._boards, self._store, self._members = Boards(), KeyValues(), dict[WorkerId, Control]()

    def session(
        self, rank: int, wait_timeout_s: float = 10.0, ended_early: Callable[[Session], None] | None = None
    ) -> Session:
        self.sessions[rank] = Session(InProcess(self._answer), rank, SECRET, wait_timeout_s, ended_early)
        return self.sessions[rank]

    def accept(self) -> None:
        """The next session of another process."""
        self._listener.settimeout(60)
        connection = self._listener.accept()[0]
        self._answer(SocketControl(answered(connection, Port.CONTROL)))

    def _answer(self, control: Control) -> None:
        if self._closed:
            control.close()
            return
        self._controls.append(control)
        self._hearing.append(threading.Thread(target=self._hear, args=(control,), daemon=True))
        self._hearing[-1].start()

    def _hear(self, control: Control) -> None:
        hello = control.receive(PATIENCE_S)
        if isinstance(hello, Hello):
            self._members[WorkerId(hello.rank, self._incarnation)] = control
        control.send(Welcome("job", self._incarnation))
        while (message := control.receive(PATIENCE_S)) is not None or control.broken is None:
            with self.news:
                self.heard += [message] if message is not None else []
                self.news.notify_all()
                self._serve_boards(message)

    def _serve_boards(self, message: object) -> None:
        out = CoordinatorOutput()
        match message:
            case Post():
                self._boards.post(message, lambda worker: False, out)
            case ReadBoard():
                self._boards.read(message, out)
            case StoreCall():
                self._store.call(message, out.tell)
            case WantResult():
                out.tell(next(worker for worker in self._members if worker.rank == message.holder), message)
        for worker, answer in out.messages:
            self._members[worker].send(answer, PATIENCE_S)

    def tell(self, message: object) -> None:
        for control in self._controls:
            control.send(message, PATIENCE_S)

    def keep(self, post: Post) -> None:
        self._boards.post(post, set(), CoordinatorOutput())

    def hear(self, kind: type) -> list[object]:
        with self.news:
            assert self.news.wait_for(lambda: any(isinstance(one, kind) for one in self.heard), PATIENCE_S), (
                f"no {kind.__name__}"
            )
            return [one for one in self.heard if isinstance(one, kind)]

    def heard_all(self) -> None:
        """Waits until all that processes which have ended said is in ``heard``."""
        for thread in self._hearing:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"a session whose process has ended is open after {PATIENCE_S} s"

    def close(self) -> None:
        self._closed = True
        for control in self._controls:
            control.close()
        self._listener.close()


def generation(
    number: int, ranks: list[int], from_step: int = 0, addresses: dict[int, str] | None = None
) -> Generation:
    members = tuple(
        Member(rank, Seat(rank, 0), (addresses or {}).get(rank, f"tcp://127.0.0.1:{rank + 1}"), "h") for rank in ranks
    )
    return Generation(number, members, from_step, "test", 0.0)


NO_STATE = (
    SimpleNamespace(to=None, come_from=None),
    SimpleNamespace(hash_state=None, wait=None),
    SimpleNamespace(fill=None, write=None, gathered=None, settings=None, take_settings=None),
)  # the lines, hashes and units of a worker whose state nobody asks for
