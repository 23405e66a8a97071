"""A stage on an engine like DeepSpeed's, with all that its state has."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch

from recycle_plugin.adapters.deepspeed.bf16 import MasterOptimizer
from recycle_plugin.adapters.deepspeed.ports import COUNTERS, StockOptimizer, counters_part, loss_scaler
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.worker.changed_state import scheduler_part, stage_state, stage_units
from recycle_plugin.runtime.worker.scaling import LossScale
from tests.support.optimizers import Make

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
}
SCALING = SimpleNamespace(
    loss_scale=0,
    initial_scale_power=8,
    loss_scale_window=2,
    hysteresis=1,
    consecutive_hysteresis=False,
    min_loss_scale=1.0,
)


class Worker:
    """A stage on an engine like DeepSpeed's, with a weight that two layers share, a frozen layer, a scheduler and a
    loss scale.  Another ``seed``, other weights.
    """

    def __init__(self, kind: str = "adam", seed: int = 0, bf16: bool = False, seat: str = "0.0") -> None:
        torch.manual_seed(seed)
        first, last, frozen = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(2, 2).requires_grad_(False)
        last.weight = first.weight
        self.module = torch.nn.ModuleDict({"0": first, "1": frozen, "2": last}).to(
            torch.bfloat16 if bf16 else torch.float32
        )
        optimizer = OPTIMIZERS[kind](list(self.module.parameters()))
        masters = Masters(one for one in self.module.parameters() if one.requires_grad) if bf16 else None
        self.trained = masters.parameters if bf16 else [one for one in self.module.parameters() if one.requires_grad]
        self.stock = MasterOptimizer(optimizer, masters, lambda: None) if bf16 else optimizer
        self.scale, self.cursor = LossScale(loss_scaler(SCALING)), DataCursor(2)
        self.stage = SimpleNamespace(loss_scale=self.scale.value)
        self.engine = SimpleNamespace(masters=masters, basic_optimizer=optimizer, **dict.fromkeys(COUNTERS, 0))
        self.engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.iterator = Standing()
        framework = SimpleNamespace(
            pushed=None,
            seat=seat,
            model=SimpleNamespace(module=self.module),
            optimizer=StockOptimizer(self.engine, lambda clip: self.stock.step()),
            masters=masters,
            cursor=self.cursor,
            state=(scheduler_part(lambda: self.engine.lr_scheduler, lambda: optimizer), counters_part(self.engine)),
        )
        self.state = stage_state(framework, self.stage, self.scale, self.iterator)
        self.units = stage_units(framework, self.state, SimpleNamespace())

    def step(self, seed: int) -> None:
        """With random gradients, and what else comes with a step."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.trained:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.stock.step()
        self.engine.lr_scheduler.step()
        self.engine.global_steps += 1
        self.engine.global_samples += 8
        self.scale.stepped(False)
        self.stage.loss_scale = self.scale.value
        self.cursor.change(self.engine.global_steps + 1, 2 + seed)

    def steps(self, *seeds: int) -> Worker:
        for seed in seeds:
            self.step(seed)
        return self

    def found(self) -> dict:
        engine = self.engine
        masters = [] if engine.masters is None else engine.masters.parameters
        found = {
            "weights": {name: one for name, one in self.module.named_parameters() if one.requires_grad},
            "masters": masters,
            "optimizer": engine.basic_optimizer.state_dict(),
            "scheduler": engine.lr_scheduler.state_dict(),
            "loss_scale": [self.scale.state(), self.stage.loss_scale],
            "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps],
            "places": [self.cursor.before(step) for step in range(9)],
        }
        return copy.deepcopy(
            {name: [one.detach() for one in part] if name == "masters" else part for name, part in found.items()}
        )


class Standing:
    """Where an iterator stands."""

    def __init__(self) -> None:
        self.stands = Place()

    def skip_to(self, place: Place) -> None:
        self.stands = place


def without(state: StageState, forgotten: str) -> StageState:
    state.parts.pop(forgotten, None)
    return state
