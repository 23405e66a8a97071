"""A stage's optimizer with all that is around it in a worker, without the pipeline: its sums are given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from recycle_plugin.adapters.plain.ports import PlainOptimizer
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.core.worker.serving import Applied, Servings
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.stage.clipping import Clipping, TrueNorm
from recycle_plugin.runtime.stage.gradient_store import TorchGradients
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.state.units import StageUnits
from recycle_plugin.runtime.worker.changed_state import scheduler_part, stage_state, stage_units
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.stepping import Stepping, undo_record
from tests.support.optimizers import Make


def small() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 6), torch.nn.LayerNorm(6))
    module[2].bias.requires_grad_(False)
    return module


class Scaler:
    """A loss scale by DeepSpeed's rule: halved where a step overflows, doubled after two that do not."""

    def __init__(self) -> None:
        self.loss_scale, self.good = 256.0, 0

    def update_scale(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        self.loss_scale *= 0.5 if overflow else 2.0 if self.good % 2 == 0 else 1.0


class SteppedWorker:
    """A worker whose ``model()`` is one stage, and which trains, serves newcomers, or is filled.

    ``clip``: the largest norm; ``tied``: the first parameter is another stage's too.
    """

    def __init__(
        self,
        make: Make,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        clip: float = 0.0,
        scaled: bool = False,
        tied: bool = False,
        model: Callable[[], torch.nn.Module] = small,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.module = model().to(dtype)
        trained = [one for one in self.module.parameters() if one.requires_grad]
        masters = Masters(trained) if dtype != torch.float32 else None
        self.summed = trained if masters is None else masters.parameters
        inner = make(trained)
        if masters is not None:
            inner.param_groups[0]["params"] = masters.parameters
            inner.register_step_post_hook(lambda *_: masters.round_off())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9) if scheduler is None else scheduler(inner)
        self.scale, self.cursor = LossScale(Scaler() if scaled else None), DataCursor(2)
        self.optimizer = PlainOptimizer(inner, scheduler)
        self.framework = SimpleNamespace(
            pushed=None,
            seat=Seat(0, 1),
            model=SimpleNamespace(module=self.module),
            optimizer=self.optimizer,
            masters=masters,
            cursor=self.cursor,
            state=(scheduler_part(lambda: scheduler, lambda: inner), self.optimizer.counters),
        )
        self.store, self.steps, self.tied = StepStore(Seat(0, 1), 2, tied), StepMachine(0), tied
        weights = [SimpleNamespace(parameter=self.summed[0], name="tied")] * tied
        where = TorchGradients(self.summed)
        self.gradients = Gradients(SimpleNamespace(limit=1), self.store, where, None, weights)
        stage = SimpleNamespace(loss_scale=1.0)
        self.state = stage_state(self.framework, stage, self.scale, None)
        self.stepping = Stepping(
            self.optimizer,
            stage,
            self.gradients,
            Clipping(self.store, where, TrueNorm(), clip),
            self.scale,
            undo_record("snapshot", self.state),
            SimpleNamespace(view=SimpleNamespace(is_first=False)),
        )
        self.units = self.new_units()
        self.servings = Servings()
        self.store.rewind(0, 0)

    def new_units(self, spent: Callable[[float], None] = lambda seconds: None) -> StageUnits:
        return stage_units(self.framework, self.state, self.gradients, spent)

    def train(self, step: int, norm: float | None = None, validated: bool = False, between=lambda summed: None) -> None:
        """A step by gradients of its number.  ``between(summed)`` is called before REDUCE and after."""
        between(False)
        generator = torch.Generator().manual_seed(step)
        made = [torch.randn(one.shape, generator=generator).mul_(self.scale.value) for one in self.summed]
        self.reduce(step, [sums.to(one.device) for sums, one in zip(made, self.summed, strict=True)])
        between(True)
        self.step(step, norm, validated)

    def reduce(self, step: int, sums: list[torch.Tensor]) -> None:
        """As REDUCE and TIE leave it; newcomers are told."""
        self.store.put(Datum("reduced", 1, None, step), sums)
        if self.tied:
            self.store.put(Datum("tied", 1, None, step), {0: sums[0] + 1.0})
        self.servings.summed(step)

    def step(self, step: int, norm: float | None = None, validated: bool = False) -> None:
        """STEP, which the others have been at the step before.  ``validated``: it is taken back for its norm."""
        self.servings.before_step(step - 1, 0)
        if norm is not None and validated:
            self.stepping.apply(step)
            self.stepping.undo(step)
        if norm is not None:
            self.store.put(Datum("norm", 1, None, step), torch.tensor(norm))
        norm = self.store.get(Datum("norm", 1, None, step))
        self.servings.stepped(step, Applied(norm, self.units.settings()))
        self.stepping.apply(step)
        self.store.commit(step - 1)

    # as core/worker/filled_stage.py has its machine

    def compute(self, instruction, have, boundary_only: bool) -> dict[Datum, Any]:
        self.stepping.apply(instruction.step)
        return {Datum("params", 1, None, instruction.step + 1): None}

    def found(self) -> dict:
        return {
            "weights": self.module.state_dict(),
            "masters": [each.detach() for each in self.summed],
            "optimizer": self.optimizer.wrapped.state_dict(),
            "scheduler": self.framework.state[0].get(),
            "scale": self.scale.state(),
            "counts": [self.optimizer.steps, self.optimizer.skipped],
        }
