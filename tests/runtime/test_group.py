"""A process group that loses a member in an operation; three real processes over Gloo."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.multiprocessing as multiprocessing

from .conftest import FakeCoordinator, generation

RANKS = 3


def worker(rank: int, port: int, store_port: int, results, between_steps: bool) -> None:
    """Sum ranks; then rank 2 dies, and the others go on, one of them from inside a blocked operation."""
    import torch
    import torch.distributed as dist

    from recycle_plugin.core.executor import Interrupted
    from recycle_plugin.runtime import group
    from recycle_plugin.runtime.errors import RecycleError
    from recycle_plugin.runtime.session import Session

    session = Session(("127.0.0.1", port), rank, wait_timeout_s=8)
    group.register(session)
    store = dist.TCPStore("127.0.0.1", store_port, None, rank == 0, wait_for_workers=False)
    dist.init_process_group("recycle", store=store, rank=rank, world_size=RANKS)
    pair = dist.new_group([0, 1])
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    results.put((rank, "whole", total.item()))
    results.put((rank, "of each", of_each(dist, rank)))
    if rank == 2:
        results.close()
        results.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)
    contribution = torch.tensor([float(rank + 1)])
    if between_steps:
        session.between_steps = lambda: session.adopt(session.pending)
        dist.all_reduce(contribution)
        results.put((rank, "interrupted", contribution.item()))
    else:
        try:
            dist.all_reduce(contribution)
        except Interrupted:
            results.put((rank, "interrupted", None))
        session.adopt(session.pending)
    again = torch.tensor([float(rank + 1)])
    dist.all_reduce(again)
    dist.barrier()
    both = torch.tensor([float(rank + 1)])
    dist.all_reduce(both, group=pair)
    sent = torch.tensor([42.0 if rank == 0 else 0.0])
    dist.broadcast(sent, 0)
    swapped = torch.zeros(3)
    lengths = [1, 2] if rank == 0 else [2, 1]
    dist.group.WORLD.exchange(swapped, torch.arange(3.0) + 10 * rank, lengths, lengths)
    results.put((rank, "exchanged", (dist.group.WORLD.live_position(), swapped.tolist())))
    results.put((rank, "survivors", (again.item(), both.item(), sent.item(), dist.get_world_size())))
    try:
        dist.broadcast(sent, 2)
    except RecycleError as error:
        results.put((rank, "refused", str(error)))
    results.close()
    results.join_thread()
    os._exit(0)


def of_each(dist, rank: int) -> list[list[float]]:
    """What torch's collectives that give every member a part of its own leave, among all and in a group of one."""
    import torch

    own, each = torch.arange(3.0) + 10 * rank, torch.zeros(3)
    alone = [dist.new_group([member]) for member in range(RANKS)][rank]
    gathered, part, swapped, single = torch.zeros(9), torch.zeros(1), torch.zeros(3), [torch.zeros(3)]
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(part, own)
    dist.all_to_all_single(swapped, own)
    dist.all_gather(single, own, group=alone)
    dist.reduce_scatter_tensor(each, own, group=alone)
    return [tensor.tolist() for tensor in (gathered, part, swapped, single[0], each)]


@pytest.fixture
def processes():
    started = []
    yield started
    for process in started:
        process.kill()
        process.join(10)


class Results:
    """What the workers say, kept until it is asked for."""

    def __init__(self, context) -> None:
        self.queue = context.Queue()
        self._found: dict[str, dict[int, object]] = {}

    def of(self, kind: str, ranks: set[int]) -> dict[int, object]:
        found = self._found.setdefault(kind, {})
        while set(found) < ranks:
            rank, what, value = self.queue.get(timeout=60)
            self._found.setdefault(what, {})[rank] = value
        return found


@pytest.mark.parametrize(("between_steps", "expected"), [(False, None), (True, 3.0)])
def test_survivors_leave_a_blocked_operation_and_go_on(processes, between_steps, expected):
    """In a step the operation breaks; between steps the survivors' own values are summed in a second try."""
    from tests.support.cluster import free_port

    coordinator, context = FakeCoordinator(), multiprocessing.get_context("spawn")
    results, store_port = Results(context), free_port()
    for rank in range(RANKS):
        process = context.Process(target=worker, args=(rank, coordinator.address[1], store_port, results.queue, between_steps), daemon=True)
        process.start()
        processes.append(process)
    for _ in range(RANKS):
        coordinator.accept()
    assert results.of("whole", {0, 1, 2}) == dict.fromkeys(range(3), 6.0)
    everybodys = [[10.0 * rank + place for place in range(3)] for rank in range(3)]
    for rank, found in results.of("of each", {0, 1, 2}).items():
        columns = [own[rank] for own in everybodys]
        assert found == [sum(everybodys, []), [sum(columns)], columns, everybodys[rank], everybodys[rank]]
    processes[2].join(30)
    coordinator.tell(generation(1, [0, 1]))
    assert results.of("interrupted", {0, 1}) == dict.fromkeys(range(2), expected)
    assert results.of("survivors", {0, 1}) == dict.fromkeys(range(2), (3.0, 3.0, 42.0, RANKS))
    assert results.of("exchanged", {0, 1}) == {0: ((0, 2), [0.0, 10.0, 11.0]), 1: ((1, 2), [1.0, 2.0, 12.0])}
    assert set(results.of("refused", {0, 1}).values()) == {"cannot broadcast from rank 2: that worker is lost"}
    coordinator.close()


def test_a_link_that_connects_late_leaves_the_next_ones_connections_alone() -> None:
    """A member of the first generation comes only when the second has long connected, in the same processes; all this is one here."""
    import torch
    import torch.distributed as dist

    from recycle_plugin.runtime.errors import RecycleError
    from recycle_plugin.runtime.group import Link, _sockets

    def listening() -> int:
        return sum(port > 0 for port in _sockets().values())

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    first, second = ([Link(number, dist.PrefixStore(str(number), store), place, 2, "127.0.0.1", timedelta(seconds=30)) for place in (0, 1)] for number in (1, 2))
    with ThreadPoolExecutor(4) as threads:
        before, deadline = listening(), time.monotonic() + 30
        early = threads.submit(first[0].connected)
        while listening() == before:
            assert time.monotonic() < deadline, "the first link does not listen"
        groups = [each.result(30) for each in [threads.submit(link.connected) for link in second]]
        for link in first:
            link.abandon()
        for attempt in (early, threads.submit(first[1].connected)):
            with pytest.raises(RecycleError, match="this membership has passed"):
                attempt.result(30)
        held = [torch.ones(1), torch.ones(1)]
        for work in [group.allreduce([tensor]) for group, tensor in zip(groups, held)]:
            work.wait(timedelta(seconds=30))
    assert [tensor.item() for tensor in held] == [2.0, 2.0]
