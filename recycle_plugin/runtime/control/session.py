"""A worker's session with the coordinator: its connection, and the one place where a worker waits.

A thread reads the coordinator's messages into plain fields under one condition variable.  The transport announces
arrivals on the same condition, so every wait of the worker (for a tensor, a commit, a collective) wakes at once when
the membership changes, and every wait has a deadline and names what it waited for.  Another thread sends heartbeats
(runtime/control/heartbeats.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

from recycle_plugin.authentication.secret import AT, Secret, SecretFile
from recycle_plugin.core.messages.activity import WAITS
from recycle_plugin.core.messages.from_coordinator import Fence, Generation, Lease, Posted, Welcome
from recycle_plugin.core.messages.from_workers import (
    AHEAD_OF_STEPPED,
    Hello,
    Leaving,
    Left,
    Note,
    Vanishing,
    WantResult,
)
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.errors import CutOff, RecycleError, WaitTimeout
from recycle_plugin.runtime.control.boards import Boards
from recycle_plugin.runtime.control.connections import Control, Way, connect
from recycle_plugin.runtime.control.heartbeats import Heartbeats
from recycle_plugin.runtime.control.script import ScriptHooks, TrainingThread

T = TypeVar("T")
CONNECT_S = 60.0  # how long the coordinator may take to answer
SEND_S = 60.0  # how long it may take nothing of what is said
NOT_LAUNCHED = (
    "recycle is enabled but no supervisor runs: launch with `deepspeed … --module recycle_plugin.launch "
    "your_script.py …`, or on one host with `python -m recycle_plugin.launch --workers 4 your_script.py …`"
)
SERVE_S = 0.01  # between two looks at what newcomers ask for, while somebody waits
LISTEN_S = 60.0  # how long nothing need be heard; whoever waits for something has a deadline of its own


class Session(ControlView):
    """The session of the worker of ``rank`` with the coordinator, over ``control``.

    When the connection breaks, the job is over here: the others go on without this worker.  What the coordinator says
    is read under :attr:`changed`.

    * ``hooks``: what is called at the turns of the training script; ``thread``: what the thread that trains is at.
    * ``group_sums`` is the setting.
    * ``boards``: what workers post for each other.  ``wanted`` is called when another one asks for a result
      (runtime/collectives/outcomes.py), in the thread that listens.
    * ``when_adopted`` is called with each membership (runtime/collectives/outcomes.py).
    * ``newcomer``: the process has come into a job that had started, in the place of a lost one, and runs its script
      from the top.
    * ``forked``: this process is not the worker, but was forked from it.
    * ``incarnation``: which process of its rank this one was started as; the coordinator says which one it is.
    * ``secret`` is the job's, by which workers know each other too.
    * ``ended_early`` is called, in a thread of the session's, when the job fails before its start: the worker may then
      be blocked where no exception gets in.  ``given_up`` is called there with the reason when the others go on without
      this worker: nothing that it might still do is wanted.
    """

    def __init__(
        self,
        control: Control,
        rank: int,
        secret: Secret,
        wait_timeout_s: float = 300.0,
        ended_early: Callable[[Session], None] | None = None,
        incarnation: int = 0,
    ) -> None:
        super().__init__(rank)
        self.secret = secret
        self.host = socket.gethostname()
        self.wait_timeout_s = wait_timeout_s
        self.changed = threading.Condition()
        self.hooks, self.thread = ScriptHooks(), TrainingThread()
        self.cut_off_s = 120.0
        self.group_sums = "warn"
        self.waited_us = 0
        self.when_adopted: Callable[[], None] = lambda: None
        self.heartbeats = Heartbeats(rank, self.send)
        self.boards = Boards(self)
        self.wanted: Callable[[WantResult], object] = lambda message: None
        self.given_up: Callable[[str], None] | None = None
        self.coordinator_is_gone = False  # so nobody but this worker can tell the user
        self.forked = False
        self._closed = False
        self._ended_early = ended_early
        self._control = control
        self.send(Hello(rank, "worker", os.getpid(), self.host, incarnation))
        welcome = control.receive(CONNECT_S)
        if not isinstance(welcome, Welcome):
            raise RecycleError(
                f"the coordinator has not welcomed {named(rank)} within {CONNECT_S:.0f} s: "
                f"{control.broken or welcome or 'it says nothing'}"
            )
        self.job_id, self.incarnation = welcome.job_id, welcome.incarnation
        self.newcomer = self.incarnation > 0
        threading.Thread(target=self._listen, name="recycle-session", daemon=True).start()

    def configure(self, deadlines: Deadlines, group_sums: str) -> None:
        """Take over settings, which are known once the script has come to them."""
        self.wait_timeout_s, self.cut_off_s, self.group_sums = deadlines.wait_timeout_s, deadlines.cut_off_s, group_sums

    @property
    def is_first(self) -> bool:
        """Whether this worker does what one does for all; a newcomer never before it is a member."""
        return not self.outside and super().is_first

    @property
    def own_address(self) -> str:
        """This worker's address on the interface that reaches the coordinator."""
        return self._control.here

    # --- talking -----------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        """Send a message to the coordinator; what a worker says of itself is stamped with this worker's incarnation.

        Raises RecycleError in a fork of the worker.
        """
        self._refuse_forks()
        if isinstance(message, OfWorker) and message.incarnation != self.incarnation:
            message = replace(message, incarnation=self.incarnation)
        self._control.send(message, SEND_S, more=isinstance(message, AHEAD_OF_STEPPED))

    def note(self, kind: str, text: str, **details: object) -> None:
        """Say something to the user, through the coordinator."""
        self.send(Note(self.rank, kind, text, details))

    def note_stranger(self, text: str, address: str) -> None:
        """Say that somebody was refused who has come from ``address`` and does not belong to the job."""
        self.note("stranger", text, address=address)

    def ask_to_leave(self, reason: str) -> None:
        """Ask the coordinator for a planned leave, at a commit, for ``reason``."""
        self.send(Leaving(self.rank, reason))

    def ask_to_end(self, reason: str) -> None:
        """Ask the coordinator for the job's planned end, after a step that all come to, for ``reason``."""
        self.send(Leaving(self.rank, reason, all=True))

    def leave(self, code: int = 0, planned: bool = False) -> None:
        """Say goodbye (from_workers.Left), so that the end of this process, with exit code ``code``, is not
        taken for a death.
        """
        self.send(Left(self.rank, code, planned, self.heartbeats.step))
        with self.changed:
            self._closed = True

    def vanish(self) -> None:
        """Say that this process ends without a goodbye, between two steps, as if its script were through."""
        self.send(Vanishing(self.rank, self.heartbeats.step))
        with self.changed:
            self._closed = True

    @property
    def between_two_steps(self) -> bool:
        """Whether the script trains, and this thread is in none of its steps; false once goodbye is said."""
        mine = self.thread.work is None and self.thread.is_current
        return self.hooks.trains and mine and self.end is None and not (self._closed or self.outside)

    # --- forks of this process -----------------------------------------------------------------------

    def cut_off(self) -> None:
        """Mark this process as a fork of the worker (runtime/system/forked.py): nothing is said, awaited or waited
        for in the worker's name.
        """
        self.forked, self.changed = True, threading.Condition()

    def _refuse_forks(self) -> None:
        if self.forked:
            raise RecycleError(
                f"process {os.getpid()} was forked from the worker of {self}, and is not that worker: it can't train, "
                "settle or take part in the job's collectives; do that in the script's own process"
            )

    # --- listening ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (message := self._control.receive(LISTEN_S)) is not None or self._control.broken is None:
            if message is None:
                continue
            self._leave_if_given_up(message)
            if isinstance(message, Posted):
                self.boards.take(message)
                continue
            if isinstance(message, WantResult):
                self.wanted(message)
                continue
            with self.changed:
                self.heartbeats.heard(message) if isinstance(message, Lease) else self.take(message)
                self.changed.notify_all()
            self._leave_early()
        with self.changed:
            self._coordinator_gone()
            self.changed.notify_all()
        self._control.close()
        self._leave_early()

    def _leave_early(self) -> None:
        if self._ended_early is not None and self.generation is None and self.end is not None and self.end.failed:
            tell, self._ended_early = self._ended_early, None
            tell(self)

    def _leave_if_given_up(self, message: object) -> None:
        if self.given_up is None:
            return
        if isinstance(message, Fence) and message.worker == self.worker:
            self.given_up(message.reason)
        elif isinstance(message, Generation) and self._is_without_me(message):
            self.given_up(message.cause)

    def _is_without_me(self, generation: Generation) -> bool:
        """It holds at once, and this worker has not left by itself."""
        outside = not generation.from_step and self.worker not in generation.roster.workers
        return outside and not self.outside and not self._closed and not self.has_left(generation)

    def _coordinator_gone(self) -> None:
        broken = self._control.broken
        assert broken is not None, "the connection to the coordinator has ended"
        nonsense = broken.unreadable
        if not self._closed and (
            self.lose_coordinator(f"the coordinator can't be understood: {nonsense}")
            if nonsense
            else self.lose_coordinator()
        ):
            self.coordinator_is_gone = True

    # --- waiting -----------------------------------------------------------------------------------

    def wait(
        self,
        what: Callable[[], str] | str,
        ready: Callable[[], T | None],
        interruptible: bool = True,
        timeout_s: float = 0,
    ) -> T:
        """Block until ``ready()`` is not None and return it.

        ``interruptible``: a membership change raises :class:`Interrupted`; the end of the job always
        raises :class:`JobEnded`.  Past the deadline (``timeout_s``, by default ``wait_timeout_s``):
        :class:`WaitTimeout` with ``what``.  :class:`CutOff` when the coordinator is not heard any more.
        """
        self._refuse_forks()
        timeout_s = timeout_s or self.wait_timeout_s
        served: bool | None = False  # what a newcomer waits for may be there already, and nothing comes then
        deadline = time.monotonic() + timeout_s
        with self.heartbeats.at(WAITS, what), self._counted():
            while True:
                with self.changed:
                    self.check_end()
                    if interruptible:
                        self.check()
                    result = ready()
                    if result is not None:
                        return result
                    now, cut_off = time.monotonic(), self.heartbeats.lease_until + self.cut_off_s
                    if now >= min(deadline, cut_off):
                        name = what if isinstance(what, str) else what()
                        if cut_off < deadline:
                            self._raise_cut_off(name)
                        raise WaitTimeout(
                            f"waited {timeout_s:.0f} s for {name}; raise recycle.wait_timeout_s if it may take longer"
                        )
                    if not served:
                        left = min(deadline, cut_off) - now
                        self.changed.wait(left if served is None else min(left, SERVE_S))
                served = self.thread.serve_newcomers()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the time inside of this context as waited."""
        began_us = time.monotonic_ns() // 1000
        try:
            yield
        finally:
            self.waited_us += time.monotonic_ns() // 1000 - began_us

    def await_lease(self, what: object, interruptible: bool = True) -> None:
        """Return once the lease holds, so that nobody goes on without this worker; call it before ``what``, which
        others would see.

        Raises WaitTimeout, or CutOff where the coordinator is not heard any more.
        """
        if not self.heartbeats.has_lease:
            self.heartbeats.beat()
            self.wait(
                lambda: f"the coordinator's word before {what}",
                lambda: self.heartbeats.has_lease or None,
                interruptible,
            )

    def _raise_cut_off(self, name: str) -> None:
        raise CutOff(
            f"{self} has heard nothing of the coordinator for {self.cut_off_s:.0f} s, "
            f"so the others may have gone on without it; it stops waiting for {name}"
        )

    def wait_committed(self, step: int, interruptible: bool = True) -> None:
        """Wait until ``step`` is committed; raises as :meth:`wait` does."""
        self.wait(f"the commit of step {step}", lambda: self.is_committed(step), interruptible)

    def rewind(self, step: int) -> None:
        """Go back to ``step`` as the last one that was begun, here and in heartbeats."""
        super().rewind(step)
        self.heartbeats.step = step

    def adopt(self, generation: Generation) -> None:
        """Take over a new membership, and tell the collectives of it."""
        with self.changed:
            super().adopt(generation)
        self.when_adopted()

    def run_interruptibly(self, what: str, function: Callable[[], T]) -> T:
        """Run a blocking ``function`` in a thread of its own and wait for it as for anything else; raises its error.

        After an interruption the thread is left behind: whoever owns the blocked resource has to break it (see
        runtime.collectives.group).  Its late result is dropped.
        """
        outcome: list[Callable[[], T]] = []  # returns what ``function`` did, or raises it

        def work() -> None:
            try:
                result: Callable[[], T] = partial(_returned, function())
            except Exception as error:  # handed to the waiting thread, whatever it is
                result = partial(_raised, error)
            with self.changed:
                outcome.append(result)
                self.changed.notify_all()

        threading.Thread(target=work, name=f"recycle: {what}", daemon=True).start()
        return self.wait(what, lambda: outcome[0] if outcome else None)()


def _returned(value: T) -> T:
    return value


def _raised(error: Exception) -> NoReturn:
    raise error


def connect_from_environment(
    environment: dict[str, str], ended_early: Callable[[Session], None] | None = None
) -> Session:
    """The session of this process, a worker that a supervisor has started.  Raises RecycleError if none has,
    NoCredentials, and ConnectionError.
    """
    address = environment.get("RECYCLE_COORDINATOR")
    if not address or AT not in environment:
        raise RecycleError(NOT_LAUNCHED)
    host, _, port = address.rpartition(":")
    rank, incarnation = int(environment["RANK"]), int(environment.get("RECYCLE_INCARNATION", "0"))
    secret = SecretFile.of_worker(environment).read()
    control = connect(Way((host, int(port)), secret), CONNECT_S)
    _made.append(Session(control, rank, secret, ended_early=ended_early, incarnation=incarnation))
    return _made[-1]


def of_this_process() -> Session:
    """The session that :func:`connect_from_environment` has made in this process; RecycleError if it has not."""
    if not _made:
        raise RecycleError(NOT_LAUNCHED)
    return _made[-1]


_made: list[Session] = []
