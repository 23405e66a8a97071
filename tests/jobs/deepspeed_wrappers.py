"""Changes to a DeepSpeed job from outside of it: its config, its model, what its script does with weights between
steps.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

import deepspeed
import odd_optimizers
import torch
import touching
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe import topology
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from wrappers import inside

from recycle_plugin.adapters.deepspeed.engine import RecycleEngine
from recycle_plugin.lab.training.compose import TrainingJob

# --- configuration ----------------------------------------------------------------------------------


def with_config(**sections: dict) -> None:
    """The job's DeepSpeed config has ``sections`` besides."""
    made = TrainingJob.deepspeed_config
    TrainingJob.deepspeed_config = lambda self: made(self) | sections


def own_monitor(path: str) -> None:
    """The script puts a monitor of its own in the engine's place, which writes the entries' names to a file first."""
    initialize = deepspeed.initialize

    class Own:
        enabled = True

        def __init__(self, stock):
            self._stock = stock

        def write_events(self, entries):
            with open(path, "a") as file:
                file.writelines(f"{name}\n" for name, _, _ in entries)
            self._stock.write_events(entries)

    def changed(**named):
        engine, *others = initialize(**named)
        engine.monitor = Own(engine.monitor)
        return engine, *others

    deepspeed.initialize = changed


def half_on_cpu() -> None:
    """DeepSpeed takes fp16 on a CPU whose oneDNN has no kernels of its own for it: torch has slower ones."""
    type(get_accelerator()).is_fp16_supported = lambda self: True


def unscaled_as_scaled() -> None:
    """Stock's ZeRO takes the scale out of gradients that it has put in.  As it is, it takes out the one that the step
    has raised it to, so that the gradients of such a step are half of what they are.
    """
    update, unscale = DeepSpeedZeroOptimizer._update_scale, DeepSpeedZeroOptimizer.unscale_and_clip_grads

    def updated(self: DeepSpeedZeroOptimizer, *overflow: bool) -> None:
        self.scaled_by = self.loss_scale
        update(self, *overflow)

    def unscaled(self: DeepSpeedZeroOptimizer, *given: object) -> None:
        raised, self.loss_scale = self.loss_scale, self.scaled_by
        unscale(self, *given)
        self.loss_scale = raised

    DeepSpeedZeroOptimizer._update_scale, DeepSpeedZeroOptimizer.unscale_and_clip_grads = updated, unscaled


def odd_optimizer(kind: str) -> None:
    """The job trains with an optimizer, and a scheduler, of odd_optimizers.py."""
    initialize = deepspeed.initialize

    def changed(**named):
        made = (odd_optimizers.MADE | odd_optimizers.REFUSED)[kind](
            [one for one in named["model_parameters"] if one.requires_grad]
        )
        return initialize(**named | {"optimizer": made, "lr_scheduler": odd_optimizers.SCHEDULERS.get(kind)})

    deepspeed.initialize = changed


# --- the model --------------------------------------------------------------------------------------


class Mixer(torch.nn.Linear):
    """A linear layer beside the identity; its bias is not tied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def mixers(after: list[int]) -> None:
    """Behind each of these layers of the job's GPT stands another one, all with one weight."""
    from recycle_plugin.lab.training import gpt

    made = gpt.gpt_layers

    def changed(shape: gpt.GPTShape, *others: object, **named: object) -> list:
        specs = made(shape, *others, **named)
        for place in sorted(after, reverse=True):
            specs.insert(place + 1, TiedLayerSpec("mixer", Mixer, shape.hidden, shape.hidden))
        return specs

    gpt.gpt_layers = changed


# --- negative controls ------------------------------------------------------------------------------


def fp16_section(section: dict) -> None:
    config = TrainingJob.deepspeed_config
    TrainingJob.deepspeed_config = lambda self: {**config(self), "fp16": section}


# --- what scripts do with weights between steps -------------------------------------------------------


def _dtype(engine: RecycleEngine) -> torch.dtype:
    return engine.get_data_types()[0]


SCRIPT = touching.Script(
    RecycleEngine, "train_batch", lambda engine: engine.global_steps, lambda engine: engine.basic_optimizer, _dtype
)
touch_weights = partial(touching.touch_weights, SCRIPT)
wait_for_reader = partial(touching.wait_for_reader, SCRIPT)


# --- several hosts -----------------------------------------------------------------------------------


def a_replica_a_host() -> None:
    """Ranks go through a replica's stages first: where a host has as many as there are stages, it has one replica."""
    topology.PipeDataParallelTopology = lambda num_pp, num_dp: topology.ProcessTopology(
        axes=["data", "pipe"], dims=[num_dp, num_pp]
    )


def config_file() -> None:
    """The script takes --deepspeed_config FILE, whose "recycle" section goes before what else the job says."""
    place = sys.argv.index("--deepspeed_config")
    section = json.loads(Path(sys.argv[place + 1]).read_text())["recycle"]
    del sys.argv[place : place + 2]
    made = TrainingJob.deepspeed_config
    TrainingJob.deepspeed_config = lambda self: (config := made(self)) | {"recycle": config["recycle"] | section}


# --- what the engine knows --------------------------------------------------------------------------


def record_norms(folder: str) -> None:
    """At each clipping by a norm that is known, that norm, this stage's own sum of squares, and that of what other
    stages have too, go to folder/rank<r>.txt.
    """
    clip = RecycleEngine.clip_fp32_gradients
    path = Path(folder) / f"rank{os.environ['RANK']}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)

    def changed(self: RecycleEngine) -> None:
        framework, stepping = inside().framework, inside().stepping
        squares = sum(each.double().pow(2).sum().item() for each in framework.gradients.view())
        tied = sum(weight.parameter.grad.double().pow(2).sum().item() for weight in framework.tied)
        norm = stepping.clipping.norm(stepping._applying)
        if norm is not None:
            with path.open("a") as file:
                file.write(f"{norm.item()!r} {squares!r} {tied!r}\n")
        clip(self)

    RecycleEngine.clip_fp32_gradients = changed


def on_the_standin() -> None:
    """Train on the stand-in accelerator (tests/support/standin), of which this machine has one for each worker."""
    sys.path.append(str(Path(__file__).parents[2]))
    os.environ.pop("DS_ACCELERATOR", None)
    importlib.import_module("tests.support.standin.accelerator").use()
