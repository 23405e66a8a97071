"""The same training with torchft: its optimizer wrapper starts the quorum and asks whether to commit."""

from __future__ import annotations

import logging

from common import JOB, RANK, Log, loss_of, make
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

log = Log()
logging.basicConfig(level=logging.WARNING)
model, adam = make()


def load(state: dict) -> None:
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])


store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
    min_replica_size=1,
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    hostname="localhost",
    replica_id=f"replica{RANK}",
)
optimizer = OptimizerWrapper(manager, adam)
log.say("ready")
while True:
    before = manager.current_step()
    optimizer.zero_grad()
    loss = 0.0
    for micro_batch in range(JOB["micro_batches"]):
        part = loss_of(model, before, RANK, micro_batch) / JOB["micro_batches"]
        part.backward()
        loss += part.item()
    works = [manager.allreduce(weight.grad) for weight in model.parameters()]
    for work in works:
        work.wait()
    optimizer.step()
    if manager.current_step() > before:
        more = {"whole": manager.is_participating(), "members": manager.num_participants(), "loss": loss}
        log.say("step", step=manager.current_step(), **more)
