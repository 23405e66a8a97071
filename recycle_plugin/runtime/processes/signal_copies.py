"""Signals that are the script's: each reaches it once, whichever of a job's processes it was sent to.

A signal to a process group, or to all processes of a SLURM step, comes to the worker by itself; one to the process that
the launcher has started alone has to be passed on.  The kernel does not tell one from the other, so two processes that
nobody signals together compare what has come to them: what has come to both was sent to all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from recycle_plugin.runtime.processes.signal_info import HEEDED, PASSED

TOGETHER_S = 1.0  # within which all have it, where somebody sends it to one process after the other


class Copies:
    """The signals that have come to two processes, *one* and the *other*.  ``pass_on`` is called with each that has
    come to one of them alone.
    """

    def __init__(self, pass_on: Callable[[int], None]) -> None:
        self._pass_on = pass_on
        self._open: dict[int, tuple[int, float]] = {}  # by signal: how many more one has than the other, and until when

    def came(self, number: int, to_other: bool = False) -> None:
        """Note that a signal has come."""
        more, until = self._open.pop(number, (0, time.monotonic() + TOGETHER_S))
        if more := more + (-1 if to_other else 1):
            self._open[number] = more, until

    @property
    def wait_s(self) -> float | None:
        """For how many seconds there is nothing to pass on; None where that is until something comes."""
        return max(0.0, min(until for _, until in self._open.values()) - time.monotonic()) if self._open else None

    def settle(self) -> None:
        """Pass on what has come to one process alone."""
        now = time.monotonic()
        for number, (more, until) in list(self._open.items()):
            if until <= now:
                del self._open[number]
                for _ in range(abs(more)):
                    self._pass_on(number)


class Witness:
    """A process that does nothing but note the signals that come to it: its numbers can be read from ``comes``.

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
    """Be the witness.  Does not return."""
    from recycle_plugin.runtime.processes.spawn import die_with_parent

    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
        die_with_parent(parent)
        while True:
            os.write(into, bytes([signal.sigwait(PASSED)]))
    finally:
        os._exit(1)
