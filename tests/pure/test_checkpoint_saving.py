"""What the workers say at the barriers of a saving, and what all make of it."""

from __future__ import annotations

import pytest

from recycle_plugin.core.messages.from_coordinator import BarrierPassed
from recycle_plugin.core.worker.checkpoint_saving import why_not


@pytest.mark.parametrize(
    "said, why",
    (
        ({}, ""),
        ({"10": "no room", "9": "no folder"}, "no folder; no room"),
        ({"0": "no room on a", "1": "no room on a"}, "no room on a"),
    ),
)
def test_all_reasons_are_told_each_once_by_rank(said, why):
    assert why_not(BarrierPassed("the end of x", said, 3)) == why
