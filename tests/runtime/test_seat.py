"""What a call inside a layer does if its operation fails, over Gloo in a group of one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.collectives.asked import Asked
from recycle_plugin.runtime.collectives.gloo import GlooLink, Rendezvous
from recycle_plugin.runtime.collectives.link import AllReduce
from recycle_plugin.runtime.collectives.seat import SeatLink
from tests.support.coordinator import generation
from tests.support.members import LONG_S


def test_what_the_link_cannot_run_is_said_at_once_as_it_is(coordinator):
    """Nobody is lost, so there is no news to wait for."""
    session = coordinator.session(0)
    coordinator.tell(generation(1, [0]))
    session.view.adopt(session.waiting.until("the generation", session.view.interruption, interruptible=False))

    def opened(name: str) -> GlooLink:
        return GlooLink(1, Rendezvous(session, name, [0]), "rank 0", "127.0.0.1", timedelta(seconds=LONG_S))

    odd = torch.zeros(3, dtype=torch.int16)
    asked = Asked("all_reduce", lambda held, place: AllReduce(held, torch.distributed.ReduceOp.SUM), [odd])
    with pytest.raises(RuntimeError, match="Invalid scalar type") as refused:
        SeatLink(session, (0,), opened).run(asked)
    assert not isinstance(refused.value, WaitTimeout)
