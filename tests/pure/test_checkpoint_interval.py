"""How often checkpoints are made by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.worker.checkpoint_interval import COSTS, DOUBTED, FIRST, CheckpointInterval, Cost, Meter

seconds = st.floats(0, 100)
step_times = st.floats(0.001, 10)


def test_the_first_one_comes_when_it_is_known_how_long_steps_take():
    assert CheckpointInterval(0.035, stepped=7).due == 7 + FIRST + 1


@given(seconds, step_times, st.floats(0.001, 0.999))
def test_the_share_is_kept_and_no_step_more_than_that_takes(cost, step_s, overhead):
    interval = CheckpointInterval(overhead, 0)
    interval.made(1, [Cost(cost, step_s)], 0)
    assert interval.every <= DOUBTED * FIRST
    interval.made(11, [Cost(cost, step_s)], 0)
    assert interval.due == 11 + interval.every
    assert cost <= overhead * step_s * interval.every * (1 + 1e-9)
    assert interval.every == 1 or cost > overhead * step_s * (interval.every - 1) * (1 - 1e-9)


def test_the_slowest_worker_counts_and_one_bad_moment_does_not():
    interval = CheckpointInterval(0.1, 0)
    for _ in range(COSTS - 1):
        interval.made(1, [Cost(0.1, 0.1), Cost(0.5, 0.1), Cost(0.0, 0.1)], 0)
        assert interval.every == 50
    interval.made(1, [Cost(90.0, 0.1)], 0)
    assert 50 < interval.every < 100
    interval = CheckpointInterval(0.1, 0)
    interval.made(1, [Cost(90.0, 0.1)], 0)  # the first one, of all
    assert interval.every == DOUBTED * FIRST
    interval.made(1, [Cost(0.5, 0.1)], 0)
    assert 50 < interval.every <= 500


@given(st.lists(st.floats(0.0, 2.0), min_size=2, max_size=COSTS))
def test_what_is_expected_is_no_less_than_the_mean_of_what_is_believed(costs):
    interval = CheckpointInterval(0.1, 0)
    for cost in costs:
        interval.made(1, [Cost(1.0 + cost, 1.0)], 0)
    assert interval.every >= (1.0 + sum(costs) / len(costs)) / 0.1 * (1 - 1e-9)


def test_never_before_a_step_that_somebody_may_have_started():
    interval = CheckpointInterval(0.5, 0)
    interval.made(11, [Cost(0.1, 0.1)], 40)
    assert (interval.every, interval.due) == (2, 40)


def test_one_that_could_not_be_written_is_tried_again_after_as_many_steps_and_says_nothing_of_what_one_costs():
    interval = CheckpointInterval(0.1, 0)
    interval.failed(FIRST + 1, 0)
    assert (interval.every, interval.due) == (FIRST, 2 * FIRST + 1)
    interval.made(2 * FIRST + 1, [Cost(2.0, 1.0)], 0)
    interval.failed(41, 70)
    assert (interval.every, interval.due) == (20, 70)


def test_one_that_was_dropped_is_made_up_for_at_once_and_a_loaded_one_begins_the_interval_anew():
    interval = CheckpointInterval(0.1, 0)
    interval.made(11, [Cost(0.5, 0.1)], 0)
    interval.dropped(30)
    assert interval.due == unstarted(30)
    interval.loaded(4)
    assert interval.due == 4 + 50 + 1


def test_what_steps_take_longer_than_usual_is_the_cost():
    meter, now = Meter(), 0.0
    for took in [9.0, 1.0, 1.0, 1.0, 1.0]:  # the first step compiles
        meter.tick(now)
        now += took
    meter.tick(now)
    meter.begin()
    for took in (1.5, 1.25, 1.0):
        now += took
        meter.tick(now)
    assert meter.end() == pytest.approx((0.75, 1.0))
    meter.tick(now + 1.0)
    meter.begin()
    meter.tick(now + 1.5)
    assert meter.end() == pytest.approx((-0.5, 1.0))  # faster than usual: in the mean noise takes noise away


def test_without_a_usual_step_those_that_it_has_slowed_down_are_taken_for_usual():
    meter = Meter()
    meter.tick(1.0)
    meter.tick(1.5)
    meter.forget()
    meter.begin()
    meter.tick(3.5)
    assert meter.end() == Cost(0.0, 2.0)


@given(st.integers(1, 30), st.integers(0, 50), st.integers(0, 50))
def test_a_fixed_number_of_steps_lies_between_two_whatever_they_cost(every, stepped, ahead):
    """Each is of a step that the number divides, the next one that nobody has started; costs change nothing."""
    interval = CheckpointInterval(0.1, stepped, fixed=every)
    assert interval.due == stepped - stepped % every + every + 1
    free = interval.due + ahead
    interval.made(interval.due, [Cost(90.0, 0.1)], free)
    of = interval.due - 1
    assert of % every == 0 and free <= interval.due < free + 2 * every and of > stepped
    interval.joined(of + 3)
    assert interval.due == unstarted(of + 3)
    interval.failed(interval.due, 0)
    assert (interval.due - 1) % every == 0
