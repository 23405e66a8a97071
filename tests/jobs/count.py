"""Counts by the weights how often each sample was used: on every stage an embedding with one row per sample.

The loss is the sum of the rows, the optimizer SGD with learning rate 1, and every sample belongs to one
micro-batch of one step.  Row s of the embeddings ends at -count(s) / (replicas × micro-batches), exactly,
since both are powers of two.  Each rank writes its rows (rows.py).
"""

from __future__ import annotations

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from rows import MICRO_BATCHES, REPLICAS, SIZE, STAGES, Rows, Samples, job, loss, settings, write

deepspeed.init_distributed()
model = PipelineModule(
    [LayerSpec(Rows) for _ in range(STAGES)], topology=PipeDataParallelTopology(STAGES, REPLICAS), loss_fn=loss
)
config = {
    "train_micro_batch_size_per_gpu": SIZE,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "steps_per_print": 10**9,
    "recycle": {"enabled": True} | settings,
}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config, training_data=Samples()
)
for _ in range(job["steps"]):
    engine.train_batch()
write(engine.module)
