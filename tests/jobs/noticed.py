"""Replicas that train, evaluate and save in turns, until the file ``go`` is in their folder: ``noticed.py FOLDER
[LEAVE_ON]``. Each rank says in ``phaseRANK`` what it does, and notes the signals that come to its script.

Compilers take some time here; leave_on is asked often, so that a notice is heard in the phase in which it is given.
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
from recycle_plugin.runtime.control import notice
from tests.jobs import endings

WIDTH, ROWS, RATE, LONG_S = 1000, 2, 1e-3, 0.4
notice.EVERY_S = 0.05


def batch(step: int, replica: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + 1000 * step + 10 * replica + micro_batch)
    return torch.rand(ROWS, WIDTH, generator=generator)


def made() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, WIDTH)


def main() -> None:
    place, leave_on = [*(each for each in sys.argv[1:] if not each.startswith("--local_rank")), None][:2]
    folder, rank = Path(place), os.environ["RANK"]
    phases = os.open(folder / f"phase{rank}", os.O_WRONLY | os.O_CREAT)
    notes = os.open(folder / f"signals{rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def begins(phase: str) -> None:
        os.pwrite(phases, phase.ljust(20).encode(), 0)

    begins("start")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: os.write(notes, b"%d\n" % number))

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
        begins("compile")
        time.sleep(LONG_S)
        begins("first step")
        return graph.forward

    model = made()
    forward = torch.compile(model, backend=compiler)

    def compute(step: int, replica: int, micro_batch: int) -> torch.Tensor:
        loss = forward(batch(step, replica, micro_batch)).square().mean()
        loss.backward()
        return loss

    replicas = Replicas(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
        compute,
        micro_batches=1,
        settings={
            "run_dir": str(folder),
            "report": False,
            "rejoin": "always",
            "leave_on": leave_on,
        },
    )
    told = False
    while not told:
        replicas.step()
        if replicas.behind:
            continue
        begins("evaluation")
        with torch.no_grad():
            for number in range(4):
                recycle_plugin.mean(model(batch(0, int(rank), number)).mean(), None)
                time.sleep(LONG_S / 8)
        begins("save")
        replicas.save(folder / "saved")
        begins("step")
        told = bool(recycle_plugin.mean(torch.tensor([float((folder / "go").exists())]), None))
    endings.leave(folder, {"steps": replicas.steps}, model)


if __name__ == "__main__":
    main()
