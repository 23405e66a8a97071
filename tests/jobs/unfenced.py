"""recycle_plugin.launch with supervisors that wake up the worker that they should kill: it has to end by itself."""

from __future__ import annotations

import signal
import sys

from recycle_plugin.launch import script_command
from recycle_plugin.runtime import supervisor


def wake_up(self: supervisor.Supervisor) -> None:
    self._worker.send_signal(signal.SIGCONT)


supervisor.Supervisor._fence = wake_up
sys.exit(supervisor.main(script_command(sys.argv[1:])))
