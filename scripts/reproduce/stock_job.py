"""Shared parts of the peers' jobs: the engine of stock DeepSpeed, the data of each step by its number, a stage's state,
and each process's log of its steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_gpt

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.lab.training.compose import TrainingJob

RANK = train_gpt.RANK
WHO = f"rank{RANK}" if "RANK" in os.environ else "starter"


class StockJob:
    """A job of emulated layers under stock DeepSpeed.  ``start`` makes its engine, once the ranks can meet."""

    def __init__(self, job: TrainingJob) -> None:
        import torch

        from recycle_plugin.runtime.worker.data import DatasetSource

        torch.manual_seed(job.seed + RANK)
        self.job, (self._layers, self._loss, data) = job, train_gpt.emulated(job)
        self._source = DatasetSource(
            data,
            job.topology.replicas,
            DataCursor(job.topology.micro_batches),
            job.micro_batch_size,
            drop_last=True,
            collate=None,
        )

    def start(self) -> None:
        """Make the engine, as train_gpt.py does."""
        import deepspeed
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

        from recycle_plugin.patches import deepspeed_cpu

        deepspeed_cpu.apply()
        deepspeed.init_distributed()
        shape, config = self.job.topology, self.job.deepspeed_config()
        config.pop("recycle", None)
        topology = PipeDataParallelTopology(num_pp=shape.stages, num_dp=shape.replicas)
        model = PipelineModule(layers=self._layers, topology=topology, loss_fn=self._loss, partition_method="uniform")
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def train(self, step: int) -> float:
        """Train ``step`` on its own data, whatever was trained before; return its loss."""
        return self.engine.train_batch(self._batches(step)).item()

    def state(self) -> dict[str, Any]:
        """Return the state of this rank's stage, which the next step changes."""
        return {"module": self.engine.module.state_dict(), "optimizer": self.engine.optimizer.state_dict()}

    def take(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self.engine.module.load_state_dict(state["module"])
        self.engine.optimizer.load_state_dict(state["optimizer"])

    def _batches(self, step: int) -> Iterator[Any]:
        replica = self.engine.grid.get_data_parallel_id()
        return (self._source(step, MicroBatch(replica, each)) for each in range(self.job.topology.micro_batches))


def told(folder: Path, event: str, step: int = 0, **more: Any) -> None:
    """Append an event and its time to this process's file in ``folder``: "rank0.jsonl", or the file of the process that
    starts the ranks.
    """
    with (folder / f"{WHO}.jsonl").open("a") as file:
        file.write(json.dumps({"who": WHO, "event": event, "step": step, "time": time.time(), **more}) + "\n")
