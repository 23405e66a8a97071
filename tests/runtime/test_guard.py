"""A guard whose children the test plays: what becomes of rank 0's host once the supervisor there has ended."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

import pytest

from recycle_plugin.runtime.processes import guard

NEXT = ("10.0.0.2", 7)  # another host's coordinator


def in_a_process(run: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = run()
        finally:
            os._exit(code)
    return pid


@pytest.fixture
def through(monkeypatch):
    """Starts a guard whose supervisor has ended well, and returns when its host has heard so: (the guard's process,
    what the host hears). The host may take no time to end, once nobody is left.
    """
    monkeypatch.setattr(guard, "HOST_S", 0.0)
    test, host = socket.socketpair()
    started = []

    def start() -> tuple[int, socket.socket]:
        started.append(in_a_process(guard.Guard(lambda line: 0, lambda line: played_host(line, host)).hold))
        assert test.makefile().readline() == "through\n", "the host was told"
        return started[-1], test

    test.settimeout(60)
    yield start
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def played_host(line: socket.socket, test: socket.socket) -> int:
    """Hands on what the guard says, and ends with code 3 after a signal, without a word."""
    end = guard.Pipe(line)
    end.tell(ready=True)
    while (heard := end.heard()) is not None:
        for message in heard:
            test.sendall(f"{message.get('signal', 'through')}\n".encode())
            if "signal" in message:
                return 3
    return 4


def test_the_host_outlives_the_supervisor_as_long_as_others_are_there(through):
    """... and hears of signals that the guard gets, and the guard ends with what the job has ended with."""
    pid, test = through()
    os.kill(pid, signal.SIGTERM)
    assert test.makefile().readline().startswith("SIGTERM")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_dead_coordinator_is_the_jobs_end_unless_a_process_on_another_host_may_go_on(elsewhere, tmp_path):
    held = guard.Guard(listens, lambda line: killed_host(line, str(tmp_path), elsewhere), stays_somewhere)
    log, (read, write) = tmp_path / "events.jsonl", os.pipe()

    def hold() -> int:
        sys.stderr = os.fdopen(write, "w")
        return held.hold()

    pid = in_a_process(hold)
    os.close(write)
    try:
        with open(read) as output:
            said = next(line for line in output if "the coordinator's process was killed by signal 9" in line)
        assert ("may go on in its place" in said) is elsewhere
        until = time.monotonic() + 60
        while not elsewhere and not log.exists() and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert log.exists() is not elsewhere


def test_a_guard_whose_coordinator_was_deposed_gives_the_next_one_a_standby():
    test, other = socket.socketpair()
    test.settimeout(60)

    def stand_by(line: socket.socket, address: guard.Address | None, elsewhere: bool) -> int:
        if elsewhere:
            other.sendall(f"{address}\n".encode())
        return stays(line)

    pid = in_a_process(guard.Guard(asks_for_a_standby, deposed, stand_by).hold)
    try:
        assert test.makefile().readline() == f"{NEXT}\n"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_where_those_that_stand_by_end_in_turn_the_next_one_comes_only_after_a_while(monkeypatch):
    """But it comes: else the coordinator's end would be the job's from then on."""
    within_s = 3.0
    monkeypatch.setattr(guard, "WITHIN_S", within_s)
    test, other = socket.socketpair()
    held = guard.Guard(stays, stays, lambda line, address, elsewhere: stands_by_shortly(other))
    began = time.monotonic()
    pid = in_a_process(held.hold)
    try:
        test.settimeout(60)
        said = test.makefile()
        for _ in range(guard.TRIES + 2):
            assert said.readline() == "stands by\n"
        assert time.monotonic() - began >= within_s, "the last one was put off"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Full:
    """The module os of a host that has no room for the processes of these numbers."""

    def __init__(self, *refused: int) -> None:
        self._refused, self._forks = refused, 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fork(self) -> int:
        self._forks += 1
        if self._forks in self._refused:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return os.fork()


def test_where_there_is_no_room_for_another_supervisor_it_comes_later(monkeypatch):
    """A killed one's worker trains on meanwhile; a guard that ended would end the job."""
    monkeypatch.setattr(guard, "os", Full(2, 3))
    monkeypatch.setattr(guard, "NO_ROOM_S", 0.1)
    test, other = socket.socketpair()
    test.settimeout(60)
    pid = in_a_process(guard.Guard(lambda line: killed_once(line, other)).hold)
    said = test.makefile()
    assert said.readline() == "begun\n"
    test.sendall(b"x")
    assert said.readline() == "begun\n"
    test.sendall(b"y")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize("host", (False, True))
def test_where_there_is_no_room_at_the_start_the_guard_tries_again(monkeypatch, host):
    """Both forks of rank 0's guard; the host, which is there before, is ready meanwhile."""
    monkeypatch.setattr(guard, "os", Full(1, 3, 4) if host else Full(1, 2))
    monkeypatch.setattr(guard, "NO_ROOM_S", 0.1)
    pid = in_a_process(guard.Guard(introduced, ready if host else None).hold)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_where_there_is_no_room_for_long_the_guard_ends_in_one_line(monkeypatch):
    monkeypatch.setattr(guard, "os", Full(*range(1000)))
    monkeypatch.setattr(guard, "NO_ROOM_S", 0.01)
    monkeypatch.setattr(guard, "WITHIN_S", 0.1)
    read, write = os.pipe()

    def hold() -> int:
        sys.stderr = os.fdopen(write, "w")
        code = guard.Guard(introduced).hold()
        sys.stderr.flush()
        return code

    pid = in_a_process(hold)
    os.close(write)
    with open(read) as output:
        (said,) = output.read().splitlines()
    assert "error: there was no room for this rank's processes" in said and os.strerror(errno.EAGAIN) in said
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def introduced(line: socket.socket) -> int:
    """Ends with code 7 once it is told what is held."""
    return 7 if (heard := guard.Pipe(line).heard()) and "held" in heard[0] else 1


def ready(line: socket.socket) -> int:
    end = guard.Pipe(line)
    end.tell(ready=True)
    while (heard := end.heard()) is not None:
        if any("through" in message for message in heard):
            return 0
    return 1


def killed_once(line: socket.socket, test: socket.socket) -> int:
    test.sendall(b"begun\n")
    if test.recv(1) == b"x":
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def asks_for_a_standby(line: socket.socket) -> int:
    """Asks again and again, as the coordinator at NEXT has its supervisor do, until the guard is gone."""
    end = guard.Pipe(line)
    while not select.select([line], [], [], 0.05)[0] or end.heard() is not None:
        end.tell(stand_by=NEXT)
    return 0


def deposed(line: socket.socket) -> int:
    guard.Pipe(line).tell(ready=True)
    return guard.DEPOSED


def stays(line: socket.socket) -> int:
    return 0 if guard.Pipe(line).heard() is None else 1


def listens(line: socket.socket) -> int:
    """Stays until the guard is gone, whatever that tells it: a supervisor that ends would end the guard."""
    end = guard.Pipe(line)
    while end.heard() is not None:
        pass
    return 0


def stays_somewhere(line: socket.socket, address: guard.Address | None, elsewhere: bool) -> int:
    return stays(line)


def killed_host(line: socket.socket, folder: str, elsewhere: bool) -> int:
    """Says where the run folder is, and whether somebody may go on on another host, and is killed."""
    end = guard.Pipe(line)
    end.tell(ready=True, folder=folder, elsewhere=elsewhere)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def stands_by_shortly(test: socket.socket) -> int:
    test.sendall(b"stands by\n")
    return 0
