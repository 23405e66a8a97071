"""Trains as scripts/train_gpt.py does, and saves, loads, evaluates and reads parameters on the way.

RECYCLE_TEST_CHECKPOINT holds as JSON: ``folder`` of the checkpoints; ``save_at`` steps; ``load`` true to start from the
last one, ``module_only`` true from its weights alone; ``load_at`` a step after which, once, that of the step
``load_step`` is loaded; ``evaluate_at`` a step, after which ``times`` (1) evaluations come; ``read_at`` a step after
which stage 1 reads its parameters while stage 0 waits for the file ``flags``/seat; ``wait_at`` a step that nobody
begins before the file ``flags``/go is there; ``hold`` true: who has written a file of the last save waits for it;
``flip`` a seat where a bit turns round in each load; ``until`` a file: the job ends when it is there; ``full`` whose
disk is full when (plans.fill_disk); ``catch`` true: a checkpoint that can't be written is not the job's end; ``half``
true, ``unscaled_as_scaled`` true: as the changes of these names (deepspeed_wrappers.py). Each rank writes what it saw
to run_dir/losses/rank<r>.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import deepspeed_wrappers
import endings
import plans
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from recycle_plugin.errors import RecycleError
from recycle_plugin.lab.training.compose import compose_from_command_line

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train_gpt import gpt

plan = json.loads(os.environ["RECYCLE_TEST_CHECKPOINT"])
job = compose_from_command_line(sys.argv[1:], __doc__)
plans.follow(plan)
if plan.get("half"):
    deepspeed_wrappers.half_on_cpu()
if plan.get("unscaled_as_scaled"):
    deepspeed_wrappers.unscaled_as_scaled()

deepspeed.init_distributed()
layers, loss, data = gpt(job)
topology = PipeDataParallelTopology(job.topology.stages, job.topology.replicas)
model = PipelineModule(layers=layers, topology=topology, loss_fn=loss, partition_method="uniform")
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=job.deepspeed_config(), training_data=data
)
record = {"losses": [], "engine": type(engine).__name__}


def evaluate() -> None:
    """Each replica has data of its own, and its middle stages have none."""
    count = job.topology.micro_batches
    first = 7 + count * engine.grid.data_parallel_id
    batches = [torch.utils.data.default_collate([data[first + index]]) for index in range(count)]
    end = engine.is_first_stage() or engine.is_last_stage()
    record.setdefault("evaluated", []).append(engine.eval_batch(iter(batches) if end else None).item())
    if getattr(engine, "behind", False):
        return  # a refusal ends who has come back, also if its script catches the error
    try:
        engine.eval_batch(iter(batches) if end else None, return_logits=True)
    except RecycleError as error:
        record["refused"] = str(error)


if plan.get("load"):
    path, _ = engine.load_checkpoint(plan["folder"], load_module_only=plan.get("module_only", False))
    assert path is not None, "nothing was loaded"
    if engine.data_iterator is not None:
        for _ in range(engine.global_steps * job.topology.micro_batches):
            next(engine.data_iterator)
    evaluate()
while engine.global_steps < job.steps and not plans.told(plan):
    record["losses"].append(engine.train_batch().item())
    if engine.global_steps == plan.get("evaluate_at"):
        for _ in range(plan.get("times", 1)):
            evaluate()
    if engine.global_steps in plan.get("save_at", ()):
        plans.save(plan, record, engine.save_checkpoint)
    if engine.global_steps == plan.get("load_at"):
        del plan["load_at"]
        engine.load_checkpoint(plan["folder"], f"global_step{plan['load_step']}")
    if engine.global_steps == plan.get("read_at"):
        plans.read(plan, record, engine.module)
endings.leave(job.run_dir, record, engine.module)
