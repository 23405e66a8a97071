"""Slow workers: who counts as one, who no longer does, and that noise changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator.facts.slowness import PATIENCE_S, WIDTH, Slowness
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import Committed, Generation
from recycle_plugin.core.messages.from_workers import Exited, Leaving, Stepped
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from tests.support.membership import agree, job, member, said, started

ROSTER = Roster(tuple(member(rank, replicas=3) for rank in range(3)))
PERIOD_US = 1000


def walked(paces: Slowness, step: int, times: tuple[float, ...], work: tuple[int, ...] = (4, 4, 4)) -> dict[Seat, int]:
    """What is new after the three workers have done ``step``, each ``times`` as slow as planned, with ``work``
    instructions.
    """
    for rank, (slow, count) in enumerate(zip(times, work)):
        paces.add(WorkerId(rank), step, ComputeTime(round(count * slow * PERIOD_US), count * PERIOD_US))
    paces.committed(step, Roster(ROSTER.members[: len(times)]), float(step))
    return paces.seats_changed(float(step))


def test_three_steps_in_a_row_make_a_worker_slow_and_three_others_end_that():
    paces = Slowness(rebalances=True)
    slow, even = (1.0, 2.0, 1.0), (1.0, 1.0, 1.0)
    found = [
        walked(paces, step, times) for step, times in enumerate([slow, slow, slow, slow, even, even, even, even], 1)
    ]
    assert found == [{}, {}, {Seat(1, 0): 200}, {}, {}, {}, {Seat(1, 0): 100}, {}] and paces.percent == {}


def test_by_default_only_what_lasts_for_half_a_minute_after_three_steps_is_slow():
    """A step takes a second; two spells of thirty slow steps are none of thirty-three."""
    paces = Slowness(rebalances=True, patience_s=PATIENCE_S)
    calm, slow = (1.0, 1.0, 1.0), (1.0, 2.0, 1.0)
    steps = [calm] * 5 + [slow] * 30 + [calm] + [slow] * 60 + [calm] * 60
    found = {step: one for step, times in enumerate(steps, 1) if (one := walked(paces, step, times))}
    assert found == {36 + 33: {Seat(1, 0): 200}, 96 + 33: {Seat(1, 0): 100}}


LASTING = job(rebalance="lasting")


@pytest.mark.parametrize(
    "given, rebalances",
    [
        (LASTING, True),
        (replace(LASTING, exact=True), True),
        (replace(LASTING, policy=replace(LASTING.policy, reroute=False)), False),
        (replace(LASTING, unit="replica"), False),
        (replace(LASTING, rebalance=False), False),
    ],
)
def test_by_default_work_moves_only_where_others_may_take_it(given, rebalances):
    assert Slowness.of(given).rebalances is rebalances


def test_a_worker_that_is_hardly_slow_any_more_is_not():
    paces = Slowness(rebalances=True)
    found = [walked(paces, step, (1.0, 3.0 if step < 5 else 1.2, 1.0)) for step in range(1, 20)]
    assert [one for one in found if one] == [{Seat(1, 0): 300}, {Seat(1, 0): 100}]


def test_of_two_the_slower_is_slow():
    paces = Slowness(rebalances=True)
    assert [walked(paces, step, (3.0, 1.5)) for step in (1, 2, 3)][-1] == {Seat(0, 0): 200}


def test_less_work_is_not_speed():
    """What the worker is left with after it was found slow takes it less time, and it stays slow."""
    paces = Slowness(rebalances=True)
    found = [walked(paces, step, (1.0, 2.0, 1.0), (4, 4, 4) if step < 6 else (5, 2, 5)) for step in range(1, 20)]
    assert [one for one in found if one] == [{Seat(1, 0): 200}]


def test_two_slow_steps_and_a_good_one_are_nothing():
    paces = Slowness(rebalances=True)
    assert not any(walked(paces, step, (1.0, 1.0 if step % 3 == 0 else 9.0, 1.0)) for step in range(1, 40))


@pytest.mark.parametrize("level", [1.0, WIDTH, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(10))
def test_noise_of_a_tenth_around_any_level_changes_nothing_after_the_first_word(level, seed):
    rng = random.Random(seed)
    paces = Slowness(rebalances=True)
    found = [
        walked(paces, step, tuple(slow * rng.uniform(0.95, 1.05) for slow in (1.0, level, 1.0)))
        for step in range(1, 300)
    ]
    assert sum(map(bool, found)) <= 1


def test_all_as_slow_as_each_other_is_nobody():
    paces = Slowness(rebalances=True)
    assert not any(walked(paces, step, (7.0, 7.0, 7.0)) for step in range(1, 10))


def test_who_is_alone_on_a_stage_is_compared_with_nobody():
    paces = Slowness(rebalances=True)
    assert not any(walked(paces, step, (7.0,)) for step in range(1, 10))


def stepped(membership: Membership, step: int, ranks: list[int], slow: int) -> list[tuple[object, object]]:
    """Each of ``ranks`` has applied ``step``, ``slow`` at half of the others' speed."""
    found = []
    for rank in ranks:
        time = ComputeTime(2000 if rank == slow else 1000, 1000)
        found += membership.receive(Stepped(rank, membership.generation, step, time=time), 0.0).messages
    return found


def generations(messages: list[tuple[object, object]]) -> list[Generation]:
    return [message for _, message in messages if isinstance(message, Generation)]


def test_a_slow_worker_makes_a_planned_change_that_everybody_hears_before_it_holds():
    membership = started()
    for step in (1, 2):
        assert not generations(stepped(membership, step, [0, 1, 2, 3], slow=2))
    messages = stepped(membership, 3, [0, 1, 2, 3], slow=2)
    (generation,) = generations(messages)
    assert generation.slowness == ((Seat(0, 1), 200),) and generation.from_step == 6 and len(generation.members) == 4
    assert decode(encode(generation)) == generation
    for step in (4, 5):
        assert Committed(step) in [message for _, message in stepped(membership, step, [0, 1, 2, 3], slow=2)]
    agree(membership, 1, dict.fromkeys(range(4), 5))
    assert not any(generations(stepped(membership, step, [0, 1, 2, 3], slow=2)) for step in range(6, 20))


def test_a_failure_meanwhile_keeps_what_was_measured():
    membership = started(replicas=4, stages=1)
    for step in (1, 2, 3):
        stepped(membership, step, [0, 1, 2, 3], slow=2)
    (generation,) = said(membership.receive(Exited(3, -9, 0.0), 0.0), Generation)
    assert generation.from_step == 0 and generation.slowness == ((Seat(2, 0), 200),)


def test_the_loss_of_the_slow_one_leaves_nobody_slow():
    membership = started(replicas=4, stages=1)
    for step in (1, 2, 3):
        stepped(membership, step, [0, 1, 2, 3], slow=2)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    agree(membership, membership.generation, {0: 3, 1: 3, 3: 3})
    stepped(membership, 4, [0, 1, 3], slow=-1)
    (generation,) = said(membership.receive(Leaving(3, "SIGTERM"), 0.0), Generation)
    assert generation.slowness == ()
