"""A worker's access to the coordinator's boards (core/coordinator/facts/boards.py): its posts, and its readings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from recycle_plugin.core.messages.from_coordinator import Posted
from recycle_plugin.core.messages.from_workers import ALWAYS, Post, ReadBoard
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.whereabouts import Reading
from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.control.waiting import Waiting

LOOK_S = 1.0  # s between checks that the reading is still wanted


class BoardAccess:
    """The boards for the worker with this ``view`` of the job. Any thread may call any method."""

    def __init__(self, view: ControlView, send: Callable[[object], None], waiting: Waiting) -> None:
        self._view, self._send, self._waiting = view, send, waiting
        self._readings: dict[str, Reading] = {}
        self._lock = threading.Lock()

    def post(self, board: str, value: bytes, generation: int) -> None:
        """Post ``value`` in ``generation``; a later value on the same board is ignored."""
        self._send(Post(self._view.rank, generation, board, value))

    def read(self, board: str, ranks: Sequence[int], generation: int) -> Reading:
        """Ask for the posts of ``ranks`` on ``board``. The caller drops the reading by :meth:`forget`."""
        with self._lock:
            reading = self._readings.setdefault(board, Reading())
        self._send(ReadBoard(self._view.rank, generation, board, tuple(ranks)))
        return reading

    def forget(self, board: str) -> None:
        """Drop the reading of ``board``."""
        with self._lock:
            self._readings.pop(board, None)

    def predecessors(self, board: str) -> bytes | None:
        """Return the value that this rank's first process posted on ``board`` for newcomers. Blocks; raises
        WaitTimeout.
        """
        reading = self.read(board, [self._view.rank], ALWAYS)
        what = f"the coordinator's answer on {board} of this worker's predecessor"
        self._waiting.until(what, lambda: reading.answered or None, interruptible=False)
        self.forget(board)
        return reading.values.get(self._view.rank)

    def take(self, posted: Posted) -> None:
        """Handle an answer of the coordinator."""
        with self._lock:
            reading = self._readings.get(posted.board)
        if reading is None:
            return
        with self._waiting.changed:
            tell = reading.take(posted.values)
            self._waiting.changed.notify_all()
        for each in tell:
            each()

    def wait(
        self, what: str, reading: Reading, ranks: Collection[int], timeout_s: float, wanted: Callable[[], bool]
    ) -> None:
        """Block until all ``ranks`` have posted. Raises WaitTimeout, which names ``what`` and a missing rank, also once
        the reading is no longer ``wanted`` or the job has ended.
        """
        view, deadline = self._view, time.monotonic() + timeout_s
        with self._waiting.changed:
            while missing := reading.missing(ranks):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not wanted() or (view.end is not None and not view.end.step):
                    who = ", ".join(map(str, missing))
                    raise WaitTimeout(f"waited for {what}, but rank {who} has not reported")
                self._waiting.changed.wait(min(left_s, LOOK_S))
