"""A pipeline whose script thaws and freezes layers between steps, and gives its optimizer another group.

RECYCLE_TEST_THAWING: {"folder", "faults", "steps", "held", "recycle", "plain", "forgets", "apart", "inside", "call"}:
before the steps ``held`` members wait for a file ``goSTEP`` in the folder; ``recycle`` is the plugin's section,
``{"enabled": false}`` for stock DeepSpeed; ``plain``: in plain torch; ``forgets``: to add the group; ``apart``: each
replica freezes another layer; ``inside``: forwards thaw (true) or freeze (false) their layer, from the ``call`` of this
number on.  Each rank writes its losses and weights.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import endings
import torch
from torch import nn

WIDTH, REPLICAS, STAGES, MICRO_BATCHES = 6, 2, 2, 2
job = json.loads(os.environ["RECYCLE_TEST_THAWING"])
folder = Path(job["folder"])
THAWED, FROZEN = 4, 7  # the steps before which
settings = {"enabled": True, "run_dir": job["folder"], "report": False, "faults": job["faults"], "check_replicas": 1}
settings |= job.get("recycle", {})


class Layer(nn.Module):
    """The layer of this ``number``: the first of each stage is frozen at the start."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear, self.calls = number, nn.Linear(WIDTH, WIDTH), 0
        generator = torch.Generator().manual_seed(number)
        for parameter in self.linear.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
        self.requires_grad_(number % 2 == 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        if "inside" in job and self.calls >= job.get("call", 1):
            self.linear.requires_grad_(job["inside"])
        return torch.tanh(self.linear(x))


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return REPLICAS * MICRO_BATCHES * job["steps"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(WIDTH, generator=generator)
        return x, torch.sin(3 * x)


def adam(parameters) -> torch.optim.Optimizer:
    """Without the first layer of all, which is given a group when it is thawed; that of the second stage is there."""
    kept = [each for each in parameters if not any(each is one for one in later)]
    return torch.optim.AdamW(kept, lr=1e-2, weight_decay=0.1)


def change(step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for layer in (each for each in module.modules() if isinstance(each, Layer)):
        if step == THAWED and layer.number == 0 and not job.get("forgets"):
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 3e-2})
        if step == THAWED and layer.number % 2 == 0:
            layer.linear.requires_grad_(True)
        if step == FROZEN and job.get("apart") and layer.number % 2 == int(os.environ["RANK"]) % 2:
            layer.linear.requires_grad_(False)
        elif step == FROZEN and layer.number == 1:
            layer.linear.bias.requires_grad = False
        elif step == FROZEN and layer.number == 2:
            layer.linear.requires_grad_(False)


def run(train, module: nn.Module, optimizer: torch.optim.Optimizer, behind) -> None:
    losses = []
    for step in range(1, job["steps"] + 1):
        change(step, module, optimizer)
        if step in job.get("held", ()) and not behind():
            endings.wait_for(folder / f"go{step}")
        losses.append(float(train()))
    weights = {
        f"{layer.number}.{name}": value.tolist()
        for layer in module.modules()
        if isinstance(layer, Layer)
        for name, value in layer.linear.state_dict().items()
    }
    record = {"losses": losses, "weights": weights}
    endings.write(folder / "ends" / f"{os.environ['RANK']}.json", lambda path: path.write_text(json.dumps(record)))


later: list[torch.Tensor] = []
if job.get("plain"):
    from recycle_plugin.adapters.plain import Pipeline

    samples = Samples()

    def data(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = samples[((step - 1) * MICRO_BATCHES + micro_batch) * REPLICAS + replica]
        return x[None], y[None]

    def made(number: int):
        def make() -> Layer:
            layer = Layer(number)
            later.extend(layer.parameters() if number == 0 else ())
            return layer

        return make

    settings.pop("enabled")
    pipeline = Pipeline(
        [made(number) for number in range(4)],
        nn.functional.mse_loss,
        adam,
        data,
        STAGES,
        MICRO_BATCHES,
        settings=settings,
    )
    run(pipeline.step, pipeline.module, pipeline.optimizer, lambda: pipeline.behind)
else:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    deepspeed.init_distributed()
    model = PipelineModule(
        [LayerSpec(Layer, number) for number in range(4)],
        topology=PipeDataParallelTopology(STAGES, REPLICAS),
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    later += [
        one for each in model.modules() if isinstance(each, Layer) and each.number == 0 for one in each.parameters()
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "recycle": settings,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adam(model.parameters()), config=config, training_data=Samples()
    )
    run(engine.train_batch, engine.module, engine.optimizer, lambda: getattr(engine, "behind", False))
