"""Where a plain iterator stands: counted over all steps, and taken over by a worker whose own one begins anew."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.plan import Policy
from recycle_plugin.core.sources import Standing
from recycle_plugin.core.topology import Topology
from recycle_plugin.planner import plan
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.supply import Supply

MICRO_BATCHES = 3


@pytest.fixture
def supply() -> Supply:
    """Of replica 0's first stage; nobody is there to hear of its batches, and ``read`` has the numbers that its iterator has given."""
    members = [SimpleNamespace(seat=Seat(replica, stage), address=f"{replica}.{stage}") for replica in range(2) for stage in range(2)]
    session = SimpleNamespace(
        is_committed=lambda step: False, generation=SimpleNamespace(members=members), at_work=lambda what: nullcontext(),
        heart=SimpleNamespace(at=lambda where, what: nullcontext()),
    )  # fmt: skip
    transport = SimpleNamespace(send=lambda *sent: None, collect=lambda kind: {})
    read = []

    def draw(what: str) -> tuple[torch.Tensor, torch.Tensor]:
        read.append(len(read))
        return torch.tensor(read[-1]), torch.tensor(-1)

    made = Supply(session, transport, Seat(0, 0), draw)
    made.read = read
    made.stand(Standing(plan(Topology(2, 2, MICRO_BATCHES).full(), CostModel.uniform(2), Policy()), {}, {}, {}))
    return made


def test_batches_are_counted_over_steps_and_checkpoints(supply):
    for step in (1, 2):
        supply.provide(step)
        supply.provide(step)  # what is here is not drawn again
    assert supply.batches_read() == len(supply.read) == 2 * MICRO_BATCHES
    supply.rewind()
    supply.provide(1)
    assert supply.batches_read() == len(supply.read) == 3 * MICRO_BATCHES


def test_an_iterator_that_begins_anew_goes_on_where_another_stood(supply):
    supply.skip_to(4)
    assert supply.read == [0, 1, 2, 3]
    supply.provide(3)
    assert supply.read[4:] == [4, 5, 6] and supply.batches_read() == 7
    supply.skip_to(7)
    assert len(supply.read) == 7


def test_it_does_not_go_back(supply):
    supply.provide(1)
    with pytest.raises(RecycleError, match="the data iterator of seat 0.0 has given 3 batches, and is to stand behind 2: it can't be read again"):
        supply.skip_to(2)
