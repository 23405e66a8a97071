"""Warming up: compile the planner's loops, or load them, at the start, so that no failure waits for that.

Compiled code is cached beside the sources (or where NUMBA_CACHE_DIR says), so only the first process on a machine
compiles. Workers start together: one compiles, the others wait for it and load. If that process is stopped, the others
wait for LOCK_S seconds, and compile themselves.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import IO

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner.bounds import bound
from recycle_plugin.planner.make import plan, prepare, solve
from recycle_plugin.planner.recovery import recover
from recycle_plugin.planner.search import climbed

LOCK_S = 120  # several times what one process needs to compile
AGAIN_S = 0.05


def warm() -> None:
    """Compile or load the planner's loops: some tenths of a second from the cache, half a minute on a machine's very
    first call. Raises nothing but what planning raises: if no lock can be had, every process compiles.
    """
    try:
        lock = open(_lock_file(), "w")
    except OSError:
        return _run()
    with lock:
        _take(lock, time.monotonic() + LOCK_S)
        _run()


def _take(lock: IO[str], until: float) -> None:
    """Take ``lock`` alone, or beside others once the process that has it alone has compiled; without it from
    time.monotonic() ``until`` on, or if its file system has no locks.
    """
    way = fcntl.LOCK_EX
    while True:
        try:
            return fcntl.flock(lock, way | fcntl.LOCK_NB)
        except BlockingIOError:
            way = fcntl.LOCK_SH  # another process compiles; afterwards all load at once
        except OSError:
            return
        if time.monotonic() >= until:
            return
        time.sleep(AGAIN_S)


def _run() -> None:
    view = Topology(2, 2, 2).full().without(Seat(0, 1))
    costs = CostModel.uniform(2, communication=1)
    planned = plan(view, costs, Policy())
    _ = planned.digest
    recover(planned, costs, 1, dict.fromkeys(view.live, frozenset())).program(Seat(0, 0))
    problem = prepare(view, costs, Policy())
    climbed(problem, solve(problem)[0], bound(problem) - 1, 1, 1)


def _lock_file() -> Path:
    where = hashlib.sha256(str(Path(__file__).parent).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"recycle_plugin-{os.getuid()}-{where}.lock"
