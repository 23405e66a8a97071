"""Changes to a DeepSpeed job from outside of it: its config, its model, what its script does with weights between steps."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe import topology

from recycle_plugin.adapters.deepspeed.engine import RecycleEngine
from recycle_plugin.compose import Job
from wrappers import TRAINERS, wait_until


# --- configuration ----------------------------------------------------------------------------------


def with_config(**sections: dict) -> None:
    """The job's DeepSpeed config has ``sections`` besides."""
    made = Job.deepspeed_config
    Job.deepspeed_config = lambda self: made(self) | sections


# --- the model --------------------------------------------------------------------------------------


class Mixer(torch.nn.Linear):
    """A linear layer beside the identity; its bias is not tied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def mixers(after: list[int]) -> None:
    """Behind each of these layers of the job's GPT stands another one, all with one weight."""
    from recycle_plugin.adapters.megatron import gpt

    made = gpt.gpt_layers

    def changed(shape: gpt.GPTShape, *others: object, **named: object) -> list:
        specs = made(shape, *others, **named)
        for place in sorted(after, reverse=True):
            specs.insert(place + 1, TiedLayerSpec("mixer", Mixer, shape.hidden, shape.hidden))
        return specs

    gpt.gpt_layers = changed


# --- negative controls ------------------------------------------------------------------------------


def fp16_section(section: dict) -> None:
    """The DeepSpeed config has this section besides."""
    config = Job.deepspeed_config
    Job.deepspeed_config = lambda self: {**config(self), "fp16": section}


# --- what scripts do with weights between steps -------------------------------------------------------


def _parameters_of(engine: RecycleEngine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for _, parameter in engine.module.named_parameters()]


def _saved(engine: RecycleEngine) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(list(engine.module.parameters()), file)
    file.seek(0)
    return [parameter.detach() for parameter in torch.load(file, weights_only=False)]


def _evaluated(engine: RecycleEngine) -> list[torch.Tensor]:
    """By hand, first in another precision; the smallest GPT's shapes."""
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    given = torch.arange(16)[None] if engine.is_first_stage() else torch.linspace(-1, 1, 256, dtype=dtype).view(16, 1, 16)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.module(given)
        return [engine.module(given)]


def _moments(engine: RecycleEngine) -> list[torch.Tensor]:
    return [state["exp_avg"].clone() for state in engine.basic_optimizer.state.values()]


def _averaged(engine: RecycleEngine) -> list[torch.Tensor]:
    trained = list(engine.module.parameters())
    averages = vars(engine).setdefault("averages", [torch.zeros_like(parameter, requires_grad=False) for parameter in trained])
    with torch.no_grad():
        torch._foreach_lerp_(averages, trained, 0.1)
    return [average.clone() for average in averages]


def _shrunk(engine: RecycleEngine) -> list[torch.Tensor]:
    """A write."""
    for parameter in engine.module.parameters():
        parameter.data.mul_(0.999)
    return _parameters_of(engine)


def touch_weights(folder: str, alone: str, flag_at: int = 0) -> None:
    """After each step a script reads and writes weights, each time in another order: what it found goes to folder/seat<replica.stage>.pt.  After every third
    step only the seat ``alone`` reads, and nobody writes; every second time the others wait for it in a collective.  Before that of step ``flag_at`` folder/<seat> is made."""
    train, ways, found = RecycleEngine.train_batch, [_parameters_of, _saved, _evaluated, _moments, _averaged, _shrunk], {}
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)

    def changed(self: RecycleEngine, data_iter=None) -> torch.Tensor:
        loss = train(self, data_iter)
        step, together = self.global_steps, self.global_steps % 3 > 0
        if step == flag_at:
            (place / str(self.seat)).touch()
        self.module.eval()
        if together or str(self.seat) == alone:
            mine = ways if together else ways[:-1]
            first = step % len(mine)
            found[step] = {way.__name__: way(self) for way in mine[first:] + mine[:first]}
        if step % 6 == 3:
            torch.distributed.barrier()
        torch.save(found, place / f"seat{self.seat}.pt")
        return loss

    RecycleEngine.train_batch = changed


def wait_for_reader(folder: str, alone: str) -> None:
    """After each step the script's workers wait, where the plugin does not see it, until the one at ``alone`` has read its weights."""
    train = RecycleEngine.train_batch
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)

    def changed(self: RecycleEngine, data_iter=None) -> torch.Tensor:
        loss, flag = train(self, data_iter), place / f"step{self.global_steps}"
        if str(self.seat) == alone:
            _parameters_of(self)
            flag.touch()
        wait_until(flag.exists, str(flag))
        return loss

    RecycleEngine.train_batch = changed


# --- several hosts -----------------------------------------------------------------------------------


def a_replica_a_host() -> None:
    """Ranks go through a replica's stages first: where a host has as many as there are stages, it has one replica."""
    topology.PipeDataParallelTopology = lambda num_pp, num_dp: topology.ProcessTopology(axes=["data", "pipe"], dims=[num_dp, num_pp])


def config_file() -> None:
    """The script takes --deepspeed_config FILE, whose "recycle" section goes before what else the job says."""
    place = sys.argv.index("--deepspeed_config")
    section = json.loads(Path(sys.argv[place + 1]).read_text())["recycle"]
    del sys.argv[place : place + 2]
    made = Job.deepspeed_config
    Job.deepspeed_config = lambda self: (config := made(self)) | {"recycle": config["recycle"] | section}


# --- what the engine knows --------------------------------------------------------------------------


def record_norms(folder: str) -> None:
    """At each clipping by a norm that is known, that norm, this stage's own sum of squares, and that of what other stages have too, go to folder/rank<r>.txt."""
    clip = RecycleEngine.clip_fp32_gradients
    path = Path(folder) / f"rank{os.environ['RANK']}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)

    def changed(self: RecycleEngine) -> None:
        framework, stepping = TRAINERS[0]._framework, TRAINERS[0]._stepping
        squares = sum(parameter.grad.double().pow(2).sum().item() for parameter in framework.parameters)
        tied = sum(weight.parameter.grad.double().pow(2).sum().item() for weight in framework.tied)
        if stepping.norm() is not None:
            with path.open("a") as file:
                file.write(f"{stepping.norm().item()!r} {squares!r} {tied!r}\n")
        clip(self)

    RecycleEngine.clip_fp32_gradients = changed
