"""The accelerator behind the Device port passes what every device does (tests/support/device_port.py)."""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import Device
from tests.support.device_port import *  # noqa: F403  tests


def accelerator() -> Device:
    """The stand-in, whose copies come about at a seeded moment."""
    from tests.support import standin

    standin.configure(late=11)
    return device_of(torch.device(standin.NAME))


class InTheChild:
    """What is the accelerator in the process that runs a test."""

    def __reduce__(self) -> tuple:
        return accelerator, ()


@pytest.fixture
def device(standin) -> InTheChild:
    return InTheChild()
