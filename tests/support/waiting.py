"""Waits for what nobody notifies of, and for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

POLL_S = 0.005


def until(ready: Callable[[], object], what: str, within_s: float = 60.0) -> object:
    deadline = time.monotonic() + within_s
    while not (found := ready()):
        assert time.monotonic() < deadline, f"no {what} within {within_s:.0f} s"
        threading.Event().wait(POLL_S)
    return found


def together(work: Callable[[Any], Any], each: Iterable[Any], within_s: float = 60.0) -> list[Any]:
    given, found = list(each), {}

    def run(number: int) -> None:
        try:
            found[number] = work(given[number]), None
        except BaseException as error:
            found[number] = None, error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for number, thread in enumerate(threads):
        thread.join(within_s)
        assert number in found, f"a thread has not ended within {within_s:.0f} s"
        if (error := found[number][1]) is not None:
            raise error
    return [found[number][0] for number in range(len(given))]
