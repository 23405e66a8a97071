"""Signals for the script: each reaches it once, whichever process of the job it was sent to.

A signal to a process group, or to all processes of a SLURM step, reaches the worker by itself. A signal to only the
process that the launcher has started must be passed on. The kernel does not tell the two apart. So two processes that
nobody signals together compare what has come: a signal that reached both was sent to all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from recycle_plugin.runtime.processes.signal_info import HEEDED, PASSED

TOGETHER_S = 1.0  # within which all get it if it is sent to one after the other


class Copies:
    """The signals that two processes, *one* and the *other*, got. ``pass_on`` gets those that only one got."""

    def __init__(self, pass_on: Callable[[int], None]) -> None:
        self._pass_on = pass_on
        self._open: dict[int, tuple[int, float]] = {}  # by signal: how many more *one* has, and the deadline

    def came(self, number: int, to_other: bool = False) -> None:
        """Record that a signal has come."""
        more, until = self._open.pop(number, (0, time.monotonic() + TOGETHER_S))
        if more := more + (-1 if to_other else 1):
            self._open[number] = more, until

    @property
    def wait_s(self) -> float | None:
        """Seconds until a signal may be due to be passed on; None if none is open."""
        return max(0.0, min(until for _, until in self._open.values()) - time.monotonic()) if self._open else None

    def settle(self) -> None:
        """Pass on the signals that have come to only one process."""
        now = time.monotonic()
        for number, (more, until) in list(self._open.items()):
            if until <= now:
                del self._open[number]
                for _ in range(abs(more)):
                    self._pass_on(number)


class Witness:
    """A process that only reports the signals that it gets: their numbers, one byte each, can be read from ``comes``.
    To be made before there are threads.
    """

    def __init__(self) -> None:
        self.comes, into = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _attend(into, parent)
        os.close(into)
        os.set_blocking(self.comes, False)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self.comes)


def _attend(into: int, parent: int) -> None:
    """Run the witness process; does not return."""
    from recycle_plugin.runtime.processes.spawn import die_with_parent

    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
        die_with_parent(parent)
        while True:
            os.write(into, bytes([signal.sigwait(PASSED)]))
    finally:
        os._exit(1)
