"""A process group that loses a member in an operation; three real processes over Gloo."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.callers import Callers
from recycle_plugin.runtime.collectives.gloo import GlooLink
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.collectives.link import Handle
from recycle_plugin.runtime.collectives.outcomes import Outcomes
from recycle_plugin.runtime.state.touch import FirstTouch
from tests.support.coordinator import generation
from tests.support.results import DIED
from tests.support.scenario import RANKS, Script, run

REDUCE = Instruction(Op.REDUCE, 0, None, 1)


def survives(script: Script, between_steps: bool) -> dict:
    """Sum ranks; then rank 2 dies, and the others go on, from inside a blocked operation."""
    rank, pair = script.rank, dist.new_group([0, 1])
    dist.all_reduce(whole := script.value())
    found = {"whole": whole.item(), "of each": of_each(rank)}
    script.say("through")
    if rank == 2:
        script.hear("through", 0, 1)  # what is of each member's own can't be had again
        script.die()
    contribution = script.value()
    if between_steps:
        dist.all_reduce(contribution)
    else:
        script.session.hooks.between_steps = None
        with script.session.thread.at_work(REDUCE), pytest.raises(Interrupted):
            dist.all_reduce(contribution)
        script.recover()
    dist.all_reduce(again := script.value())
    dist.barrier()
    dist.all_reduce(both := script.value(), group=pair)
    dist.broadcast(sent := torch.tensor([42.0 if rank == 0 else 0.0]), 0)
    swapped, lengths = torch.zeros(3), [1, 2] if rank == 0 else [2, 1]
    dist.group.WORLD.exchange(swapped, torch.arange(3.0) + 10 * rank, lengths, lengths)
    with pytest.raises(RecycleError) as refused:
        dist.broadcast(sent, 2)
    return found | {
        "blocked": contribution.item(),
        "survivors": (again.item(), both.item(), sent.item(), dist.get_world_size()),
        "exchanged": (dist.group.WORLD.live_position(), swapped.tolist()),
        "refused": str(refused.value),
    }


def of_each(rank: int) -> list[list[float]]:
    """What torch's collectives that give every member a part of its own leave, among all and in a group of one."""
    own, each = torch.arange(3.0) + 10 * rank, torch.zeros(3)
    alone = [dist.new_group([member]) for member in range(RANKS)][rank]
    gathered, part, swapped, single = torch.zeros(9), torch.zeros(1), torch.zeros(3), [torch.zeros(3)]
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(part, own)
    dist.all_to_all_single(swapped, own)
    dist.all_gather(single, own, group=alone)
    dist.reduce_scatter_tensor(each, own, group=alone)
    return [tensor.tolist() for tensor in (gathered, part, swapped, single[0], each)]


@pytest.mark.parametrize("between_steps", (False, True))
def test_survivors_leave_a_blocked_operation_and_go_on(between_steps):
    """In a step the operation breaks; between steps the survivors' own values are summed in a second try."""
    *living, died = run(partial(survives, between_steps=between_steps), RANKS, loses=True)
    assert died == DIED
    everybodys = [[10.0 * rank + place for place in range(3)] for rank in range(3)]
    for rank, found in enumerate(living):
        assert isinstance(found, dict), found
        columns, own = [each[rank] for each in everybodys], everybodys[rank]
        assert found.pop("of each") == [list(chain.from_iterable(everybodys)), [sum(columns)], columns, own, own]
        assert "broadcast from rank 2: that worker is lost" in found.pop("refused")
        assert found == {
            "whole": 6.0,
            "blocked": 3.0 if between_steps else rank + 1.0,
            "survivors": (3.0, 3.0, 42.0, RANKS),
            "exchanged": [((0, 2), [0.0, 10.0, 11.0]), ((1, 2), [1.0, 2.0, 12.0])][rank],
        }


def scattered_sums(script: Script) -> list:
    """Of tensors with any number of dimensions; none has ended the process."""
    found = []
    for shape in ((), (2,), (2, 3)):
        dist.reduce_scatter(
            held := torch.zeros(shape), [torch.full(shape, script.rank + 1.0 + part) for part in (0, 1)]
        )
        found.append((tuple(held.shape), held.unique().tolist()))
    return found


def test_parts_of_sums_have_any_number_of_dimensions():
    sums = [3.0], [5.0]
    assert run(scattered_sums, 2) == [[((), own), ((2,), own), ((2, 3), own)] for own in sums]


def odd_tensors(script: Script) -> list:
    """Sums of a sparse tensor, and of one of inference mode that is waited for outside of it."""
    dist.all_reduce(sparse := torch.eye(2).to_sparse() * (script.rank + 1))
    with torch.inference_mode():
        work = dist.all_reduce(inferred := script.value(), async_op=True)
    work.wait()
    return [sparse.to_dense().tolist(), inferred.item()]


def test_sparse_tensors_and_those_of_inference_mode_are_summed():
    assert run(odd_tensors, 2) == [[[[3.0, 0.0], [0.0, 3.0]], 3.0]] * 2


def unwritable(script: Script) -> list:
    """Nobody can write to an expanded tensor; the next sum is over before anybody waits for the one of that."""
    work = dist.all_reduce(script.value().expand(3), async_op=True)
    while not work._call.over:
        work._flight._notice(work._call)
    dist.all_reduce(total := script.value())
    said = []
    for _ in range(2):
        try:
            work.wait()
        except RuntimeError as error:
            said.append("written-to tensor" in str(error))
    return [total.item(), *said]


def test_a_result_that_cannot_be_written_is_the_error_of_its_own_call():
    assert run(unwritable, 2) == [[3.0, True, True]] * 2


def unfit(script: Script) -> list:
    """Each call is wrong on both, or on the root; the next sum is not."""
    said, parts = [], [torch.zeros(2)] * 3
    calls = [lambda: dist.all_gather(parts, torch.zeros(2)), lambda: dist.reduce_scatter(torch.zeros(2), parts)]
    if script.rank == 0:
        calls.append(lambda: dist.scatter(torch.zeros(2), parts, 0))
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    dist.all_reduce(total := script.value())
    return [total.item(), *said]


def test_tensors_that_do_not_fit_a_call_are_said_and_end_nobody():
    """Gloo's own check of a root's parts is not there, since the others get them by a broadcast."""
    (*found, scattered), other = run(unfit, 2)
    for total, gathered, summed in (found, other):
        assert total == 3.0 and "invalid output tensor list" in gathered and "Check failed" in summed
    assert "scatter_list needs 2 tensors like the output, one for each member, lost ones too" in scattered


def overtaken(script: Script, last: str) -> object:
    """Rank 0 is through with the first sum, and in the second, when rank 2 dies; rank 1 hears of the death before it
    hears that the first is over.
    """
    rank, start = script.rank, GlooLink.start

    def recover() -> None:
        GlooLink.start = start
        script.recover()

    script.session.hooks.between_steps = recover
    dist.barrier()

    def deaf(self, operation) -> Handle:
        """It takes part, and does not see the end."""
        start(self, operation)
        return Handle("a sum")

    GlooLink.start = deaf if rank == 1 else start
    if rank == 0:  # once rank 1 is refused, nobody is there any more to sum with
        threading.Thread(target=lambda: (script.hear("refused", 1), script.die()), daemon=True).start()
    try:
        held = first_sum(rank, last)
        if rank == 2:
            script.die()
        dist.all_reduce(own := torch.full((3,), 100.0 * (rank + 1)))
    except RecycleError:
        script.say("refused")
        raise
    return held.tolist(), own.tolist()


def first_sum(rank: int, last: str) -> torch.Tensor:
    held, gathered = torch.arange(1.0, 4.0) * (rank + 1), [torch.zeros(3) for _ in range(RANKS)]
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
    return held


FIRST = {
    "all_reduce": [6.0, 12.0, 18.0],
    "recv": [1.0, 2.0, 3.0],
    "all_gather": [6.0, 12.0, 18.0],
    "all_to_all_single": None,
}


@pytest.mark.parametrize("last", FIRST)
def test_who_hears_of_a_loss_before_the_end_of_a_sum_takes_no_other_for_it(last):
    """The sum has the lost worker's part, as everybody's has; what gives each member its own can't be had again."""
    *living, died = run(partial(overtaken, last=last), RANKS, loses=True)
    assert died == DIED
    if FIRST[last]:
        assert living == [(FIRST[last], [300.0] * 3)] * 2
    else:
        assert (
            "all_to_all_single was over on rank 0 but not on rank 1 when a worker was lost, and its result"
            in (living[1])
        )


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
