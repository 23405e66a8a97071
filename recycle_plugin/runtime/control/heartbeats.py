"""A worker's heartbeats: they tell the coordinator what the worker is at, and keep its lease.

A thread sends them, so that long code of the script is not taken for a death
(core/coordinator/facts/failure_detector.py). Each answer extends the lease: until its end the others don't go on
without this worker. A process that was stopped or cut off finds its lease expired when it goes on, and asks again
before it does anything that others could see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, Activity, At
from recycle_plugin.core.messages.from_coordinator import Lease
from recycle_plugin.core.messages.from_workers import Heartbeat
from recycle_plugin.core.worker.control_view import ControlView

SCRIPT = "the training script"
UNKNOWN = "what has just changed"
ANSWER_S = 1.0  # s that an answer may be late before the coordinator counts as silent, if its host is not


class Heartbeats:
    """The heartbeats of the worker with this ``view`` of the job. Only the main thread reports what it is at.

    ``done``: how many instructions the worker has finished. ``lease_until``: the end of the lease in seconds of
    time.monotonic, infinite before :meth:`start`. ``silent(long)`` is called, in a thread, if the coordinator does
    not answer: at the lease's end, and with ``long`` again and again from ANSWER_S later on.
    """

    def __init__(
        self, view: ControlView, send: Callable[[object], None], silent: Callable[[bool], object] = lambda long: None
    ) -> None:
        self._view, self._send, self._silent = view, send, silent
        self._at: tuple[At, object] = (ELSEWHERE, SCRIPT)
        self._main = threading.main_thread().ident
        self.done = 0
        self._number = 0
        self._said_to_compute = False
        self._sent: dict[int, float] = {}
        self._lease_s = self._connected = 0.0
        self.lease_until = float("inf")
        self._beating, self._lock = threading.Lock(), threading.Lock()

    def start(self, lease_s: float, every_s: float) -> None:
        """Send heartbeats from now on, at least every ``every_s``. ``lease_s``: the coordinator's shortest lease."""
        self._lease_s, self.lease_until = lease_s, time.monotonic() + lease_s
        threading.Thread(
            target=self._beat_on, args=(min(every_s, lease_s / 4),), name="recycle: heart", daemon=True
        ).start()

    # --- what the worker is at ---------------------------------------------------------------------

    @contextmanager
    def at(self, at: At, what: object) -> Iterator[None]:
        """Report that the main thread is at ``what`` inside this context. ``what``, or the
        result of calling it, becomes a text only when it is sent, in another thread, unless it is an Activity or
        an instruction.
        """
        before = self.turn_to((at, what))
        try:
            yield
        finally:
            self.turn_to(before)

    def turn_to(self, at: tuple[At, object]) -> tuple[At, object]:
        """Record the main thread's activity (see :meth:`at`); return the one before. The end of computing is sent at
        once: the next activity may hold the interpreter's lock, and then no heartbeat gets out.
        """
        before = self._at
        if threading.get_ident() != self._main:
            return before
        self._at = at
        if self._said_to_compute:
            self.beat()
        return before

    # --- the coordinator's word ----------------------------------------------------------------------

    @property
    def has_lease(self) -> bool:
        return time.monotonic() < self.lease_until

    def beat(self) -> None:
        """Send one heartbeat now."""
        with self._beating:  # they go out in the order of their numbers
            self._said_to_compute = True  # for now: if turn_to() comes meanwhile, it sends another one
            at, what = self._at
            self._said_to_compute = at == COMPUTES
            self._number += 1
            with self._lock:
                self._sent[self._number] = time.monotonic()
            doing = _doing(at, what)
            self._send(Heartbeat(self._view.rank, self._number, self.done, doing, self._view.begun))

    def heard(self, answer: Lease) -> None:
        """Extend the lease by the coordinator's answer, counted from when the heartbeat was sent. A repeated answer, or
        one older than the last, changes nothing.
        """
        with self._lock:
            if (sent := self._sent.get(answer.number)) is None:
                return
            self._sent = {number: when for number, when in self._sent.items() if number > answer.number}
            self.lease_until = sent + answer.for_s

    def connected_anew(self) -> None:
        """Give the coordinator behind a new connection as much time to answer as at the start."""
        self._connected = time.monotonic()

    def _beat_on(self, every_s: float) -> None:
        while True:
            self.beat()
            again = time.monotonic() + every_s
            while (now := time.monotonic()) < again:
                due = self._answer_due
                time.sleep(min(at for at in (due, due + ANSWER_S, again) if at > now) - now)
                if (late_s := time.monotonic() - self._answer_due) > 0.0:
                    self._silent(late_s > ANSWER_S)

    @property
    def _answer_due(self) -> float:
        return max(self.lease_until, self._connected + self._lease_s)


def _doing(at: At, what: object) -> Activity:
    """Return the activity to send."""
    try:
        return Activity.of(at, what)
    except Exception:  # the main thread has gone on meanwhile; without a heartbeat the worker would be given up
        return Activity(at, UNKNOWN)
