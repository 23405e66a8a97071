"""Data parallel training in plain torch, which survives no loss: the baseline of the others' steps."""

from __future__ import annotations

import torch.distributed as dist
from common import JOB, RANK, Log, loss_of, make

log = Log()
store = dist.FileStore(f"{JOB['folder']}/store", JOB["replicas"])
dist.init_process_group("gloo", store=store, rank=RANK, world_size=JOB["replicas"])
model, optimizer = make()
log.say("ready")
step = 0
while True:
    step += 1
    optimizer.zero_grad()
    for micro_batch in range(JOB["micro_batches"]):
        loss_of(model, step, RANK, micro_batch).div(JOB["micro_batches"]).backward()
    works = [dist.all_reduce(weight.grad, async_op=True) for weight in model.parameters()]
    for work, weight in zip(works, model.parameters(), strict=True):
        work.wait()
        weight.grad /= JOB["replicas"]
    optimizer.step()
    log.say("step", step=step, whole=True)
