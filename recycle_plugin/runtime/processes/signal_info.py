"""The signals that a job's own processes heed, and who has sent them: who has ended a job is what people ask first, and
Python's handlers don't know.

* ``ENDING`` end the job.
* ``PASSED`` are the script's (SIGUSR1, say, by which SLURM warns of the time limit).  They would end any process that
  does not handle them, and mean nothing to the plugin's own processes.  Those that were ignored when this process
  began, as SIGHUP is under nohup, stay ignored.

Linux hands a descriptor (signalfd) the signals that every thread blocks.  What a process starts inherits that they are
blocked, and unblocks them where they are meant for it.  Standard library only, and little of it: a guard is to stay
small.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import BinaryIO, NamedTuple

ENDING = (signal.SIGTERM, signal.SIGINT)
_OTHERS = (  # a fault of the process itself; what nobody can catch; what ends no process; what Python ignores
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
    """A signal that has come: its ``number``, and in words, as ``SIGTERM from process 12 (bash)``."""

    number: int
    text: str


def opened() -> BinaryIO | None:
    """A file that delivers the signals of ``HEEDED`` which every thread blocks; None where a sandbox forbids it.

    Children don't inherit it over an exec.
    """
    wanted = sum(1 << number - 1 for number in HEEDED).to_bytes(SET, "little")
    descriptor = ctypes.CDLL(None).signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb", buffering=0) if descriptor >= 0 else None


def heard(signals: BinaryIO) -> Heard | None:
    """The next signal; None where there is none."""
    info = signals.read(INFO)
    if not info:
        return None
    number, _, _, pid = struct.unpack_from("IiiI", info)
    return Heard(number, f"{name(number)} from {_described(pid)}")


def name(number: int) -> str:
    """The name of a signal; real-time ones have few."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def block() -> None:
    """Keep signals back from this thread, and from what it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)


def unblock() -> None:
    """Let signals through again, in a process that was started by one that blocks them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)


def _described(pid: int) -> str:
    """By its command, if it is still there."""
    if not pid:
        return "the terminal, or outside of this container"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        command = "which has gone"
    return f"process {pid} ({command[:SHOWN] + '…' * (len(command) > SHOWN)})"
