"""Signals with their senders, by signalfd: who has ended a job is what people ask first, and Python's handlers don't
know.

Linux hands a descriptor the signals that every thread blocks.  What a process starts inherits that they are blocked,
and unblocks them where they are meant for it.  Standard library only, and little of it: a guard is to stay small.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import BinaryIO

ENDING = (signal.SIGTERM, signal.SIGINT)
INFO, SET = 128, 128  # bytes of a struct signalfd_siginfo, of a sigset_t
SHOWN = 60  # characters of a command


def opened() -> BinaryIO | None:
    """A file that delivers the signals of ``ENDING`` which every thread blocks; None where a sandbox forbids it.

    Children don't inherit it over an exec.
    """
    wanted = sum(1 << number - 1 for number in ENDING).to_bytes(SET, "little")
    descriptor = ctypes.CDLL(None).signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb", buffering=0) if descriptor >= 0 else None


def heard(signals: BinaryIO) -> str | None:
    """The next signal, as ``SIGTERM from process 12 (bash)``; None where there is none."""
    info = signals.read(INFO)
    if not info:
        return None
    number, _, _, pid = struct.unpack_from("IiiI", info)
    return f"{signal.Signals(number).name} from {_described(pid)}"


def unblock() -> None:
    """Let signals through again, in a process that was started by one that blocks them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


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
