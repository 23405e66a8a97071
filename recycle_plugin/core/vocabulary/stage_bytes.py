"""The memory of one stage as a run of the user's model has measured it, for ``recycle doctor`` (docs/planning.md): the
objects under ``memory`` in its ``costs.json``. The bytes that a micro-batch holds are beside them, as
``activation_bytes`` and ``pending_bytes`` of a :class:`~recycle_plugin.core.vocabulary.cost.CostModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from recycle_plugin.core.vocabulary.cost import MOST_BYTES
from recycle_plugin.core.vocabulary.cut_text import shown

HOST = "cpu"


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one worker of a stage after its first step.

    What a step changes: ``weights`` that are trained, their fp32 ``masters`` in bf16 and fp16, and the ``optimizer``'s
    state and all else. ``frozen``: parameters that are not trained, and buffers. ``gradient``: one of all trained
    parameters, as it is summed; the largest parameter's has ``largest`` bytes. ``boundary``: what goes to the next
    stage for one micro-batch. ``device``: torch's name for the kind of device; it has ``device_bytes``, and its host
    ``host_bytes``. ``samples``: of a micro-batch. Raises ValueError for a size that can't be.
    """

    weights: int
    masters: int
    optimizer: int
    frozen: int
    gradient: int
    largest: int
    boundary: int
    device: str
    device_bytes: int
    host_bytes: int
    samples: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "device":
                if not isinstance(value, str):
                    raise ValueError(f"memory.device is {shown(value)}: write a name")
            elif type(value) is not int or not 0 <= value <= MOST_BYTES:
                raise ValueError(f"memory.{field.name} is {shown(value)}: write a whole number from 0 to {MOST_BYTES}")

    @property
    def state(self) -> int:
        """What a step changes."""
        return self.weights + self.masters + self.optimizer

    @property
    def apart(self) -> bool:
        """Whether the device's memory is not the host's."""
        return self.device != HOST


def stages_bytes(found: Any, stages: int) -> tuple[StageBytes, ...]:
    """Return the bytes of each of ``stages`` stages from their JSON. Raises ValueError if it is malformed."""
    wanted = {field.name for field in fields(StageBytes)}
    if not isinstance(found, Sequence) or len(found) != stages:
        raise ValueError(f"memory is no list with an object for each of {stages} stages")
    for each in found:
        if not isinstance(each, dict) or each.keys() != wanted:
            raise ValueError(f"memory has an entry whose keys are not {', '.join(sorted(wanted))}")
    return tuple(StageBytes(**each) for each in found)
