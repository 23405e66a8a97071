"""Starts the processes of a loop without its own launcher, and restarts each that dies after a second.

start.py plain.py              # no process comes back
start.py with_torchft.py 5000  # with torchft's lighthouse, a process with the options of its README, and a
                               # heartbeat timeout in milliseconds (its default: 5000)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

AGAIN_S, LOOK_S = 1.0, 0.02
script = Path(sys.argv[1])
job = json.loads(os.environ["AGAINST_TORCHFT"])
returns = bool(sys.argv[2:])
if returns:
    lighthouse = subprocess.Popen([sys.executable, "lighthouse.py", sys.argv[2]], stdout=subprocess.PIPE, text=True)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.stdout.readline().strip()


def start(rank: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(script)], env=os.environ | {"RANK": str(rank)})


workers = [start(rank) for rank in range(job["replicas"])]
while True:
    for rank, worker in enumerate(workers):
        if worker.poll() is not None:
            if not returns:
                sys.exit(f"replica {rank} has ended")
            time.sleep(AGAIN_S)
            workers[rank] = start(rank)
    time.sleep(LOOK_S)
