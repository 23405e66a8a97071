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
    """Call ``told("SIGTERM from process 12 (bash)")`` in the running loop for each signal of ``ENDING`` from now on."""
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
    """Keep these signals from the running loop's threads; call it before there are any."""
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, ENDING))
    )
