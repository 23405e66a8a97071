"""What a process sends back over a pipe, once, before it ends."""

from __future__ import annotations

import faulthandler
from multiprocessing.connection import Connection
from typing import Any

RESULT_S = 120.0  # for a whole scenario, on a machine that does other things beside
SHOWN_S = RESULT_S - 10.0  # after which a process that has sent nothing says where it is
DIED = "died"


def say_where_it_hangs() -> None:
    """Have this process write all its stacks to standard error, before whoever waits for its result gives up."""
    faulthandler.dump_traceback_later(SHOWN_S)


def result_of(reading: Connection) -> Any:
    """The value, or DIED where the process has ended without one; there are RESULT_S seconds for that."""
    assert reading.poll(RESULT_S), f"a process has sent nothing, and not ended, for {RESULT_S:.0f} s"
    try:
        return reading.recv()
    except EOFError:
        return DIED
