"""DeepSpeed's tied layers: which weights they are, which stages have a copy, and which files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from recycle_plugin.adapters.deepspeed.rank0 import replaced
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.stage.tied import TiedWeight


def shared(module: PipelineModule, specs: list[Any]) -> dict[str, tuple[int, ...]]:
    """Return the stages of each tied key that several stages have. ``specs``: of all layers."""
    stages: dict[str, set[int]] = {}
    for place, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(place))
    return {key: tuple(sorted(found)) for key, found in sorted(stages.items()) if len(found) > 1}


def check(specs: list[Any]) -> None:
    """Raise RecycleError if layers of one key name different tied weights: DeepSpeed would take a stage's first."""
    said: dict[str, list[str]] = {}
    for spec in specs:
        if (
            isinstance(spec, TiedLayerSpec)
            and said.setdefault(spec.key, spec.tied_weight_attr) != spec.tied_weight_attr
        ):
            raise RecycleError(
                f"the layers tied as {spec.key!r} name different weights, {', '.join(said[spec.key])} and "
                f"{', '.join(spec.tied_weight_attr)}, so stages would add up gradients of different weights; "
                "give each TiedLayerSpec of this key the same tied_weight_attr"
            )


class Ties:
    """The tied weights of ``module``, made from ``specs``; ``shared``: the stages of each tied key. All workers build
    it: it makes process groups. ``masters``: of a model in bf16 or fp16; their gradients are summed.
    """

    def __init__(
        self,
        module: PipelineModule,
        specs: list[Any],
        shared: dict[str, tuple[int, ...]],
        view: ControlView,
        masters: Masters | None,
    ) -> None:
        self._module, self._specs = module, specs
        # on this worker: the layer whose file has the weight, the weight's name in it, the copy
        self._copies: list[tuple[int, str, torch.nn.Parameter]] = []
        self.weights: list[TiedWeight] = []
        grid = module.mpu()
        for key, stages in shared.items():
            seats = [Seat(replica, stage) for stage in stages for replica in range(grid.data_parallel_size)]
            group = dist.new_group(
                sorted(grid.stage_to_global(stage_id=seat.stage, data=seat.replica) for seat in seats)
            )
            if key not in module.tied_comms:
                continue
            saved = [
                place
                for place, spec in enumerate(specs)
                if isinstance(spec, TiedLayerSpec) and spec.key == key and spec.forward_fn is None
            ]
            # the attribute that is tied may be a property
            names = {weight: name for name, weight in module.tied_modules[key].named_parameters()}
            for name in module.tied_weight_attrs[key]:
                weight = module.tied_modules[key].get_parameter(name)
                self._copies += [(place, names[weight], weight) for place in saved[:1]]
                if weight.requires_grad:
                    self.weights.append(
                        TiedWeight(
                            f"{key}.{name}", weight if masters is None else masters.of(weight), stages, group, view
                        )
                    )

    def place(self, layer: int) -> str:
        """Return the name in the module of a layer, which its file in a checkpoint has too."""
        spec = self._specs[layer]
        return f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(layer)

    def saved(self) -> set[str]:
        """Return the weights that :meth:`load` takes from layers' files, by their names in a stage's state."""
        copies = {weight for _, _, weight in self._copies}
        return {f"weights/{name}" for name, weight in self._module.named_parameters() if weight in copies}

    def loading(self) -> AbstractContextManager[None]:
        """A context in which stock code loads a checkpoint without broadcasting copies, perhaps from lost workers."""
        return replaced(self._module, tied_comms={})

    def load(self, folder: Path, read: Callable[[str], dict[str, Any]]) -> None:
        """Load this worker's copies of tied weights from the file of the first layer that has them. Stock saves no
        layer with a ``forward_fn``. If all layers of a key have one, the weight is in no file, and stays as it is.
        """
        for place, name, weight in self._copies:
            (path,) = folder.glob(f"layer_{place:02d}-*model_states.pt")
            weight.data.copy_(read(str(path))[name])
