"""Signals with their senders, for processes that run an event loop: who has ended a job is what people ask first.

Python's handlers are not told who has sent a signal, and signalfd is.  Linux hands it signals that every thread blocks; where one is handed to a thread of
before, that is an ordinary handler's, and its sender is not known.  What this process starts inherits that they are blocked, and unblocks them
(:func:`unblock`) where they are meant for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

ENDING = (signal.SIGTERM, signal.SIGINT)
INFO, SET = 128, 128  # bytes of a struct signalfd_siginfo, of a sigset_t
SHOWN = 60  # characters of a command


def take(told: Callable[[str], None]) -> Callable[[], None]:
    """From now on ``told("SIGTERM from process 12 (bash)")`` is called in the running loop for each of ``ENDING``.  Returns what takes that back."""
    loop, before = asyncio.get_running_loop(), signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for number in ENDING:
        loop.add_signal_handler(number, told, number.name)
    wanted = sum(1 << number - 1 for number in ENDING).to_bytes(SET, "little")
    descriptor = ctypes.CDLL(None).signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)

    def read() -> None:
        number, _, _, pid = struct.unpack_from("IiiI", os.read(descriptor, INFO))
        told(f"{signal.Signals(number).name} from {_described(pid)}")

    def give_back() -> None:
        if descriptor >= 0:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        for number in ENDING:
            loop.remove_signal_handler(number)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    if descriptor >= 0:
        loop.add_reader(descriptor, read)
    else:  # a sandbox may forbid it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return give_back


def spare_threads() -> None:
    """The running loop's threads get none of these signals: call it before there are any."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, ENDING)))


def unblock() -> None:
    """In a process that somebody who takes them has started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _described(pid: int) -> str:
    """By its command, if it is still there."""
    if not pid:
        return "the terminal, or outside of this container"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        command = "which has gone"
    return f"process {pid} ({command[:SHOWN] + '…' * (len(command) > SHOWN)})"
