"""A small job whose script notes the signals that come to it, until the file ``go`` is in its folder:
``signalled.py FOLDER SIGNAL…``, of which the script handles those.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import recycle_plugin
from recycle_plugin.adapters.plain import Replicas

folder = Path(sys.argv[1])
notes = (folder / f"signals{os.environ['RANK']}.txt").open("a", buffering=1)
for number in map(int, sys.argv[2:]):
    signal.signal(number, lambda number, frame: notes.write(f"{int(number)}\n"))
model = nn.Linear(1, 1)


def compute(step: int, replica: int, micro_batch: int) -> torch.Tensor:
    loss = model(torch.full((1, 1), 1.0 + (step + replica) % 7)).square().mean()
    loss.backward()
    return loss


replicas = Replicas(
    model,
    torch.optim.SGD(model.parameters(), lr=1e-3),
    compute,
    micro_batches=1,
    settings={"run_dir": str(folder), "report": False},
)
told = False
while not told:
    replicas.step()
    (folder / f"trains{os.environ['RANK']}").touch()
    told = bool(recycle_plugin.mean(torch.tensor([float((folder / "go").exists())]), None))
