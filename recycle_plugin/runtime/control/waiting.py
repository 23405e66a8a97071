"""The one place where a worker waits: every wait has a deadline and a name. Transport, collectives and session announce
their news on one condition. So every wait of the worker (for a tensor, a commit, a collective) wakes at once when the
membership changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, TypeVar

from recycle_plugin.core.messages.activity import WAITS, Awaited
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.errors import CutOff, WaitTimeout
from recycle_plugin.runtime.control.heartbeats import Heartbeats
from recycle_plugin.runtime.control.script import TrainingThread

T = TypeVar("T")
SERVE_S = 0.01  # s between checks for newcomers' requests during a wait


class Waiting:
    """The waits of the worker with this ``view`` of the job, which is read and changed under ``changed``.
    ``timeout_s``: the default deadline. ``advice``: how its error ends. ``cut_off_s``: how long after the end of its
    lease the worker still waits. ``waited_us``: the total time waited so far. ``may_wait()`` raises if this process
    may not wait.
    """

    def __init__(
        self,
        view: ControlView,
        heartbeats: Heartbeats,
        thread: TrainingThread,
        may_wait: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._view, self._heartbeats, self._thread, self._may_wait = view, heartbeats, thread, may_wait
        self.changed = threading.Condition()
        self.timeout_s, self.cut_off_s = timeout_s, 120.0
        self.advice = ", before its script had come to the settings"
        self.waited_us = 0

    def until(
        self,
        what: Awaited,
        ready: Callable[[], T | None],
        interruptible: bool = True,
        timeout_s: float = 0,
    ) -> T:
        """Block until ``ready()`` is not None and return its value.

        Raises :class:`Interrupted` at a membership change if ``interruptible``, and always :class:`JobEnded` at the
        job's end. Raises :class:`WaitTimeout` with ``what`` after ``timeout_s`` (default: the worker's), and
        :class:`CutOff` if the coordinator is no longer heard.
        """
        self._may_wait()
        timeout_s = timeout_s or self.timeout_s
        served: bool | None = False  # a request may have come before, and nothing wakes this wait
        deadline = time.monotonic() + timeout_s
        was_at, began_us = self._heartbeats.turn_to((WAITS, what)), time.monotonic_ns() // 1000
        try:
            while True:
                with self.changed:
                    self._view.check() if interruptible else self._view.check_end()
                    result = ready()
                    if result is not None:
                        return result
                    now, cut_off = time.monotonic(), self._heartbeats.lease_until + self.cut_off_s
                    if now >= min(deadline, cut_off):
                        name = str(what() if callable(what) else what)
                        if cut_off < deadline:
                            self._raise_cut_off(name)
                        raise WaitTimeout(f"waited {timeout_s:.0f} s for {name}{self.advice}")
                    if not served:
                        left = min(deadline, cut_off) - now
                        self.changed.wait(left if served is None else min(left, SERVE_S))
                served = self._thread.serve_newcomers()
        finally:
            self._heartbeats.turn_to(was_at)
            self.waited_us += time.monotonic_ns() // 1000 - began_us

    def _raise_cut_off(self, name: str) -> NoReturn:
        raise CutOff(
            f"{self._view} has heard nothing from the coordinator for {self.cut_off_s:.0f} s, "
            f"so the others may have gone on without it; it stops waiting for {name}"
        )

    def wake(self) -> None:
        """Have whoever waits look again; for any thread."""
        with self.changed:
            self.changed.notify_all()

    def for_lease(self, what: object, interruptible: bool = True) -> None:
        """Return once the lease holds, so that nobody goes on without this worker. To be called before ``what``, which
        others would see. Raises WaitTimeout, or CutOff if the coordinator is no longer heard.
        """
        if not self._heartbeats.has_lease:
            self._heartbeats.beat()
            self.until(
                lambda: f"the coordinator's answer before {what}",
                lambda: self._heartbeats.has_lease or None,
                interruptible,
            )

    def for_commit(self, step: int) -> None:
        """Wait until ``step`` is committed; raises as :meth:`until` does."""
        self.until(f"the commit of step {step}", lambda: self._view.is_committed(step))

    def run(self, what: str, function: Callable[[], T]) -> T:
        """Run a blocking ``function`` in a thread of its own and wait for it as in :meth:`until`; raises its error.
        After an interruption the thread is left behind, and its late result is dropped. The owner of the resource that
        it blocks on has to break it (see runtime.collectives.group).
        """
        outcome: Future[T] = Future()

        def work() -> None:
            try:
                outcome.set_result(function())
            except Exception as error:  # any error goes to the waiting thread
                outcome.set_exception(error)
            self.wake()

        threading.Thread(target=work, name=f"recycle: {what}", daemon=True).start()
        return self.until(what, lambda: outcome if outcome.done() else None).result()
