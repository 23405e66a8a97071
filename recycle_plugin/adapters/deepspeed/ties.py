"""DeepSpeed's tied layers: which weights they are, which stages have a copy, and whose copy the others take when a checkpoint is loaded."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Generation
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.tied import TiedWeight


def shared(module: PipelineModule, specs: list) -> dict[str, tuple[int, ...]]:
    """The stages of each tied key that is on several of them; ``specs``: of all layers."""
    stages: dict[str, set[int]] = {}
    for place, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(place))
    return {key: tuple(sorted(found)) for key, found in sorted(stages.items()) if len(found) > 1}


def check(specs: list) -> None:
    """RecycleError where layers of one key do not say alike what is tied: DeepSpeed takes what a stage's first one says."""
    said: dict[str, list[str]] = {}
    for spec in specs:
        if isinstance(spec, TiedLayerSpec) and said.setdefault(spec.key, spec.tied_weight_attr) != spec.tied_weight_attr:
            raise RecycleError(
                f"the layers tied as {spec.key!r} name different weights, {', '.join(said[spec.key])} and {', '.join(spec.tied_weight_attr)}, so that stages "
                "would add up different things; give each TiedLayerSpec of this key the same tied_weight_attr"
            )


class Ties:
    """Of ``module``, whose tied keys are on the stages ``shared``.  All workers build it: it makes process groups."""

    def __init__(self, module: PipelineModule, shared: dict[str, tuple[int, ...]], session: Session) -> None:
        self._module, self._shared = module, shared
        self._groups: dict[str, Any] = {}
        self.weights: list[TiedWeight] = []
        grid = module.mpu()
        for key, stages in shared.items():
            seats = [Seat(replica, stage) for stage in stages for replica in range(grid.data_parallel_size)]
            self._groups[key] = group = dist.new_group(sorted(grid.stage_to_global(stage_id=seat.stage, data=seat.replica) for seat in seats))
            if key in module.tied_comms:
                found = {name: module.tied_modules[key].get_parameter(name) for name in module.tied_weight_attrs[key]}
                self.weights += [TiedWeight(f"{key}.{name}", weight, stages, group, session) for name, weight in found.items() if weight.requires_grad]

    @contextmanager
    def among_the_live(self, generation: Generation | None) -> Iterator[None]:
        """While stock code makes the copies equal, all take that of the first stage's lowest live worker."""
        kept = self._module.tied_comms
        if generation is not None:
            first = {key: [member.rank for member in generation.members if member.seat.stage == stages[0]] for key, stages in self._shared.items()}
            self._module.tied_comms = {key: {**comm, "group": self._groups[key], "ranks": first[key]} for key, comm in kept.items()}
        try:
            yield
        finally:
            self._module.tied_comms = kept
