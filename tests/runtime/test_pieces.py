"""Large tensors of a device in host memory, piece by piece (runtime/devices/pieces.py)."""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.runtime.devices import pieces
from recycle_plugin.runtime.devices.pieces import on_the_host
from tests.support.late_device import LateDevice


@pytest.fixture
def late(monkeypatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(pieces, "device_of", lambda where: device)
    return device


@pytest.mark.parametrize("size", (0, 1, 3, 4, 9))
@pytest.mark.parametrize("ahead", (0, 1, 4))
def test_all_pieces_come_in_order_of_all_tensors_alike(late, size, ahead):
    one, other = torch.arange(size), torch.arange(size) * 10
    found = list(on_the_host((one, other), 3, "a sum", ahead))
    assert [len(piece) for piece, _ in found] == [3] * (size // 3) + [size % 3] * (size % 3 > 0)
    assert torch.equal(torch.cat([torch.empty(0, dtype=one.dtype), *(piece for piece, _ in found)]), one)
    assert torch.equal(torch.cat([torch.empty(0, dtype=one.dtype), *(piece for _, piece in found)]), other)


def test_the_next_pieces_are_on_their_way_while_one_is_used_and_no_more_of_them(late):
    coming = on_the_host((torch.arange(30),), 3, "a sum", ahead=4)
    for taken in range(1, 6):
        next(coming)
        assert len(late.asked) == taken + 5
    assert sum(1 for _ in coming) == 5 and len(late.asked) == 10


def test_of_no_tensor_there_is_no_piece(late):
    assert list(on_the_host((), 3, "a sum")) == []
