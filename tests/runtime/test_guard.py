"""A guard whose children the test plays: what becomes of rank 0's host once the supervisor there has ended."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import pytest

from recycle_plugin.runtime.processes import guard


def in_a_process(run: Callable[[], int]) -> int:
    """Its process."""
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
