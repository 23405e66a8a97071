"""As count.py, in plain torch."""

import torch
from rows import MICRO_BATCHES, SIZE, STAGES, Rows, Samples, job, loss, settings, write

from recycle_plugin.adapters.plain import Pipeline

pipeline = Pipeline(
    [Rows] * STAGES,
    loss,
    lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    Samples(),
    STAGES,
    MICRO_BATCHES,
    micro_batch_size=SIZE,
    settings=settings,
)
for _ in range(job["steps"]):
    pipeline.step()
write(pipeline.module)
