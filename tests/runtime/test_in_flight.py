"""Operations that a script has started and not yet waited for, in health and over the loss of a member; two or three
real processes over Gloo.

Each test is a scenario that every rank runs; in some rank 2 dies, of which the others hear from the test.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.errors import RecycleError
from tests.support.results import DIED
from tests.support.scenario import WAIT_S, Script, run

LARGE = 1 << 18  # 1 MiB: more than the system's buffers hold, and as much as is kept for others


# --- nobody is lost ----------------------------------------------------------------------------------


def goes_on(script: Script) -> tuple[float, float]:
    """Rank 1 starts the sum only when it has what rank 0 sends after it has started it."""
    total, message = script.value(), script.value()
    if script.rank == 0:
        work = dist.all_reduce(total, async_op=True)
        dist.send(message, 1)
        work.wait()
    else:
        dist.recv(message, 0)
        dist.all_reduce(total)
    return total.item(), message.item()


def test_a_collective_that_is_asked_for_later_does_not_block():
    assert run(goes_on, 2) == [(3.0, 1.0)] * 2


def polled(script: Script) -> tuple[float, list[bool]]:
    """Nobody waits: both look whether it is over until it is."""
    held, peer = torch.zeros(LARGE), 1 - script.rank
    works = [dist.irecv(held, peer), dist.isend(script.value(LARGE), peer)]
    works.append(dist.all_reduce(script.value(), async_op=True))
    deadline = time.monotonic() + WAIT_S
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        os.sched_yield()
    return held.mean().item(), [work.is_completed() for work in works]


def test_who_looks_sees_the_end():
    assert run(polled, 2) == [(2.0, [True] * 3), (1.0, [True] * 3)]


def received_from_anyone(script: Script) -> list[tuple[int, float]]:
    if script.rank:
        dist.isend(script.value(), 0, tag=2)  # of which nobody keeps the handle
        dist.barrier()
        return []
    found = []
    for _ in range(2):
        held = torch.zeros(1)
        found.append((dist.recv(held, tag=2), held.item()))
    dist.barrier()
    return sorted(found)


def test_a_message_from_whoever_sends_one():
    assert run(received_from_anyone, 3) == [[(1, 2.0), (2, 3.0)], [], []]


def two_receives(script: Script) -> tuple[str, float]:
    if script.rank:
        script.hear("asked", 0)
        dist.send(script.value(), 0)
        return "", 0.0
    held, other = torch.zeros(1), torch.zeros(1)
    work = dist.irecv(held)
    try:
        dist.irecv(other, 1)
        said = ""
    except RecycleError as error:
        said = str(error)
    script.say("asked")
    work.wait()
    return said, held.item()


def test_which_of_two_receives_has_a_message_must_be_clear():
    (said, got), _ = run(two_receives, 2)
    assert said.startswith(
        "torch.distributed.recv with tag 0 while another one is under way, one of them from any source: wait for "
        "that one first"
    )
    assert got == 2.0


def backwards(script: Script) -> list[float]:
    """Of all kinds, waited for from the last one on; the first ones' results are there too when all is over."""
    held = [script.value(), script.value(LARGE), script.value(), torch.zeros(1), torch.zeros(2)]
    works = [
        dist.all_reduce(held[0], async_op=True),
        dist.all_reduce(held[1], dist.ReduceOp.MAX, async_op=True),
        dist.broadcast(held[2], 1, async_op=True),
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2), async_op=True),
        dist.all_gather_into_tensor(held[4], script.value(), async_op=True),
    ]
    works[-1].wait()
    for work in reversed(works[1:]):
        work.wait()
    dist.barrier()
    works[0].wait()
    return [each.sum().item() / each.numel() for each in held]


def test_the_order_of_waits_is_free():
    assert run(backwards, 2) == [[3.0, 2.0, 2.0, 0.0, 1.5]] * 2


def sums_between(script: Script) -> tuple[float, float]:
    """Rank 1 asks for the script's sum only after the plugin's own, as somebody does who was still in the step when
    another had left it.
    """
    asked, own, later = script.value(), 10 * script.value(), script.rank == 1
    work = None if later else dist.all_reduce(asked, async_op=True)
    with script.session.thread.at_work(Instruction.parse("1REDUCE@1")):
        dist.all_reduce(own)
    (dist.all_reduce(asked, async_op=True) if later else work).wait()
    return asked.item(), own.item()


def test_the_plugins_own_sums_are_no_others():
    assert run(sums_between, 2) == [(3.0, 30.0)] * 2


LARGEST_HALF = 65504.0  # of fp16


def means_of_halves(script: Script) -> list[Any]:
    """By ``all_reduce``, ``reduce``, within the plugin's own sums and by ``reduce_scatter``: of numbers whose sum is
    too large for fp16; and the largest error of bf16 numbers' average.
    """
    large = [torch.full((2,), LARGEST_HALF, dtype=torch.float16) for _ in range(5)]
    dist.reduce_scatter(large[3], [large[0].clone() for _ in range(3)], dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(large[4], torch.cat([large[0]] * 3), dist.ReduceOp.AVG)
    dist.all_reduce(large[0], dist.ReduceOp.AVG)
    dist.reduce(large[1], 0, dist.ReduceOp.AVG)
    with script.session.thread.at_work(Instruction.parse("1REDUCE@1")):
        dist.all_reduce(large[2], dist.ReduceOp.AVG)
    of_all = (1 + torch.rand(3, 1000, generator=torch.Generator().manual_seed(5))).bfloat16()
    fine = of_all[script.rank].clone()
    dist.all_reduce(fine, dist.ReduceOp.AVG)
    return [*(each.unique().tolist() for each in large), (fine - of_all.float().mean(0).bfloat16()).abs().max().item()]


def test_averages_in_half_precision_are_summed_in_fp32():
    """fp16 would overflow, and bf16 would round each sum."""
    assert run(means_of_halves, 3) == [[[LARGEST_HALF]] * 5 + [0.0]] * 3


# --- a member is lost --------------------------------------------------------------------------------


def in_flight(script: Script) -> Any:
    """Two sums and two messages, started when rank 2 is there and over when it is not; of the two others one waits for
    nothing before the other has all.
    """
    rank, peer = script.rank, 1 - script.rank
    dist.barrier()
    if rank == 2:
        script.hear("started", 0, 1)
        script.die()
    first, second, got = script.value(LARGE), script.value(), torch.zeros(LARGE)
    works = [
        dist.all_reduce(first, async_op=True),
        dist.irecv(got, peer),
        dist.all_reduce(second, dist.ReduceOp.AVG, async_op=True),
        dist.isend(script.value(LARGE), peer),
    ]
    script.say("started")
    before = [first[0].item(), second.item()]
    if rank == 1:
        script.recover()
        script.hear("has all", 0)
    for work in works if rank else reversed(works):
        work.wait()
    script.say("has all")
    third = script.value()
    dist.all_reduce(third)
    return before, [first.unique().tolist(), second.tolist(), got.unique().tolist(), third.tolist()]


def test_what_is_in_flight_survives_a_loss():
    """It starts again among the live in the order of the calls, whoever waits for it, and in which order."""
    own = [1.0, 2.0]
    assert run(in_flight, 3, loses=True) == [
        ([own[rank], own[rank]], [[3.0], [1.5], [own[1 - rank]], [3.0]]) for rank in range(2)
    ] + [DIED]


def polled_over_a_loss(script: Script) -> float | str:
    dist.barrier()
    if script.rank == 2:
        script.hear("started", 0, 1)
        script.die()
    total = script.value()
    work = dist.all_reduce(total, async_op=True)
    script.say("started")
    deadline = time.monotonic() + WAIT_S
    while not work.is_completed():
        if time.monotonic() > deadline:
            return "never"
    return total.item()


def test_who_only_looks_survives_a_loss_too():
    assert run(polled_over_a_loss, 3, loses=True) == [3.0, 3.0, DIED]


def asked_too_late(script: Script) -> Any:
    """Rank 2 is through with a broadcast from it when rank 3 dies; rank 1, to which another one would hand it on, asks
    for it only when it has heard of the death.
    """
    dist.barrier()
    held, total = script.value(), script.value()
    work = None if script.rank == 1 else dist.broadcast(held, 2, async_op=True)
    if script.rank == 3:
        script.hear("through", 2)
        script.die()
    if script.rank == 2:
        work.wait()
        script.say("through")
    script.recover()
    (work or dist.broadcast(held, 2, async_op=True)).wait()
    dist.all_reduce(total)
    return held.item(), total.item()


def test_who_asks_when_the_others_are_through_has_their_result():
    assert run(asked_too_late, 4, loses=True) == [(3.0, 6.0)] * 3 + [DIED]


def broken_off(script: Script) -> Any:
    """Inside a step: a sum of the script's that it waits for there, and the plugin's own, in buffers that were made for
    it.
    """
    dist.barrier()
    contribution, seen = script.value(LARGE), []
    asked = script.value(LARGE)
    with script.session.thread.at_work(Instruction.parse("1REDUCE@1")):
        dist.all_reduce(contribution.clone())
    if script.rank == 2:
        script.hear("started", 0, 1)
        script.die()
    work = dist.all_reduce(asked, async_op=True)
    script.say("started")
    script.session.hooks.between_steps = None
    with script.session.thread.at_work(Instruction.parse("1REDUCE@1")):
        for wait in (lambda: dist.all_reduce(contribution.clone()), work.wait):
            try:
                wait()
            except Interrupted:
                seen.append((contribution.unique().tolist(), asked.unique().tolist()))
        script.recover()
        total = contribution.clone()
        dist.all_reduce(total)
    script.session.hooks.between_steps = script.recover
    work.wait()
    return seen, total.unique().tolist(), asked.unique().tolist()


def test_what_is_broken_off_leaves_nothing_half_done():
    """The plugin's sum is made again, of contributions that nobody has changed; the script's has its old value until it
    has the new one.
    """
    own = [1.0, 2.0]
    assert run(broken_off, 3, loses=True) == [([([own[rank]], [own[rank]])] * 2, [3.0], [3.0]) for rank in range(2)] + [
        DIED
    ]
