"""A small job whose script notes the signals that come to it, until the file ``go`` is in its folder:
``signalled.py FOLDER SIGNAL…``, of which the script handles those.

RECYCLE_TEST_COMPILES: the rank that compiles its model in the first step, until the file ``compiled`` is there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import recycle_plugin
from recycle_plugin.adapters.plain import Replicas

folder = Path(sys.argv[1])
notes = os.open(folder / f"signals{os.environ['RANK']}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in map(int, sys.argv[2:]):  # os.write: one handler may interrupt another, which a buffered file refuses
    signal.signal(number, lambda number, frame: os.write(notes, b"%d\n" % number))
model = nn.Linear(1, 1)
forward = model
if os.environ.get("RECYCLE_TEST_COMPILES") == os.environ["RANK"]:

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
        (folder / "compiles").touch()
        while not (folder / "compiled").exists():
            time.sleep(0.01)
        return graph.forward

    forward = torch.compile(model, backend=compiler)


def compute(step: int, replica: int, micro_batch: int) -> torch.Tensor:
    loss = forward(torch.full((1, 1), 1.0 + (step + replica) % 7)).square().mean()
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
