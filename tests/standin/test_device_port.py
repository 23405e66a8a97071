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


def test_a_lane_has_a_stream_of_its_own_however_many_torch_has_given_until_it_is_left(device):
    """torch has 32, and then gives the first again."""
    module, lanes = torch.get_device_module(device.where), [device.lane() for _ in range(20)]
    for _ in range(40 - 23):
        module.Stream(device.where)
    lanes += [device.lane() for _ in range(9)]
    streams = [lane._stream for lane in lanes]
    assert len({*streams, device._down, device._up, device._apart}) == 32
    for lane in lanes[:5]:
        lane.leave()
    assert {device.lane()._stream for _ in range(5)} == {*streams[:5]}
    shared = [device.lane() for _ in range(len(streams))]
    assert {lane._stream for lane in shared} == {*streams}, "with none left one is shared, but not with copies"
    shared[0].leave()
    assert device.lane()._stream == shared[0]._stream, "of which the other user is still there"
    assert device.lane()._stream in streams
