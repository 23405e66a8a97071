"""A worker's session with the coordinator. A thread reads the coordinator's messages into the worker's view of the job
(core/worker/control_view.py); the worker waits for changes of that view (runtime/control/waiting.py). Another thread
sends heartbeats (runtime/control/heartbeats.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from recycle_plugin.authentication.handshake import Stranger
from recycle_plugin.authentication.secret import AT, Secret, SecretFile
from recycle_plugin.core.messages.from_coordinator import Fence, Generation, Lease, Posted, StoreAnswer, Welcome
from recycle_plugin.core.messages.from_workers import (
    Hello,
    Leaving,
    Left,
    Note,
    Vanishing,
    WantResult,
)
from recycle_plugin.core.messages.line_end import Tries
from recycle_plugin.core.messages.said import OfWorker
from recycle_plugin.core.vocabulary.deadlines import WORKER_BEAT_S, Deadlines, lease_s, paced_s
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.boards import BoardAccess
from recycle_plugin.runtime.control.connections import ControlWay, connect
from recycle_plugin.runtime.control.framed import Control
from recycle_plugin.runtime.control.heartbeats import Heartbeats
from recycle_plugin.runtime.control.script import ScriptHooks, TrainingThread
from recycle_plugin.runtime.control.store_access import StoreAccess
from recycle_plugin.runtime.control.waiting import Waiting
from recycle_plugin.runtime.system.host import host_name

CONNECT_S = 60.0  # how long the coordinator may take to answer
# how long a worker waits for others before its script has come to the settings: as long as torch's own groups do, since
# a script may prepare its data in one worker meanwhile
EARLY_S = 1800.0
LOOK_S = 0.1  # s between checks and between tries
RESUME_S = 10.0  # the same if another coordinator may have taken its place
SEND_S = 60.0  # how long the coordinator may take no bytes
THROUGH_HOST = "host"  # of the setting device_link
NOT_LAUNCHED = (
    "recycle is enabled but no supervisor runs: launch with `deepspeed … --module recycle_plugin.launch "
    "your_script.py …`, or on one host with `python -m recycle_plugin.launch --workers 4 your_script.py …`"
)
LISTEN_S = 60.0  # how long silence is normal; each wait has its own deadline


class NotWelcomed(RecycleError):
    """The coordinator has not answered a worker's Hello; the message says why."""


class Session:
    """The session of the worker of ``rank`` with the coordinator, over ``control``. If the connection breaks and no
    coordinator goes on with it, the job is over here: the others go on without this worker.

    * ``view``: what this worker knows of the job. ``waiting``: its waits for changes of that and for peers.
    * ``hooks``: the script's. ``thread``: what the training thread is at. ``boards``: what workers post for each other.
    * ``store``: the keys and values of the script's store.
    * ``group_sums``, ``device_link``: the settings. ``configured``: they are known, or the plugin is off.
    * For runtime/collectives/outcomes.py: ``wanted`` is called in the listening thread when another worker asks for a
      result, ``when_adopted`` at each membership. ``follow(group)`` tells a group of membership changes as long as it
      exists.
    * ``when_regrouping`` is called in the listening thread at the first word of a membership that holds at once.
    * ``forked``: this process is not the worker but a fork of it. ``secret``: the job's, also used between workers.
    * ``incarnation``: which process of its rank this was started as. The Welcome has the number that counts.
    * ``ended_early`` is called in a thread of the session if the job fails before its start: the worker may then be
      blocked where no exception gets in. ``given_up`` is called there with the reason if the others go on without this
      worker: nothing that it may still do is wanted.
    """

    def __init__(
        self,
        control: Control,
        rank: int,
        secret: Secret,
        wait_timeout_s: float = EARLY_S,
        ended_early: Callable[[Session], None] | None = None,
        incarnation: int = 0,
        answer_s: float = CONNECT_S,
    ) -> None:
        self._control = control
        self.rank, self.secret, self.host = rank, secret, host_name()
        self._hello = Hello(rank, "worker", os.getpid(), self.host, incarnation)
        control.send(self._hello, SEND_S)
        welcome = control.receive(answer_s)
        if not isinstance(welcome, Welcome):
            raise NotWelcomed(
                f"the coordinator has not welcomed {named(rank)} within {answer_s:.0f} s: "
                f"{control.broken or welcome or 'it says nothing'}"
            )
        self.ranks = welcome.ranks
        self.job_id, self.view = welcome.job_id, ControlView(rank, welcome.incarnation)
        self.view.adopting = self._adopting
        self.hooks, self.thread = ScriptHooks(), TrainingThread()
        self.heartbeats = Heartbeats(self.view, self.send, self._turn)
        self.waiting = Waiting(self.view, self.heartbeats, self.thread, self._refuse_forks, wait_timeout_s)
        self.boards = BoardAccess(self.view, self.send, self.waiting)
        self.store = StoreAccess(self.view, self.send, self.waiting)
        self.group_sums, self.device_link = "warn", THROUGH_HOST
        self.follow: Callable[[Any], None] = lambda group: None
        self.when_adopted: Callable[[], None] = lambda: None
        self.when_regrouping: Callable[[], None] = lambda: None
        self.wanted: Callable[[WantResult], object] = lambda message: None
        self.given_up: Callable[[str], None] | None = None
        self.coordinator_is_gone = False  # then only this worker can tell the user
        self.configured = self.forked = False
        self._closed, self._goodbye = False, 0  # messages sent, including the goodbye
        self._ended_early = ended_early
        self._listening = threading.Thread(target=self._listen, name="recycle-session", daemon=True)
        self._listening.start()

    def configure(self, deadlines: Deadlines, group_sums: str) -> None:
        """Apply settings, which are known once the script has come to them."""
        self.waiting.timeout_s, self.waiting.cut_off_s = deadlines.wait_timeout_s, deadlines.cut_off_s
        self.waiting.advice = "; raise recycle.wait_timeout_s if it may take longer"
        self.group_sums = group_sums
        self.configured = True

    def begin_heartbeats(self, deadlines: Deadlines) -> None:
        """Keep a lease from now on; its end tells that the coordinator is silent, whatever the connection says."""
        self._control.bear_silence(0.0)
        self.heartbeats.start(lease_s(deadlines), paced_s(WORKER_BEAT_S, self.ranks, deadlines))

    @contextmanager
    def _adopting(self) -> Iterator[None]:
        with self.waiting.changed:
            yield
        self.when_adopted()

    @property
    def own_address(self) -> str:
        """This worker's address on the interface that reaches the coordinator."""
        return self._control.here

    @property
    def beside_coordinator(self) -> bool:
        """Whether the coordinator is on this worker's host."""
        there = self._control.there
        return there is None or there[0] == self._control.here or ip_address(there[0]).is_loopback

    # --- talking -----------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        """Send a message, with this worker's incarnation if about the worker. Raises RecycleError in a fork of it."""
        self._refuse_forks()
        if isinstance(message, OfWorker) and message.incarnation != self.view.incarnation:
            message = replace(message, incarnation=self.view.incarnation)
        self._control.send(message, SEND_S)

    def note(self, kind: str, text: str, **details: object) -> None:
        """Report an event to the user, through the coordinator."""
        self.send(Note(self.rank, kind, text, details))

    def note_stranger(self, text: str, address: str) -> None:
        """Report that a stranger from ``address`` was refused."""
        self.note("stranger", text, address=address)

    def ask_to_leave(self, reason: str) -> None:
        """Ask the coordinator for a planned leave, at a commit, for ``reason``."""
        self.send(Leaving(self.rank, reason))

    def ask_to_end(self, reason: str) -> None:
        """Ask the coordinator for the job's planned end, after a step that all reach, for ``reason``."""
        self.send(Leaving(self.rank, reason, all=True))

    def leave(self, code: int = 0, planned: bool = False) -> None:
        """Say goodbye (from_workers.Left): this process's end, with exit code ``code``, is no death."""
        self._say_goodbye(Left(self.rank, code, planned, self.view.begun))

    def vanish(self) -> None:
        """Report that this process ends by os._exit(0) between two steps, as if its script were through."""
        self._say_goodbye(Vanishing(self.rank, self.view.begun))

    def _say_goodbye(self, goodbye: Left | Vanishing) -> None:
        """Send ``goodbye`` and wait until the coordinator has it, also if another process has just taken its place."""
        self.send(goodbye)
        self._goodbye = self._control.sent
        with self.waiting.changed:
            self._closed = True
        deadline = time.monotonic() + RESUME_S
        while not self._control.has_got(self._goodbye, LOOK_S):
            if not self._listening.is_alive() or time.monotonic() > deadline:
                break  # no coordinator goes on

    @property
    def between_two_steps(self) -> bool:
        """Whether the script trains and this thread is in none of its steps; false after the goodbye."""
        mine = self.thread.work is None and self.thread.is_current
        return self.hooks.trains and mine and self.view.end is None and not (self._closed or self.view.outside)

    # --- forks of this process -----------------------------------------------------------------------

    def cut_off(self) -> None:
        """Mark this process as a fork of the worker (runtime/system/forked.py), which must send and await nothing."""
        self.forked, self.waiting.changed = True, threading.Condition()

    def _refuse_forks(self) -> None:
        if self.forked:
            raise RecycleError(
                f"process {os.getpid()} was forked from the worker of {self.view}, and is not that worker: it can't "
                "train, settle or take part in the job's collectives; do that in the script's own process"
            )

    # --- listening ---------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """Return whether the connection stands, after resuming a broken one, perhaps at another coordinator."""
        broken = self._control.broken
        if broken is None:
            return True
        ended = self.view.end is not None and self.view.end.failed
        through = self._closed and self._control.has_got(self._goodbye)
        if broken.unreadable is not None or ended or through or self.forked:
            return False
        stands = self._control.resume(self._hello, RESUME_S) is not None
        self.heartbeats.connected_anew()
        return stands

    def _turn(self, long: bool) -> None:
        """Turn to the standby on another host, if there is one, since the coordinator's host is silent, or the
        coordinator for ``long``.
        """
        self._control.give_up("nothing is heard from the coordinator", only_silent=not long)

    def _listen(self) -> None:
        while (message := self._control.receive(LISTEN_S)) is not None or self._goes_on():
            if message is None:
                continue
            self._leave_if_given_up(message)
            if isinstance(message, Generation) and not message.from_step:
                self.when_regrouping()
            if isinstance(message, Posted):
                self.boards.take(message)
                continue
            if isinstance(message, StoreAnswer):
                self.store.take(message)
                continue
            if isinstance(message, WantResult):
                self.wanted(message)
                continue
            with self.waiting.changed:
                self.heartbeats.heard(message) if isinstance(message, Lease) else self.view.take(message)
                self.waiting.changed.notify_all()
            self._leave_early()
        with self.waiting.changed:
            self._coordinator_gone()
            self.waiting.changed.notify_all()
        self._control.close()
        self._leave_early()

    def _leave_early(self) -> None:
        view = self.view
        if self._ended_early is not None and view.generation is None and view.end is not None and view.end.failed:
            tell, self._ended_early = self._ended_early, None
            tell(self)

    def _leave_if_given_up(self, message: object) -> None:
        if self.given_up is None:
            return
        if isinstance(message, Fence) and message.worker == self.view.worker:
            self.given_up(message.reason)
        elif isinstance(message, Generation) and self._is_without_me(message):
            self.given_up(message.cause)

    def _is_without_me(self, generation: Generation) -> bool:
        """Return whether ``generation`` holds at once and is without this worker, which has not left by itself."""
        outside = not generation.from_step and self.view.worker not in generation.roster.workers
        return outside and not self.view.outside and not self._closed and not self.view.has_left(generation)

    def _coordinator_gone(self) -> None:
        broken = self._control.broken
        assert broken is not None, "the connection to the coordinator has ended"
        nonsense = broken.unreadable
        if not self._closed and (
            self.view.lose_coordinator(f"the coordinator has sent an unreadable message: {nonsense}")
            if nonsense
            else self.view.lose_coordinator()
        ):
            self.coordinator_is_gone = True


def connect_from_environment(
    environment: dict[str, str], ended_early: Callable[[Session], None] | None = None
) -> Session:
    """Return the session of this process, a worker that a supervisor has started. Raises RecycleError if none has,
    NoCredentials, and ConnectionError.
    """
    address = environment.get("RECYCLE_COORDINATOR")
    if not address or AT not in environment:
        raise RecycleError(NOT_LAUNCHED)
    rank, incarnation = int(environment["RANK"]), int(environment.get("RECYCLE_INCARNATION", "0"))
    secret = SecretFile.of_worker(environment).read()
    ways = [ControlWay(_parsed(each), secret) for each in address.split(",")]
    began = time.monotonic()
    tries = Tries(began, CONNECT_S, False, 0.0)
    while True:
        now = time.monotonic()
        way, last = ways[tries.next(now, len(ways) > 1)], now >= tries.until
        try:
            control = connect(way, CONNECT_S if len(ways) == 1 else tries.lasts_s(now))
            answer_s = RESUME_S if tries.goes_elsewhere else CONNECT_S  # a standby may never lead
            made = Session(control, rank, secret, ended_early=ended_early, incarnation=incarnation, answer_s=answer_s)
            _made.append(made)
            return made
        except NotWelcomed:  # the coordinator may have died, and another may take its place
            broken = control.broken
            control.close()
            if not tries.goes_elsewhere and (broken is None or broken.unreadable is not None):
                raise
            if time.monotonic() - began > RESUME_S and (last or len(ways) == 1):
                raise
            time.sleep(LOOK_S)
        except Stranger:
            raise
        except ConnectionError:
            if len(ways) == 1 or last:
                raise


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def of_this_process() -> Session:
    """Return the session that :func:`connect_from_environment` has made in this process; RecycleError without one."""
    if not _made:
        raise RecycleError(NOT_LAUNCHED)
    return _made[-1]


_made: list[Session] = []
