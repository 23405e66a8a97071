"""A script's collectives of what is on the device, asked for on one stream and waited for on another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from recycle_plugin.runtime.collectives import calls, group
from tests.support.coordinator import FakeCoordinator


@contextmanager
def beside(standin) -> Iterator[torch.Stream]:
    """A stream beside this process's own, which is a process group for itself."""
    standin.configure(late=5)
    coordinator = FakeCoordinator()
    group.register(coordinator.session(0))
    dist.init_process_group("recycle", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield torch.Stream(device=standin.NAME)
    finally:
        coordinator.close()


def test_asked_for_on_another_stream_than_waited_on(standin):
    with beside(standin) as side:
        with side:
            total = torch.full((4,), 3.0, device=standin.NAME)
            work = dist.all_reduce(total, async_op=True)
        work.wait()
        assert total.tolist() == [3.0] * 4


@pytest.mark.parametrize("way", ("looks", "asks for another"))
def test_its_result_comes_while_its_caller_is_on_another_stream(standin, way):
    with beside(standin) as side:
        total = torch.full((4,), 3.0, device=standin.NAME)
        work = dist.all_reduce(total, async_op=True)
        with side:
            if way == "looks":
                assert work.is_completed()
            else:
                dist.barrier()
        work.wait()
        assert total.tolist() == [3.0] * 4


def test_who_has_looked_may_read_it_at_once(standin):
    with beside(standin) as side:
        total = torch.full((4,), 3.0, device=standin.NAME)
        work = dist.all_reduce(total, async_op=True)
        with side:
            assert work.is_completed() and total.sum().item() == 12.0


def test_a_group_that_is_asked_for_by_a_device_belongs_to_none(standin):
    """As DeepSpeed asks on CUDA, and as scripts may: torch would ask the group for a backend of that device's."""
    coordinator, where = FakeCoordinator(), torch.device(standin.NAME, 0)
    session, own = coordinator.session(0), {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    calls.init_process_group(session, dist.init_process_group, "nccl", **own, device_id=where)
    try:
        alone = calls.new_group(session, dist.new_group, [0], device_id=where)
        for each in (dist.group.WORLD, alone):
            total = torch.full((4,), 3.0, device=standin.NAME)
            dist.all_reduce(total, group=each)
            assert total.tolist() == [3.0] * 4 and each.bound_device_id is None
        dist.barrier()
    finally:
        coordinator.close()
