"""What a worker finds when its launcher has started it, written to FOLDER/rankN.json: ``launched.py FOLDER [wait | exit
RANK CODE | alone [off]]``.

``wait``: until it is ended.  ``exit``: that rank ends with that code, all others wait.  ``alone``: trains by itself, or
with stock DeepSpeed where the plugin is switched ``off``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

started_with = sorted({"deepspeed", "megatron", "torch"} & set(sys.modules))
threads = len(os.listdir("/proc/self/task"))  # the main one, the session's and the heart's

import numpy  # noqa: E402
import torch  # noqa: E402

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR")
folder, *then = sys.argv[1:]
rank = os.environ["RANK"]
record = {
    "pid": os.getpid(),
    "parent": os.getppid(),
    "environment": {name: os.environ[name] for name in NAMES},
    "arguments": then,
    "threads": threads,
    "modules": started_with,
    "numpy": int(numpy.random.randint(2**31)),
    "torch": torch.initial_seed(),
    "random": random.random(),
    "omp": torch.get_num_threads(),
}
whole = Path(folder) / f"rank{rank}.part"
whole.write_text(json.dumps(record))
whole.rename(whole.with_suffix(".json"))
print(f"worker {rank} is there", flush=True)
if then[:2] == ["exit", rank]:
    sys.exit(int(then[2]))
if then[:1] == ["alone"]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if then[1:]:
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "recycle": {"enabled": False}}
        model, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(9):
        loss = model(torch.ones(1, 1)).square().mean()
        model.backward(loss) if then[1:] else loss.backward()
        optimizer.step()
    then = []
while then:
    signal.pause()
