"""torchft's lighthouse, with the options of its README: prints its address, and runs until it is killed."""

from __future__ import annotations

import os
import signal
import sys

os.environ["RANK"] = "lighthouse"
from common import Log
from torchft.coordination import LighthouseServer

lighthouse = LighthouseServer(
    "[::]:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100, heartbeat_timeout_ms=int(sys.argv[1])
)
Log().say("lighthouse")
print(lighthouse.address(), flush=True)
signal.pause()
