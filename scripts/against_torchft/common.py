"""Shared parts of the three loops: the model, its emulated compute, and the log of one process.

A micro-batch is a stated time of sleep, then a forward and a backward of a few samples. So gradients, sums and Adam
are real, and two cores are enough for all replicas.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, SAMPLES = 512, 4
NAME = os.environ["RANK"]  # not a number in a process that is no replica
RANK = int(NAME) if NAME.isdecimal() else None
JOB = json.loads(os.environ["AGAINST_TORCHFT"])  # folder, megabytes, step_s, micro_batches, replicas, settings


def age_s() -> float:
    """Return the seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Log:
    """Lines of JSON, a file for each process: its start, its readiness to train, and each step that stayed."""

    def __init__(self) -> None:
        folder = Path(JOB["folder"]) / "log"
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"{NAME}-{os.getpid()}.jsonl").open("w", buffering=1)
        self.say("started", time=time.time() - age_s())

    def say(self, event: str, **more: object) -> None:
        line = {"event": event, "time": time.time(), "rank": RANK, "pid": os.getpid()}
        self._file.write(json.dumps(line | more) + "\n")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the same model everywhere, with ``megabytes`` of weights and moments."""
    torch.manual_seed(0)
    layers = max(1, round(JOB["megabytes"] * 1e6 / 12 / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)


def loss_of(model: nn.Module, step: int, replica: int, micro_batch: int) -> torch.Tensor:
    """Return the loss of one micro-batch, after its stated time."""
    time.sleep(JOB["step_s"] / JOB["micro_batches"])
    generator = torch.Generator().manual_seed((step * 100 + replica) * 100 + micro_batch)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return nn.functional.mse_loss(model(inputs), inputs.flip(1))
