"""All that a step changes of a DeepSpeed engine: the one list of what belongs to it (runtime/state.py says what that is for)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from recycle_plugin.core.places import Places
from recycle_plugin.core.supply import Supply
from recycle_plugin.runtime.state import OptimizerState, Part, StageState, of_parameters
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.stage import Stage

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def stage_state(engine: Any, stage: Stage, scale: LossScale, places: Places, supply: Supply | None) -> StageState:
    """``places``, ``supply``: where the worker stands in its data; without a ``supply`` it reads no iterator."""
    masters = engine.masters
    named = dict(engine.module.named_parameters())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    called = {parameter: name for name, parameter in named.items()}
    parts = [
        of_parameters("weights", trained, masters and masters.round_off),
        Part("scheduler", get=partial(_scheduled, engine), set=partial(_schedule, engine)),
        Part("loss_scale", get=scale.state, set=partial(_scale, stage, scale)),
        Part("counters", get=lambda: {name: getattr(engine, name) for name in COUNTERS}, set=partial(_count, engine)),
        Part("places", get=places.changes, set=places.take),
    ]
    if masters is not None:
        stepped = {name: masters.of(parameter) for name, parameter in trained.items()}
        parts.append(of_parameters("masters", stepped))
        called |= {master: name for name, master in stepped.items()}
    if supply is not None:
        parts.append(Part("iterator", get=supply.batches_read, set=supply.skip_to, own=True))
    return StageState(str(engine.seat), lambda: engine.global_steps, OptimizerState(engine.basic_optimizer, called), parts)


def _scheduled(engine: Any) -> Any:
    return None if engine.lr_scheduler is None else copy.deepcopy(engine.lr_scheduler.state_dict())


def _schedule(engine: Any, state: Any) -> None:
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(state)


def _scale(stage: Stage, scale: LossScale, state: dict[str, Any]) -> None:
    scale.set_state(state)
    stage.loss_scale = scale.value


def _count(engine: Any, counts: dict[str, int]) -> None:
    for name, value in counts.items():
        setattr(engine, name, value)
