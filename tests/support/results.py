"""What a process sends back over a pipe, once, before it ends."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

RESULT_S = 120.0  # for a whole scenario, on a machine that does other things beside
DIED = "died"


def result_of(reading: Connection) -> Any:
    """The value, or DIED where the process has ended without one; there are RESULT_S seconds for that."""
    assert reading.poll(RESULT_S), f"a process has sent nothing, and not ended, for {RESULT_S:.0f} s"
    try:
        return reading.recv()
    except EOFError:
        return DIED
