"""Signals with their senders (runtime/processes/signal_info.py) for processes that run an event loop.

Where a signal is handed to a thread of before, that is an ordinary handler's, and its sender is not known.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from recycle_plugin.runtime.processes.signal_info import ENDING, heard, opened


def take(told: Callable[[str], None]) -> None:
    """From now on ``told("SIGTERM from process 12 (bash)")`` is called in the running loop for each of ``ENDING``, as
    long as that runs.
    """
    loop, before = asyncio.get_running_loop(), signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for number in ENDING:
        loop.add_signal_handler(number, told, number.name)
    if (signals := opened()) is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return

    def read() -> None:
        if (what := heard(signals)) is not None:
            told(what)

    loop.add_reader(signals, read)


def spare_threads() -> None:
    """The running loop's threads get none of these signals: call it before there are any."""
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, ENDING))
    )
