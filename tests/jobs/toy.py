"""A pipeline of a toy framework, by the overrides of tests/jobs/plain.py, and the adapter that lends its parts to the
trainer: gradients in buffers of its own (not ``parameter.grad``), an optimizer of its own that reads them there, and
checkpoints of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import endings
import torch
import wrappers
from omegaconf import OmegaConf
from torch import nn

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.runtime.collectives.place import make_alike, meet
from recycle_plugin.runtime.control import session
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.buckets import MeanBuckets
from recycle_plugin.runtime.stage.ports import CheckpointShare, Clip, Framework, StageModel
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.state.stage_state import StageState, StatePart
from recycle_plugin.runtime.worker.trainer import Trainer
from recycle_plugin.settings.schema import Settings

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.buffered_gradients import BufferedGradients

WIDTH = 16
DEFAULTS = {
    "topology": {"replicas": 2, "stages": 2, "micro_batches": 2},
    "model": {"layers": 2},
    "steps": 20,
    "gradient_clipping": 0.0,
    "run_dir": "",
    "save_at": [],
    "load": "",
    "recycle": {},
}

# --- the framework ------------------------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """Steps parameters by their ``main_grad``, with momentum; it never looks at ``parameter.grad``."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                moment = state.setdefault("moment", torch.zeros_like(parameter))
                moment.mul_(0.9).add_(parameter.main_grad)
                parameter.sub_(moment, alpha=group["lr"])


# --- its adapter --------------------------------------------------------------------------------------------------


class ToyStep:
    """ports.OptimizerStep: ``clip()`` scales what the optimizer will read."""

    def __init__(self, wrapped: Momentum) -> None:
        self.wrapped, self.steps = wrapped, 0

    def apply(self, clip: Clip) -> None:
        clip()
        self.wrapped.step()
        self.steps += 1

    def skip(self) -> None:
        self.steps += 1

    pass_over = skip

    @property
    def counters(self) -> StatePart:
        return StatePart("counters", get=lambda: self.steps, set=lambda steps: setattr(self, "steps", steps))


class ToyFormat:
    """ports.CheckpointFormat: a file for each ``stage``."""

    def __init__(self, stage: int) -> None:
        self._name = f"toy{stage}"

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        if share.turn == 0:
            tensors = {name: tensor.detach() for name, tensor in state.tensors().items()}
            share.save(path / self._name, {"small": state.small(), "tensors": tensors})

    def dump(self, contents: Any, file: Any) -> None:
        torch.save(contents, file)

    def complete(self, folder: Path) -> None:
        """Nothing: no file is made of others."""

    def read(self, state: StageState, folder: Path) -> None:
        found = torch.load(folder / self._name, weights_only=False)
        state.put(found["small"])
        state.fill(found["tensors"])


def toy_trainer(
    layers: Sequence[Callable[[], nn.Module]],
    loss: Callable[[Any, Any], torch.Tensor],
    data: Callable[[int, int, int], Any],
    topology: Topology,
    clip: float,
    section: dict[str, Any],
) -> tuple[Trainer, Framework]:
    """The trainer of this worker's stage of ``layers``, cut evenly, and the parts that are lent to it."""
    settings, line = Settings.from_section({"enabled": True, **section}), session.of_this_process()
    line.configure(settings.deadlines, settings.group_sums)
    place = meet(line, topology)
    stage, each = place.seat.stage, len(layers) // topology.stages
    with keyed(stage, CPU):
        module = nn.Sequential(*(make() for make in layers[stage * each : (stage + 1) * each]))
    with line.hooks.startup.building(list(module.parameters())):
        make_alike(module.parameters(), place.peers)
    gradients = BufferedGradients(module.parameters())
    step = ToyStep(Momentum(gradients.parameters, 0.05))
    first, last = stage == 0, stage == topology.stages - 1
    model = StageModel(module, loss, topology.micro_batches, first, last, CPU, gradients=gradients)
    framework = Framework(
        seat=place.seat,
        topology=topology,
        model=model,
        optimizer=step,
        buckets=MeanBuckets(place.peers),
        checkpoints=ToyFormat(stage),
        cursor=DataCursor(topology.micro_batches),
        micro_batch_size=1,
        batch=lambda: len(topology.batch),
        next_batch=lambda what: NotImplemented,
        forward=lambda seed, place: keyed(seed, CPU),
        clipping=clip,
        state=(step.counters,),
    )
    trainer = Trainer(line, settings, framework)
    trainer.feed.source = lambda step, micro_batch: data(step, *MicroBatch(*micro_batch))
    line.hooks.at_end = trainer.finish
    return trainer, framework


# --- its job ------------------------------------------------------------------------------------------------------


def batch(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(hash((step, replica, micro_batch)))
    inputs = torch.randn(4, WIDTH, generator=generator)
    return inputs, inputs.roll(1, -1).sin()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


def main() -> None:
    job = OmegaConf.merge(DEFAULTS, OmegaConf.from_dotlist([text.lstrip("+") for text in sys.argv[1:]]))
    wrappers.apply()
    shape = Topology(job.topology.replicas, job.topology.stages, job.topology.micro_batches)
    section = OmegaConf.to_container(job.recycle) | {"run_dir": job.run_dir}
    layers = [partial(block)] * (job.model.layers * shape.stages)
    trainer, framework = toy_trainer(layers, nn.functional.mse_loss, batch, shape, job.gradient_clipping, section)
    if job.load:
        trainer.begin_loading("load")
        with trainer.lifted():
            framework.checkpoints.read(trainer.state, Path(job.load))
            trainer.loaded(whole=True)
    record = {"losses": []}
    while trainer.step < job.steps:
        record["losses"].append(trainer.train())
        if trainer.step in job.save_at:
            trainer.save(Path(job.run_dir) / "saved")
    trainer.settle()
    assert all(parameter.grad is None for parameter in framework.model.module.parameters())
    endings.leave(job.run_dir, record, framework.model.module)


if __name__ == "__main__":
    main()
