"""A user's own script, with models of the shapes that people have; RECYCLE_TEST_SHAPES holds as JSON ``case``,
``folder``, ``enabled``, ``faults``, ``more`` of DeepSpeed's config and ``settings`` of the plugin's.

``tuples``: a boolean mask, ids and a sum travel with the activation, whose length changes from step to step; a layer is
left out in some steps; parameter groups; the loader's dictionaries pass a batch function; gradients are summed over
replicas, not averaged. ``layers``: a frozen layer, convolution, LSTM and dropout, checkpointed by DeepSpeed and seeded
by layer.  ``frozen``: a first stage that is not trained at all.  Each rank writes its losses and weights.
"""

from __future__ import annotations

import json
import os

import deepspeed
import endings
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from shapes_models import LENGTHS, MICRO_BATCHES, REPLICAS, SIZE, STEPS, Texts, Vectors, groups, loss_of, model_layers

job = json.loads(os.environ["RECYCLE_TEST_SHAPES"])
tuples = job["case"] == "tuples"
config = (
    {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "recycle": {
            "enabled": job["enabled"],
            "run_dir": job["folder"],
            "report": False,
            "faults": job["faults"] if job["enabled"] else [],
        }
        | (job["settings"] if job["enabled"] else {}),
    }
    | (
        {"gradient_allreduce_op": "sum"}
        if tuples
        else {"prescale_gradients": True, "pipeline": {"activation_checkpoint_interval": 2}}
    )
    | job["more"]
)
deepspeed.init_distributed()
model = PipelineModule(
    [LayerSpec(*spec) for spec in model_layers(job["case"])],
    topology=PipeDataParallelTopology(2, REPLICAS),
    loss_fn=loss_of(job["case"]),
    seed_layers=True,
    # DeepSpeed's own takes no numbers of numpy's, which its partitioning gives
    seed_fn=lambda seed: torch.manual_seed(int(seed)),
    partition_method={"tuples": "parameters", "layers": "type:Recurrent|Head", "frozen": "uniform"}[job["case"]],
)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=groups(model) if tuples else model.parameters(),
    config=config,
    training_data=Texts() if tuples else Vectors(),
)
if tuples:
    engine.set_batch_fn(lambda batch: ((batch["ids"], batch["mask"]), batch["labels"]))
record = {"losses": [], "layers": list(map(int, engine.module.parts))}
for step in range(STEPS):
    record["losses"].append(engine.train_batch().item())
    if step + 1 < STEPS and LENGTHS[step + 1] != LENGTHS[step]:
        engine.reset_activation_shape()
endings.leave(job["folder"], record, engine.module)
