"""The states of a process's random generators, which a newcomer takes over from another rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from recycle_plugin.runtime.devices.port import Device


def drawn(device: Device) -> tuple[Any, Any, list[torch.Tensor]]:
    """Return the states of all default random generators."""
    return random.getstate(), np.random.get_state(), [each.get_state() for each in device.generators]


def draw_on(device: Device, drawn: tuple[Any, Any, list[torch.Tensor]]) -> None:
    """Set all default random generators to the states ``drawn``."""
    python, numpy, torchs = drawn
    random.setstate(python)
    np.random.set_state(numpy)
    for generator, state in zip(device.generators, torchs):
        generator.set_state(state)
