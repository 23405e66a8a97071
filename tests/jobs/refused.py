"""A user's own script that asks for something that is not supported: RECYCLE_TEST_CASE names it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(4), torch.randn(4)


ACCELERATOR = """import deepspeed

def prepare(model, config):  # as _prepare_deepspeed() of accelerate 1.15
    ds_initialize = deepspeed.initialize
    engine, optimizer, _, scheduler = ds_initialize(model=model, config_params=config)
"""


def accelerator():
    """The module of the real package's name that calls DeepSpeed as that does; it is not installed for the tests."""
    package = Path(os.environ["RECYCLE_TEST_FOLDER"]).parent / f"packages{os.environ['RANK']}"
    (package / "accelerate").mkdir(parents=True)
    (package / "accelerate" / "__init__.py").touch()
    (package / "accelerate" / "accelerator.py").write_text(ACCELERATOR)
    sys.path.insert(0, str(package))
    return importlib.import_module("accelerate.accelerator")


case = os.environ["RECYCLE_TEST_CASE"]
ranks = int(os.environ["WORLD_SIZE"])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "recycle": {"enabled": True, "run_dir": os.environ["RECYCLE_TEST_FOLDER"]},
}
layer = LayerSpec(torch.nn.Linear, 4, 4)
layers = [layer] * 2
topology = PipeDataParallelTopology(1, ranks)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 4))

match case:
    case "unknown key":
        config["recycle"]["spilt_backward"] = False
    case "more stages than layers":
        topology, layers = PipeDataParallelTopology(2, ranks // 2), [layer]
    case "one replica":
        topology = PipeDataParallelTopology(ranks, 1)
    case "iterable dataset":
        data = Endless()
    case "ZeRO 1" | "ZeRO 2" | "ZeRO 3":
        config["zero_optimization"] = {"stage": int(case[-1])}
    case "tensor parallelism":
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=ranks, num_dp=1)
    case "tied layers":
        layers = [TiedLayerSpec("both", torch.nn.Linear, 4, 4, tied_weight_attr=[name]) for name in ("weight", "bias")]
    case "fp16":
        config["fp16"] = {"enabled": True}
        type(get_accelerator()).is_fp16_supported = lambda self: None  # as on CPUs without
    case "no pipeline":
        pass
    case "Hugging Face":
        config["recycle"] |= {"unit": "replica", "replicas": 2, "batch": "constant"}
    case "no batch size":
        del config["train_micro_batch_size_per_gpu"]
    case "misspelt section":
        config["Recyle"] = config.pop("recycle")
    case "universal checkpoint":
        config["checkpoint"] = {"load_universal": True}
    case "placement unknown at the start":
        config["recycle"]["placement"] = "spread"
    case "no compiler" | "stale lock":
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.1}}

if case == "another backend":
    torch.distributed.Backend.register_backend("another", lambda *arguments: None, devices=["cpu"])
deepspeed.init_distributed({"another backend": "another", "nccl": "nccl"}.get(case, "gloo"))
if case == "Hugging Face":
    accelerator().prepare(torch.nn.Linear(4, 4), config)
if case == "no pipeline":
    model = torch.nn.Linear(4, 4)
else:
    model = PipelineModule(layers, topology=topology, loss_fn=torch.nn.functional.mse_loss)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, training_data=data)
if case == "two engines":
    another = PipelineModule(layers, topology=topology, loss_fn=torch.nn.functional.mse_loss)
    deepspeed.initialize(model=another, model_parameters=another.parameters(), config=config, training_data=data)
engine.train_batch()
