"""What a replay makes is compared with what the lost worker, or the live one, has had of it."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace

import pytest
import torch

from recycle_plugin.runtime.worker.companion import KeptState, TorchCompanion
from recycle_plugin.runtime.worker.replay_machine import difference

HALF, SINGLE, QUARTER = torch.float16, torch.float32, torch.float8_e5m2
NOT_FINITE = "not finite where it had others"


@pytest.mark.parametrize(
    "made, sent, dtype, exact, how",
    (
        ([1.0, 2.0], [1.0, 2.0], SINGLE, True, ""),
        ([1.0, 2.001], [1.0, 2.0], SINGLE, False, ""),
        ([1.0, 2.001], [1.0, 2.0], SINGLE, True, "it differs by 0.001"),
        ([1.0, 2.1], [1.0, 2.0], SINGLE, False, "it differs by 0.1"),
        ([1.0, nan], [1.0, nan], SINGLE, True, ""),
        ([nan, nan], [1.0, 2.0], SINGLE, False, NOT_FINITE),
        ([nan, 2.0], [1.0, 2.0], SINGLE, True, NOT_FINITE),
        ([1.0, 2.0], [1.0, inf], SINGLE, True, NOT_FINITE),
        ([inf, 2.0], [1.0, 2.0], HALF, False, NOT_FINITE),
        ([inf, 2.0], [65000.0, 2.0], HALF, False, ""),  # one of them has just overflown
        ([65000.0, 2.0], [inf, 2.0], HALF, False, ""),
        ([1.0, 2.5], [1.0, 2.0], QUARTER, False, ""),  # the next number
        ([1.0, 2.5], [1.0, 2.0], QUARTER, True, "it differs by 0.5"),
        ([1.0, 3.0], [1.0, 2.0], QUARTER, False, "it differs by 1"),
        ([nan, 2.0], [1.0, 2.0], QUARTER, False, NOT_FINITE),
    ),
)
def test_boundary_tensors(made, sent, dtype, exact, how):
    found = difference((torch.tensor(made, dtype=dtype),), (torch.tensor(sent, dtype=dtype),), exact)
    assert how in found if how else not found, found


@pytest.mark.parametrize(
    "before, restored, now, how",
    (
        ([1.0, 2.0], [0.0, 0.0], [1.0, 2.001], ""),
        ([1.0, 2.0], [0.0, 0.0], [1.0, 4.0], "differ by 2"),
        ([1.0, 2.0], [0.0, 0.0], [1.0, nan], "differ by nan"),
        ([1.0, nan], [0.0, nan], [1.0, nan], ""),
        ([1.0, inf], [0.0, inf], [1.0, inf], ""),
    ),
)
def test_a_companions_weights(before, restored, now, how):
    companion, present = object.__new__(TorchCompanion), {"weights/w": torch.tensor(restored)}
    companion.state = SimpleNamespace(tensors=lambda following=True: present)
    companion._parts = SimpleNamespace(settings=SimpleNamespace(exact=False))
    kept = KeptState({"weights/w": torch.tensor(before)}, {}, None)
    companion._changed = companion._apart(kept)
    present["weights/w"] = torch.tensor(now)
    found = companion.otherwise(kept)
    assert how in found if how else not found, found
