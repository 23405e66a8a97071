"""Lists everything that a step changes on a worker; runtime/state/stage_state.py explains what for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.stage.ports import Framework
from recycle_plugin.runtime.stage.pushed_stage import PushedStage
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.state.contents import Surrounding, Telling, refusals
from recycle_plugin.runtime.state.putting import Putting
from recycle_plugin.runtime.state.stage_state import OptimizerState, StageState, StatePart, of_parameters
from recycle_plugin.runtime.state.units import StageUnits
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.scripted import ScriptedStage

STATE_DICT = "state_dict()"  # not an attribute's name


def stage_state(
    framework: Framework,
    stage: Stage | ScriptedStage | PushedStage,
    scale: LossScale,
    iterator_data: IteratorData | None,
) -> StageState:
    """Return a worker's stage state. ``iterator_data``: its position in the data, None if it reads no iterator."""
    masters, cursor = framework.masters, framework.cursor
    named = dict(framework.model.module.named_parameters())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    called = {parameter: name for name, parameter in named.items()}
    parts = [
        of_parameters("weights", trained, None if masters is None else masters.round_off),
        *framework.state,
        StatePart("loss_scale", get=scale.state, set=partial(_scale, stage, scale)),
        StatePart("places", get=cursor.changes, set=cursor.take),
    ]
    if masters is not None:
        stepped = summed(framework)
        parts.append(of_parameters("masters", stepped))
        called |= {master: name for name, master in stepped.items()}
    if iterator_data is not None:
        parts.append(
            StatePart("iterator", get=partial(getattr, iterator_data, "stands"), set=iterator_data.skip_to, own=True)
        )
    return StageState(
        lambda: framework.optimizer.steps,
        OptimizerState(framework.optimizer.wrapped, called, framework.model.module.buffers),
        parts,
    )


def stage_units(
    framework: Framework, state: StageState, gradients: Gradients, spent: Callable[[float], None] = lambda seconds: None
) -> StageUnits:
    """Return the units of a worker's ``state``, to send to a newcomer or to fill as one (runtime/state/units.py)."""
    return StageUnits(state, ever_summed(framework, state), gradients, spent)


def ever_summed(framework: Framework, state: StageState) -> dict[str, torch.Tensor]:
    """Return the parameters whose gradients are summed, or were before a script froze them: newcomers need all."""
    weights = state.parts["weights"].tensors()
    found = {name.removeprefix("weights/"): one for name, one in weights.items()}
    return found if framework.masters is None else {**summed(framework)}


def summed(framework: Framework) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose gradients are summed, weights or their masters, by the model's names."""
    masters = framework.masters
    trained = {name: one for name, one in framework.model.module.named_parameters() if one.requires_grad}
    return trained if masters is None else {name: masters.of(weight) for name, weight in trained.items()}


class StateCounts:
    """The part of a ``state`` copied by value that belongs to no parameter: counts, schedulers, learning rates."""

    def __init__(self, state: StageState) -> None:
        self._state = state

    def get(self) -> dict[str, Any]:
        small = {name: value for name, value in self._state.small().items() if name not in ("optimizer", "attributes")}
        return small | {"optimizer": self._state.optimizer.shared()}

    def put(self, counts: Mapping[str, Any]) -> None:
        """Set it to a copy of ``counts``; tensors and the optimizer's state of parameters stay."""
        self._state.put({name: value for name, value in counts.items() if name != "optimizer"})
        self._state.optimizer.set_shared(counts["optimizer"])


def scheduler_part(current: Callable[[], Any], optimizer: Callable[[], Any]) -> StatePart:
    """Return the learning-rate scheduler ``current()`` of ``optimizer()``, which may be None, as a part of a stage's
    state. The part has all that the scheduler holds, whatever its state_dict() returns; only if some of it can't be
    read, it is the state_dict().
    """

    def get() -> Any:
        if (scheduler := current()) is None:
            return None
        groups = optimizer().param_groups
        around = Surrounding(stays=lambda: (groups, *groups, *(group["params"] for group in groups)))
        told = Telling(around).attributes(scheduler, "")
        if hasattr(scheduler, "load_state_dict") and next(refusals(told), None) is not None:
            return {STATE_DICT: Telling(around).of(scheduler.state_dict(), STATE_DICT)}
        return told

    def put(told: Any) -> None:
        if (scheduler := current()) is None:
            return
        if told.keys() == {STATE_DICT}:
            scheduler.load_state_dict(Putting().back(told[STATE_DICT]))
        else:
            Putting().attributes(told, scheduler)

    return StatePart("scheduler", get=get, set=put)


def _scale(stage: Stage | ScriptedStage | PushedStage, scale: LossScale, state: dict[str, Any]) -> None:
    scale.set_state(state)
    stage.loss_scale = scale.value
