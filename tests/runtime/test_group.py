"""A process group that loses a member in an operation; three real processes over Gloo."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from recycle_plugin.runtime.collectives.callers import Callers
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.collectives.outcomes import Outcomes
from recycle_plugin.runtime.state.touch import FirstTouch
from tests.support.coordinator import FakeCoordinator, generation

RANKS = 3


def worker(rank: int, port: int, store_port: int, results, between_steps: bool) -> None:
    """Sum ranks; then rank 2 dies, and the others go on, one of them from inside a blocked operation."""
    import torch
    import torch.distributed as dist

    from recycle_plugin.core.worker.executor import Interrupted
    from recycle_plugin.errors import RecycleError
    from recycle_plugin.runtime.collectives import group
    from recycle_plugin.runtime.control.connections import connect
    from recycle_plugin.runtime.control.session import Session
    from tests.support.secret import SECRET, way

    session = Session(connect(way(("127.0.0.1", port)), 10), rank, SECRET, wait_timeout_s=8)
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
        session.hooks.between_steps = lambda: session.view.adopt(session.view.pending)
        dist.all_reduce(contribution)
        results.put((rank, "interrupted", contribution.item()))
    else:
        try:
            dist.all_reduce(contribution)
        except Interrupted:
            results.put((rank, "interrupted", None))
        session.view.adopt(session.view.pending)
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
        process = context.Process(
            target=worker, args=(rank, coordinator.address[1], store_port, results.queue, between_steps), daemon=True
        )
        process.start()
        processes.append(process)
    for _ in range(RANKS):
        coordinator.accept()
    assert results.of("whole", {0, 1, 2}) == dict.fromkeys(range(3), 6.0)
    everybodys = [[10.0 * rank + place for place in range(3)] for rank in range(3)]
    for rank, found in results.of("of each", {0, 1, 2}).items():
        columns = [own[rank] for own in everybodys]
        assert found == [
            list(chain.from_iterable(everybodys)),
            [sum(columns)],
            columns,
            everybodys[rank],
            everybodys[rank],
        ]
    processes[2].join(30)
    coordinator.tell(generation(1, [0, 1]))
    assert results.of("interrupted", {0, 1}) == dict.fromkeys(range(2), expected)
    assert results.of("survivors", {0, 1}) == dict.fromkeys(range(2), (3.0, 3.0, 42.0, RANKS))
    assert results.of("exchanged", {0, 1}) == {0: ((0, 2), [0.0, 10.0, 11.0]), 1: ((1, 2), [1.0, 2.0, 12.0])}
    assert set(results.of("refused", {0, 1}).values()) == {"cannot broadcast from rank 2: that worker is lost"}
    coordinator.close()


def overtaken(rank: int, port: int, store_port: int, results, last: str) -> None:
    """Rank 0 is through with the first sum, and in the second, when rank 2 dies; rank 1 hears of the death before it
    hears that the first is over.
    """
    import torch
    import torch.distributed as dist

    from recycle_plugin.errors import RecycleError
    from recycle_plugin.runtime.collectives import group
    from recycle_plugin.runtime.collectives.gloo import GlooLink
    from recycle_plugin.runtime.collectives.link import Handle
    from recycle_plugin.runtime.control.connections import connect
    from recycle_plugin.runtime.control.session import Session
    from tests.support.secret import SECRET, way

    session = Session(connect(way(("127.0.0.1", port)), 10), rank, SECRET, wait_timeout_s=10)
    group.register(session)
    store = dist.TCPStore("127.0.0.1", store_port, None, rank == 0, wait_for_workers=False)
    dist.init_process_group("recycle", store=store, rank=rank, world_size=RANKS)

    def recover() -> None:
        GlooLink.start = start
        session.view.adopt(session.view.pending)

    session.hooks.between_steps = recover
    dist.barrier()
    start = GlooLink.start

    def deaf(self, operation) -> Handle:
        """It takes part, and does not see the end."""
        start(self, operation)
        return Handle("a sum")

    GlooLink.start = deaf if rank == 1 else start
    held = torch.arange(1.0, 4.0) * (rank + 1)
    gathered = [torch.zeros(3) for _ in range(RANKS)]
    try:
        match last:
            case "all_reduce":
                dist.all_reduce(held)
            case "all_gather":
                dist.all_gather(gathered, held)
                held = torch.stack(gathered).sum(0)
            case "all_to_all_single":
                dist.all_to_all_single(torch.zeros(3), held)
            case "recv" if rank < 2:
                dist.send(held, 1) if rank == 0 else dist.recv(held, 0)
        if rank == 2:
            results.put((rank, "over", None))
            results.close()
            results.join_thread()
            os.kill(os.getpid(), signal.SIGKILL)
        own = torch.full((3,), 100.0 * (rank + 1))
        dist.all_reduce(own)
        results.put((rank, "both", (held.tolist(), own.tolist())))
    except RecycleError as error:
        results.put((rank, "both", str(error)))
    results.close()
    results.join_thread()
    os._exit(0)


FIRST = {
    "all_reduce": [6.0, 12.0, 18.0],
    "recv": [1.0, 2.0, 3.0],
    "all_gather": [6.0, 12.0, 18.0],
    "all_to_all_single": None,
}


@pytest.mark.parametrize("last", FIRST)
def test_who_hears_of_a_loss_before_the_end_of_a_sum_takes_no_other_for_it(processes, last):
    """The sum has the lost worker's part, as everybody's has; what gives each member its own can't be had again."""
    from tests.support.cluster import free_port

    coordinator, context = FakeCoordinator(), multiprocessing.get_context("spawn")
    results, store_port = Results(context), free_port()
    for rank in range(RANKS):
        process = context.Process(
            target=overtaken, args=(rank, coordinator.address[1], store_port, results.queue, last), daemon=True
        )
        process.start()
        processes.append(process)
    for _ in range(RANKS):
        coordinator.accept()
    results.of("over", {2})
    processes[2].join(30)
    coordinator.tell(generation(1, [0, 1]))
    if FIRST[last]:
        assert results.of("both", {0, 1}) == dict.fromkeys(range(2), (FIRST[last], [300.0] * 3))
    else:
        assert results.of("both", {1})[1].startswith(
            "all_to_all_single was over on rank 0 and not on rank 1 when a worker was lost, and its result"
        )
    coordinator.close()


COLLECTIVES = {
    "allreduce": lambda group, weight: group.allreduce([weight]),
    "broadcast": lambda group, weight: group.broadcast([weight], dist.BroadcastOptions()),
    "allgather": lambda group, weight: group.allgather([[torch.zeros(3)]], [weight]),
    "gather": lambda group, weight: group.gather([[torch.zeros(3)]], [weight], dist.GatherOptions()),
    "scatter": lambda group, weight: group.scatter([weight], [[torch.zeros(3)]], dist.ScatterOptions()),
    "reduce": lambda group, weight: group.reduce([weight], dist.ReduceOptions()),
    "all_gather_single": lambda group, weight: group.all_gather_single(torch.zeros(3), weight),
    "reduce_scatter_single": lambda group, weight: group.reduce_scatter_single(
        torch.zeros(3), weight, dist.ReduceScatterOptions()
    ),
    "all_to_all_single": lambda group, weight: group.all_to_all_single(
        torch.zeros(3), weight, [], [], dist.AllToAllOptions()
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_the_script_over_parameters_waits_for_their_commit(coordinator, name):
    session, weight, settled = coordinator.session(0), torch.ones(3), []

    def settle() -> None:
        with touch.lifted():
            settled.append(True)

    touch = FirstTouch(lambda: [weight], lambda: bool(settled), settle)
    coordinator.tell(generation(1, [0]))
    session.waiting.until("the start", lambda: session.view.pending, interruptible=False)
    session.view.adopt(session.view.pending)
    alone = SimpleNamespace(
        group_rank=0,
        group_size=1,
        group_id="alone",
        store=dist.HashStore(),
        timeout=timedelta(seconds=30),
        global_ranks_in_group=[0],
    )
    group = MemberGroup(session, Callers(session), Outcomes(session), alone)
    with touch.lifted():
        pass
    try:
        group.allreduce([torch.ones(3)])
        assert not settled
        COLLECTIVES[name](group, weight)
        assert settled
    finally:
        settle()  # nothing stays on this thread's stack of modes
