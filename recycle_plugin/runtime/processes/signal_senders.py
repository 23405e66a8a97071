"""Signals with their senders (runtime/processes/signal_info.py), for processes that run an event loop. A signal that
the kernel delivers to an older thread reaches an ordinary handler, and its sender is not known.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from recycle_plugin.runtime.processes.signal_info import ENDING, HEEDED, Heard, heard, name, opened


def take(told: Callable[[str], None], passed: Callable[[int], None]) -> None:
    """From now on call, in the running loop, ``told("SIGTERM from process 12 (bash)")`` for each signal that ends the
    job, and ``passed(number)`` for each that is the script's.
    """

    def came(what: Heard) -> None:
        told(what.text) if what.number in ENDING else passed(what.number)

    loop, before = asyncio.get_running_loop(), signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    for number in HEEDED:
        loop.add_signal_handler(number, partial(came, Heard(number, name(number))))
    if (signals := opened()) is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before - set(HEEDED))
        return

    def read() -> None:
        if (what := heard(signals)) is not None:
            came(what)

    loop.add_reader(signals, read)


def spare_threads() -> None:
    """Block these signals in the running loop's threads. To be called before there are any."""
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, HEEDED))
    )
