"""The accelerator behind the Device port passes what every device does (tests/runtime/test_device.py)."""

from __future__ import annotations

import inspect

import pytest
import torch

from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import Device
from tests.runtime import test_device


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


GIVEN = {"device", "dtype", "shared"}  # what these tests ask for, and can be handed to a process
PORT = {
    name: test
    for name, test in vars(test_device).items()
    if name.startswith("test_") and "device" in inspect.signature(test).parameters
}
globals().update({name: test for name, test in PORT.items() if {*inspect.signature(test).parameters} <= GIVEN})
