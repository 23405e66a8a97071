"""recycle_plugin.launch with supervisors that wake up the worker that they should kill, RECYCLE_TEST_ASLEEP_S later: it
has to end by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from recycle_plugin.launch import run
from recycle_plugin.runtime.processes import supervisor


def wake_up(self: supervisor.Supervisor) -> None:
    asyncio.get_running_loop().call_later(
        float(os.environ.get("RECYCLE_TEST_ASLEEP_S", 0)), self._worker.send_signal, signal.SIGCONT
    )


supervisor.Supervisor._fence = wake_up
sys.exit(run(sys.argv[1:]))
