"""The signals that a job's own processes handle, with their senders. Users ask first who has ended a job, and Python's
signal handlers don't know the sender.

* ``ENDING`` end the job.
* ``PASSED`` are the script's (such as SIGUSR1, by which SLURM warns of the time limit). They would end any process that
  does not handle them, and mean nothing to the plugin's own processes. Signals that were ignored when this process
  began, as SIGHUP is under nohup, stay ignored.

Linux delivers signals that all threads block through a descriptor (signalfd). Child processes inherit the blocked
signals, and unblock those that they handle. This module uses little of the standard library only, to keep guards small.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import BinaryIO, NamedTuple

ENDING = (signal.SIGTERM, signal.SIGINT)
_OTHERS = (  # faults of the process itself; what can't be caught; what ends no process; what Python ignores
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS,
    signal.SIGKILL, signal.SIGSTOP,
    signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGURG, signal.SIGWINCH,
    signal.SIGPIPE, signal.SIGXFSZ,
)  # fmt: skip
PASSED = tuple(
    number
    for number in sorted(signal.valid_signals() - {*ENDING, *_OTHERS})
    if signal.getsignal(number) != signal.SIG_IGN
)
HEEDED = (*ENDING, *PASSED)
INFO, SET = 128, 128  # bytes of a struct signalfd_siginfo, of a sigset_t
SHOWN = 60  # characters of a command


class Heard(NamedTuple):
    """A signal that has come: its ``number``, and a text such as ``SIGTERM from process 12 (bash)``."""

    number: int
    text: str


def opened() -> BinaryIO | None:
    """Return a file with the ``HEEDED`` signals, which all threads must block; None if a sandbox forbids it."""
    wanted = sum(1 << number - 1 for number in HEEDED).to_bytes(SET, "little")
    descriptor = ctypes.CDLL(None).signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb", buffering=0) if descriptor >= 0 else None


def heard(signals: BinaryIO) -> Heard | None:
    """Return the next signal, None if there is none."""
    info = signals.read(INFO)
    if not info:
        return None
    number, _, _, pid = struct.unpack_from("IiiI", info)
    return Heard(number, f"{name(number)} from {_described(pid)}")


def name(number: int) -> str:
    """Return the name of a signal; few real-time signals have one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def block() -> None:
    """Block the ``HEEDED`` signals in this thread and in what it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)


def unblock() -> None:
    """Unblock the ``HEEDED`` signals, in a process that was started by one that blocks them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)


def _described(pid: int) -> str:
    """Return the process with its command, if it is still there."""
    if not pid:
        return "the terminal, or outside of this container"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        command = "which has gone"
    return f"process {pid} ({command[:SHOWN] + '…' * (len(command) > SHOWN)})"
