"""A worker's report of its stage's memory, measured after the first step, for ``recycle doctor``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.held_bytes import HeldBytes
from recycle_plugin.runtime.stage.ports import Framework
from recycle_plugin.runtime.state.stage_state import StageState


def stage_bytes(framework: Framework, state: StageState, held: HeldBytes) -> dict[str, Any]:
    """Return the bytes of a worker of this stage, with the ``activation`` and ``pending`` bytes of a micro-batch."""
    assert held.activation is not None and held.boundary is not None, "a micro-batch was counted"
    model = framework.model
    changed = state.tensors()
    parts = {
        name: _bytes(state.parts[name].tensors().values()) for name in ("weights", "masters") if name in state.parts
    }
    summed = [each.numel() * each.element_size() for each in framework.gradients.parameters]
    module = model.module
    return {
        "activation": held.activation,
        "pending": held.pending or 0,
        **asdict(
            StageBytes(
                parts["weights"],
                parts.get("masters", 0),
                _bytes(changed.values()) - sum(parts.values()),
                _bytes((*module.parameters(), *module.buffers())) - parts["weights"],
                sum(summed),
                max(summed, default=0),
                0 if model.last else held.boundary,
                model.device.kind,
                model.device.memory().total,
                CPU.memory().total,
                framework.micro_batch_size,
            )
        ),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
