"""The process that a launcher starts for a rank: it holds the place, and does nothing that could end it.

If one of the processes that a launcher has started ends badly, the launcher ends all. So the guard is kept small:
standard library, no event loop, no threads, no connections. Its children are

* the *supervisor* (runtime/processes/supervisor.py). It may be killed: the guard forks another, and tells it the rank,
  the worker's process, and what to do;
* the *worker*, which the guard starts at the supervisor's request, and whose exit code it learns as its parent. The
  worker does not notice when supervisors change. After its end there may be a next one;
* for rank 0 the *host*, the coordinator (hosted.Hosted), which outlives all others, and a *standby*
  (standing_by.py). If the host is killed, the standby goes on in its place, and another is started. If no standby is in
  step with the host, the host's end is the job's, and the guard logs it in the run folder;
* if the coordinator asks for it, a standby for a coordinator on another host: if it takes that one's place, it is this
  guard's host.

The supervisor and the host each have a connection to the guard, with one JSON object a line. From the guard to a
supervisor:

* ``{"held": {"rank", "incarnation", "pid", "code", "signal", "guard", "coordinator"}}`` comes first, once the host is
  ready: what the guard has kept of the supervisor before, null for nothing;
* ``{"pid"}`` or ``{"failed"}``: the worker was started, or why not;
* ``{"code"}``: the worker has ended;
* ``{"signal"}``: the guard got this signal, as a text with its sender, so the job is to end.

From a supervisor:

* ``{"rank", "incarnation"}``: the rank, and which of its processes the next worker is, for the next supervisor;
* ``{"start": [module, argument, ...], "environment"}``: start the worker, as that process;
* ``{"kill"}``: send the worker this signal;
* ``{"coordinator"}``: the coordinator's address, for the next supervisor, since it has moved;
* ``{"stand_by"}``: have a process stand by for the coordinator at this address;
* ``{"got"}``: the supervisor got this signal, which is the script's (signal_copies.py).

To the host:

* ``{"lead"}``: a former standby is the host now, for this reason;
* ``{"through"}``: the supervisor has ended by itself, so the host ends once all others are gone;
* ``{"signal"}``: as for a supervisor, if there is none any more.

From the host:

* ``{"leads"}``: a standby for another host is the coordinator now, at this address;
* ``{"ready"}``: the host listens;
* ``{"mirror"}``: the standby that knows all that the host has let others know, 0 for none any more;
* ``{"folder"}``: the run folder is known;
* ``{"closing"}``: all others are gone, and the host ends.

At the end of its connection, each of them knows that the guard is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from recycle_plugin.runtime.processes import signal_info
from recycle_plugin.runtime.processes.signal_copies import Copies
from recycle_plugin.runtime.processes.variables import SERVER_VARIABLE
from recycle_plugin.runtime.system.console import say

Child = Callable[[socket.socket], int]  # runs in its own process, with its end of the connection; returns its exit code
Address = tuple[str, int]

TRIES, WITHIN_S = 5, 60.0  # so many supervisors may be killed within that time
FORK_S = 60.0  # how long the fork server may take to answer
NO_ROOM_S = 1.0  # s between tries if there is no room for another supervisor's process
HOST_S = 150.0  # how long the host may take to end once all others are gone
PIECE = 1 << 16
SUPERVISOR, HOST, STANDBY = "recycle-super", "recycle-host", "recycle-standby"  # process names
DEPOSED = 76  # a host's exit code if a standby on another host goes on


class Pipe:
    """One end of the connection between a guard and its supervisor or host: one JSON object a line."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._half = b""

    def tell(self, *descriptors: int, **message: object) -> None:
        """Send one message, with open ``descriptors``. It is dropped if the other end is gone."""
        try:
            if descriptors:
                socket.send_fds(self.end, [json.dumps(message).encode() + b"\n"], list(descriptors))
            else:
                self.end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the other end is gone, which the reader sees as well

    def heard(self) -> list[dict[Any, Any]] | None:
        """Wait for bytes, and return all messages that have come; None at the end. Received descriptors stay open."""
        try:
            data, descriptors, *_ = socket.recv_fds(self.end, PIECE, 1)
        except OSError:
            data, descriptors = b"", []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        *whole, self._half = (self._half + data).split(b"\n")
        return [json.loads(each) for each in whole] if data else None


class Guard:
    """Holds a rank's place in the job: starts supervisors, the worker, and for rank 0 the host. ``supervise``, ``host``
    (None for other ranks) and ``stand_by`` run in forks. ``stand_by`` gets the coordinator's address (None: the
    launcher's) and whether that is on another host.
    """

    def __init__(
        self,
        supervise: Child,
        host: Child | None = None,
        stand_by: Callable[[socket.socket, Address | None, bool], int] | None = None,
    ) -> None:
        self._supervise, self._host, self._stand_by = supervise, host, stand_by
        self._coordinator: Address | None = None  # its address if it has moved
        self._watched: dict[int, tuple[socket.socket | BinaryIO, Callable[[], None]]] = {}  # by descriptor
        self._poll = select.poll()
        self._supervisor_pid = self._host_pid = 0  # 0 if it does not run
        self._supervisor: Pipe  # of the last fork
        self._hosted: Pipe | None = None
        self._standing_by: tuple[int, Pipe] | None = None  # the standby's process and line
        self._mirror = 0  # the process that is in step with the host
        self._ready = host is None
        self._closing: float | None = None  # since when the host waits for no others
        self._elsewhere = False  # whether a process on another host may go on in the coordinator's place
        self._folder: str | None = None
        self._rank: int | None = None
        self._incarnation = 0  # of the worker, or of the next one
        self._worker: int | None = None  # its process
        self._code: int | None = None  # its exit code
        self._forked: Pipe | None = None  # to the fork server, if that forked it
        self._signal: str | None = None
        self._copies = Copies(self._send_worker)  # of signals to this process, and to the supervisor
        self._killed: list[float] = []  # when supervisors were killed
        self._hosts_killed: list[float] = []  # when hosts and standbys ended
        self._again_at: float | None = None  # when to start another standby, if put off
        self._begin_at: float | None = None  # the same for a supervisor
        self._result: int | None = None

    def hold(self) -> int:
        """Run until the supervisor has ended by itself, and the host too. Return the exit code for the launcher: the
        supervisor's, or if that is 0, the host's, which sees the job's end.
        """
        call_this("recycle-guard")
        wake = self._take_signals()
        self._watch(wake, lambda: self._signalled(wake.recv(PIECE)))
        if (signals := signal_info.opened()) is not None:
            signal_info.block()
            self._watch(signals, lambda: self._came(signal_info.heard(signals)))
        try:
            if self._host is not None:
                self._host_pid, self._hosted = self._first(self._host, self._hear_host, HOST)
                self._have_one_stand_by()
            self._supervisor_pid, self._supervisor = self._first(self._supervise, self._hear_supervisor, SUPERVISOR)
        except OSError as error:
            say(f"error: there was no room for this rank's processes for {WITHIN_S:.0f} s ({error.strerror})")
            return 1
        self._introduce()
        while self._result is None:
            waits = self._copies.wait_s, _left_s(self._again_at), _left_s(self._begin_at)
            self._serve(min((wait_s for wait_s in waits if wait_s is not None), default=None))
            self._copies.settle()
            if _left_s(self._again_at) == 0.0:
                self._again_at = None
                self._have_one_stand_by()
            if _left_s(self._begin_at) == 0.0:
                self._begin()
        self._send_worker(signal.SIGKILL)  # if it still runs, unsupervised
        if self._hosted is not None:
            self._hosted.tell(through=True)
        while self._host_pid and (self._closing is None or self._closing_left_s > 0):
            self._serve(None if self._closing is None else self._closing_left_s)
        self._end_standby()
        if self._host_pid:
            say(f"error: the coordinator's process has not ended within {HOST_S:.0f} s: it is killed")
            os.kill(self._host_pid, signal.SIGKILL)
        return self._result

    @property
    def _closing_left_s(self) -> float:
        assert self._closing is not None, "the host has somebody to wait for"
        return self._closing + HOST_S - time.monotonic()

    def _serve(self, timeout_s: float | None = None) -> None:
        ready = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        for descriptor, watched in [(number, self._watched.get(number)) for number, _ in ready]:
            if watched is not None and self._watched.get(descriptor) is watched:  # the number may be reused by now
                watched[1]()

    # --- children ----------------------------------------------------------------------------------

    def _fork(self, child: Child, hear: Callable[[], None], name: str) -> tuple[int, Pipe]:
        near, far = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:
            near.close()
            far.close()
            raise
        if pid == 0:
            near.close()
            _become(child, far, [own for own, _ in self._watched.values()], name)
        far.close()
        self._watch(near, hear)
        return pid, Pipe(near)

    def _first(self, child: Child, hear: Callable[[], None], name: str) -> tuple[int, Pipe]:
        """Fork a child as :meth:`_fork`, at the start; raises OSError if there is no room for it for WITHIN_S."""
        until = time.monotonic() + WITHIN_S
        while True:
            try:
                return self._fork(child, hear, name)
            except OSError:
                if time.monotonic() >= until:
                    raise
            self._serve(NO_ROOM_S)

    def _begin(self) -> None:
        """Start another supervisor. If there is no room for a process now, try again: the worker trains meanwhile."""
        try:
            self._supervisor_pid, self._supervisor = self._fork(self._supervise, self._hear_supervisor, SUPERVISOR)
        except OSError as error:
            if self._begin_at is None:
                say(f"warning: no other supervisor could be started ({error.strerror}): it is tried again")
            self._begin_at = time.monotonic() + NO_ROOM_S
            return
        self._begin_at = None
        self._introduce()

    def _introduce(self) -> None:
        if self._ready and self._supervisor_pid:
            held = {
                "rank": self._rank,
                "incarnation": self._incarnation,
                "pid": self._worker,
                "code": self._code,
                "signal": self._signal,
                "guard": os.getpid(),
                "coordinator": self._coordinator,
            }
            self._supervisor.tell(held=held)

    def _signalled(self, numbers: bytes) -> None:
        for number in set(numbers) - {signal.SIGCHLD}:
            self._came(signal_info.Heard(number, signal_info.name(number)))
        if (
            self._worker is not None
            and self._forked is None
            and self._code is None
            and (code := _ended(self._worker)) is not None
        ):
            self._worker_ended(code)
        if self._supervisor_pid and (code := _ended(self._supervisor_pid)) is not None:
            self._supervisor_ended(code)
        if self._standing_by is not None and _ended(self._standing_by[0]) is not None:
            self._standby_ended()
        if self._host_pid and (code := _ended(self._host_pid)) is not None:
            self._host_ended(code)

    def _came(self, what: signal_info.Heard | None) -> None:
        """Handle a signal: pass it on, with its sender, if it ends the job; count it if it is the script's."""
        if what is not None and what.number not in signal_info.ENDING:
            self._copies.came(what.number)
        elif what is not None:
            self._signal = what.text
            line = self._supervisor if self._supervisor_pid else self._hosted
            if line is not None:
                line.tell(signal=what.text)

    def _supervisor_ended(self, code: int) -> None:
        """Handle a supervisor's end: after a signal fork another; after an exit, this place is done."""
        while self._supervisor.end.fileno() in self._watched:  # its last messages
            self._hear_supervisor()
        self._supervisor_pid = 0
        now = time.monotonic()
        self._killed = [when for when in self._killed if now - when < WITHIN_S] + [now]
        if code >= 0:
            self._result = code
        elif len(self._killed) > TRIES:
            say(
                f"error: {TRIES + 1} supervisors of one worker were killed within {WITHIN_S:.0f} s, the last by signal "
                f"{-code}: no other is started"
            )
            self._result = 1
        else:
            whose = "a supervisor" if self._rank is None else f"the supervisor of rank {self._rank}"
            say(f"warning: {whose} was killed by signal {-code}: another one goes on with its worker")
            self._begin()

    def _follow(self, mirror: int) -> None:
        """Record which process is in step with the host. Kill a standby that no longer is: it is of no use."""
        if self._mirror and not mirror and self._standing_by is not None:
            os.kill(self._standing_by[0], signal.SIGKILL)
        self._mirror = mirror

    def _end_standby(self) -> None:
        """Kill the standby: it is of no use. Another one is started only for a coordinator elsewhere that asks."""
        self._again_at = None
        if self._standing_by is not None:
            os.kill(self._standing_by[0], signal.SIGKILL)

    def _have_one_stand_by(self, elsewhere: Address | None = None) -> None:
        """Start a standby if there is none: for the coordinator ``elsewhere``, or for this guard's host."""
        stand_by = self._stand_by
        if stand_by is not None and self._result is None and self._standing_by is None:
            address = elsewhere or self._coordinator
            try:
                pid, line = self._fork(
                    lambda end: stand_by(end, address, elsewhere is not None),
                    lambda: self._hear_standby(line),
                    STANDBY,
                )
            except OSError:  # no room for a process; a coordinator elsewhere asks again
                self._again_at = None if elsewhere else time.monotonic() + WITHIN_S
                return
            self._standing_by = pid, line

    def _hear_standby(self, line: Pipe) -> None:
        if self._hosted is line:
            self._hear_host()
        elif (messages := line.heard()) is None:
            self._forget(line.end)
        elif (leads := next((message["leads"] for message in messages if "leads" in message), None)) is not None:
            self._lead(leads, messages)

    def _lead(self, address: list[Any], messages: list[dict[Any, Any]]) -> None:
        """Record that the standby for another host's coordinator has become the coordinator, and this guard's host."""
        assert self._standing_by is not None, "it has said so"
        self._coordinator = address[0], address[1]
        self._host_pid, self._hosted = self._standing_by
        self._standing_by, self._mirror, self._elsewhere = None, 0, False
        self._take_of_host(messages)
        self._have_one_stand_by()

    def _standby_ended(self) -> None:
        """Start another standby, unless that does not help."""
        assert self._standing_by is not None, "it has ended"
        self._forget(self._standing_by[1].end)
        self._standing_by, self._mirror = None, 0
        if self._host_pid and self._is_worth_another():
            self._have_one_stand_by()

    def _is_worth_another(self) -> bool:
        """Return whether to start another standby now: if they end one after the other, only after a while."""
        now = time.monotonic()
        self._hosts_killed = [when for when in self._hosts_killed if now - when < WITHIN_S] + [now]
        if len(self._hosts_killed) > TRIES:
            self._again_at = self._hosts_killed[0] + WITHIN_S
        return self._again_at is None

    def _goes_on(self, how: str) -> bool:
        """Have the standby go on in the host's place, if it is in step with the host."""
        if self._standing_by is None or self._standing_by[0] != self._mirror:
            return False
        self._host_pid, self._hosted = self._standing_by
        self._standing_by, self._mirror = None, 0
        self._hosted.tell(lead=f"the coordinator's process {how}")
        if self._result is not None:
            self._hosted.tell(through=True)
        elif self._is_worth_another():
            self._have_one_stand_by()
        return True

    def _host_ended(self, code: int) -> None:
        assert self._hosted is not None, "it has a line"
        while self._hosted.end.fileno() in self._watched:  # its last messages
            self._hear_host()
        self._host_pid = 0
        self._forget(self._hosted.end)
        self._hosted = None
        if code < 0 and self._goes_on(f"was killed by signal {-code}"):
            return
        if self._result is not None:
            self._result = self._result or max(code, 0)
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self._end_standby()
        if self._elsewhere and code < 0:
            say(f"warning: the coordinator's process {how}; a process on another host may go on in its place")
        elif (self._ready or code < 0) and code != DEPOSED:
            self._tell_folder(f"the coordinator's process {how}; the job can't go on without it")
        if not self._ready and self._supervisor_pid:  # the host has said why; the supervisor waits for it
            self._supervisor.end.shutdown(socket.SHUT_WR)
        elif not self._ready:
            self._result = 1

    def _tell_folder(self, text: str) -> None:
        """Log the job's end in the run folder, to which only the host writes otherwise."""
        say(f"the job ends: {text}")
        if self._folder is not None:
            from recycle_plugin.observability.telemetry import appending  # as little as possible before a job's end

            event = {"time": round(time.time(), 6), "event": "end", "text": f"the job ends: {text}"}
            try:
                with appending(Path(self._folder, "events.jsonl")) as log:
                    log.write(json.dumps(event).encode() + b"\n")
            except OSError as error:
                say(f"warning: the end was not written to the run folder: {error}")

    # --- what they say -----------------------------------------------------------------------------

    def _hear_host(self) -> None:
        assert self._hosted is not None, "it has said something"
        messages = self._hosted.heard()
        if messages is None:
            self._forget(self._hosted.end, close=False)
        self._take_of_host(messages or [])

    def _take_of_host(self, messages: list[dict[Any, Any]]) -> None:
        for message in messages:
            self._folder = message.get("folder", self._folder)
            self._elsewhere = message.get("elsewhere", self._elsewhere)
            self._follow(message.get("mirror", self._mirror))
            if "ready" in message and not self._ready:
                self._ready = True
                self._introduce()
            if "closing" in message:
                self._closing = time.monotonic()

    def _hear_supervisor(self) -> None:
        messages = self._supervisor.heard()
        if messages is None:
            self._forget(self._supervisor.end)
        for message in messages or ():
            if "rank" in message:
                self._next(message["rank"], message["incarnation"])
            if "start" in message:
                self._start(message["start"], message["environment"])
            if "kill" in message:
                self._send_worker(message["kill"])
            if "coordinator" in message:
                self._coordinator = message["coordinator"][0], message["coordinator"][1]
            if "stand_by" in message and not self._host_pid:
                self._have_one_stand_by((message["stand_by"][0], message["stand_by"][1]))
            if "got" in message:
                self._copies.came(message["got"], to_other=True)

    # --- the worker --------------------------------------------------------------------------------

    def _next(self, rank: int, incarnation: int) -> None:
        """Forget a worker that has ended, for the next one."""
        self._rank, self._incarnation = rank, incarnation
        self._worker = self._code = None

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        try:
            if environment.get(SERVER_VARIABLE):
                self._worker = self._forked_elsewhere(command, environment)
            else:
                ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # only Python ignores these
                arguments = [sys.executable, "-u", "-m", *command]
                self._worker = os.posix_spawn(sys.executable, arguments, environment, setsigdef=ignored, setsigmask=[])
        except OSError as error:
            self._supervisor.tell(failed=str(error))
        else:
            self._supervisor.tell(pid=self._worker)

    def _forked_elsewhere(self, command: list[str], environment: dict[str, str]) -> int:
        """Have the fork server start the worker, which lives as long as the connection from here. Return its pid."""
        from recycle_plugin.runtime.processes.spawn import Request, ask, forked_pid

        module, *arguments = command
        request = Request(module, tuple(arguments), environment, os.getcwd())
        connection = ask(environment[SERVER_VARIABLE], request, [1, 2])
        connection.settimeout(FORK_S)
        answer = b""
        while not answer.endswith(b"\n") and (more := connection.recv(1)):  # a byte at a time: none of the next line
            answer += more
        pid = forked_pid(module, answer)
        self._forked = Pipe(connection)
        self._watch(connection, self._hear_server)
        return pid

    def _hear_server(self) -> None:
        """Handle a worker's exit code from the fork server, or the server's end, which is the worker's too."""
        assert self._forked is not None, "it has said something"
        code: list[Any] | None = self._forked.heard()
        self._forget(self._forked.end)
        self._forked = None
        self._worker_ended(code[0] if code else -signal.SIGKILL)

    def _worker_ended(self, code: int) -> None:
        self._code = code
        self._supervisor.tell(code=code)

    def _send_worker(self, number: int) -> None:
        if self._worker is not None and self._code is None:
            with suppress(ProcessLookupError):  # a server's fork that has just ended
                os.kill(self._worker, number)

    # --- descriptors and signals -------------------------------------------------------------------

    def _watch(self, end: socket.socket | BinaryIO, hear: Callable[[], None]) -> None:
        self._watched[end.fileno()] = end, hear
        self._poll.register(end, select.POLLIN)

    def _forget(self, end: socket.socket, close: bool = True) -> None:
        if self._watched.pop(end.fileno(), None) is not None:
            self._poll.unregister(end)
        if close:
            end.close()

    @staticmethod
    def _take_signals() -> socket.socket:
        """Return a socket that delivers the numbers of arriving signals."""
        out, into = socket.socketpair()
        out.setblocking(False)
        into.setblocking(False)
        signal.set_wakeup_fd(into.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *signal_info.HEEDED):
            signal.signal(number, lambda *_, keep=into: None)
        return out


def _become(child: Child, line: socket.socket, others: list[socket.socket | BinaryIO], name: str) -> None:
    """Be a child with this ``name``, in a fork of the guard. Does not return. It ignores signals that end the job until
    it can handle them: the guard has got them too. The script's stay blocked in a supervisor, and are ignored in a
    host.
    """
    code = 1
    try:
        call_this(name)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ignored = signal_info.ENDING if name == SUPERVISOR else signal_info.HEEDED
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
        for end in others:  # the guard's: they would keep its connections open
            end.close()
        code = child(line)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def call_this(name: str) -> None:
    """Set this process's name, as top and pkill show it."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _left_s(at: float | None) -> float | None:
    """Return the seconds until ``at``, by time.monotonic; None without such a time."""
    return None if at is None else max(0.0, at - time.monotonic())


def _ended(pid: int) -> int | None:
    """Return the exit code of a child, negative for a signal; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None
