"""The losses of the same training in one process, without replicas and without emulated time, to a file.

reference.py STEPS FIRST_STEP FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common import JOB, loss_of, make

JOB["step_s"] = 0.0
steps, first, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
model, optimizer = make()
losses = []  # of a step, by replica
for step in range(first, first + steps):
    optimizer.zero_grad()
    losses.append([])
    for replica in range(JOB["replicas"]):
        of_batch = [loss_of(model, step, replica, each) / JOB["micro_batches"] for each in range(JOB["micro_batches"])]
        sum(of_batch).div(JOB["replicas"]).backward()
        losses[-1].append(float(sum(of_batch)))
    optimizer.step()
path.write_text(json.dumps(losses))
