"""The same training with this plugin: a replica of the whole model on each worker."""

from __future__ import annotations

import torch
from common import JOB, Log, loss_of, make

from recycle_plugin.adapters.plain import Replicas

log = Log()
model, optimizer = make()


def compute(step: int, replica: int, micro_batch: int) -> torch.Tensor:
    loss = loss_of(model, step, replica, micro_batch)
    loss.backward()
    return loss


settings = {"run_dir": JOB["folder"], "report": False, **JOB["settings"]}
trained = Replicas(model, optimizer, compute, JOB["micro_batches"], settings=settings)
log.say("ready")
while True:
    behind = trained.behind
    loss = trained.step()
    if not behind:
        log.say("step", step=trained.steps, whole=True, loss=loss)
