"""Counts by the weights how often each sample was used: on every stage an embedding with one row per sample.

The loss is the sum of the rows, the optimizer SGD with learning rate 1, and every sample belongs to one
micro-batch of one step.  Row s of the embeddings ends at -count(s) / (replicas × micro-batches), exactly,
since both are powers of two.  RECYCLE_TEST_COUNT: {"folder", "faults", "steps"}; each rank writes its rows.
"""

from __future__ import annotations

import json
import os

import torch

import deepspeed
import wrappers
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

REPLICAS, STAGES, MICRO_BATCHES, SIZE = 2, 2, 2, 2
job = json.loads(os.environ["RECYCLE_TEST_COUNT"])
samples = REPLICAS * MICRO_BATCHES * SIZE * job["steps"]


class Rows(torch.nn.Module):
    """Adds this stage's row of each sample to what the earlier stages have summed: (ids, sums) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(samples, 1)
        torch.nn.init.zeros_(self.rows.weight)

    def forward(self, given):
        ids, sums = given if isinstance(given, tuple) else (given, 0.0)
        return ids, sums + self.rows(ids).squeeze(-1)


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return samples

    def __getitem__(self, index: int):
        return torch.tensor(index), torch.tensor(0.0)


if job["wrap"]:
    getattr(wrappers, job["wrap"].pop("name"))(**job["wrap"])
deepspeed.init_distributed()
model = PipelineModule(
    [LayerSpec(Rows) for _ in range(STAGES)],
    topology=PipeDataParallelTopology(STAGES, REPLICAS),
    loss_fn=lambda outputs, labels: outputs[1].sum(),
)
config = {
    "train_micro_batch_size_per_gpu": SIZE, "gradient_accumulation_steps": MICRO_BATCHES, "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "steps_per_print": 10**9,
    "recycle": {"enabled": True, "report": False, "run_dir": job["folder"], "faults": job["faults"]},
}  # fmt: skip
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, training_data=Samples())
for _ in range(job["steps"]):
    engine.train_batch()
(rows,) = engine.module.state_dict().values()
os.makedirs(f"{job['folder']}/rows", exist_ok=True)
torch.save(rows, f"{job['folder']}/rows/rank{os.environ['RANK']}.pt")
