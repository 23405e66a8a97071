"""``train_batch(data_iter=…)`` up to the end of iterators: an epoch ends, with a StopIteration on all workers, when all
iterators have ended, whatever each has left (see tests/jobs/iterators.py).
"""

from __future__ import annotations

import json

import pytest

from tests.support.cluster import Result
from tests.support.iterators import A_STEP, counts, ends
from tests.support.jobs import SQUARE, Shape

STEPS = 8


@pytest.fixture
def train(launch, tmp_path):
    """``train(shape, lengths)``: the finished job of STEPS steps, whose iterators have so many samples each."""

    def run(shape: Shape, lengths: tuple[int, ...], *faults: str) -> Result:
        job = {"folder": str(tmp_path / "run0"), "faults": faults, "steps": STEPS, "case": "plain", "lengths": lengths}
        job |= {"replicas": shape.replicas, "stages": shape.stages}
        return launch(shape=shape, script="tests/jobs/iterators.py", RECYCLE_TEST_ITERATORS=json.dumps(job)).finish()

    return run


def first_epoch(result: Result, shape: Shape) -> list[list[int]]:
    """By replica, how often each sample of the first epoch's iterator was used; all scripts have heard of the same
    ends.
    """
    heard = [end["ended"] for end in ends(result).values()]
    assert heard == heard[:1] * len(heard) and heard[0] == [each["step"] for each in unfilled(result)]
    return [each[: len(each) // 4] for each in counts(result, shape)]


def unfilled(result: Result) -> list[dict]:
    return [each for each in result.of("data") if each.get("unfilled")]


@pytest.mark.parametrize(
    "shape, lengths",
    [
        (SQUARE, (12, 20)),
        (SQUARE, (16, 16)),
        (Shape(2, 3), (20, 12)),
        (Shape(2, 1), (12, 20)),
        pytest.param(Shape(3), (8, 24, 16), marks=pytest.mark.all_kills),
    ],
    ids=str,
)
def test_an_epoch_ends_when_all_iterators_have(train, shape, lengths):
    """Who has more left gives more, and each sample is used once."""
    result = train(shape, lengths)
    for length, used in zip(lengths, first_epoch(result, shape), strict=True):
        assert used == [1] * length + [0] * (len(used) - length)
    steps = sum(lengths) // shape.replicas // A_STEP
    assert [each["step"] for each in unfilled(result)][:1] == [steps + 1]
    assert not result.of("lost") and sum(map(sum, counts(result, shape))) == STEPS * shape.replicas * A_STEP


@pytest.mark.parametrize("lengths", ((14, 20), (18, 20)), ids=str)
def test_what_does_not_fill_a_step_is_dropped(train, lengths):
    """As DeepSpeed does: no sample takes the place of one that is missing."""
    result = train(SQUARE, lengths)
    used = first_epoch(result, SQUARE)
    assert all(set(each) <= {0, 1} for each in used)
    assert sum(map(sum, used)) == 4 * 2 * A_STEP and [each["step"] for each in unfilled(result)][:1] == [5]


@pytest.mark.parametrize("kill", ("kill 0.0 before 0F0.1@4", "kill 0.1 before 1W0.1@4"))
def test_a_loss_in_the_last_step_of_an_epoch(train, kill):
    """What the lost replica had left is nobody's."""
    result = train(SQUARE, (16, 20), kill)
    first, second = first_epoch(result, SQUARE)
    assert second == [1] * sum(second) + [0] * (len(second) - sum(second)) and set(first) <= {0, 1}
    assert (sum(first) + sum(second)) % (2 * A_STEP) == 0


def test_who_was_out_gives_more_afterwards(come_back):
    """While a replica was out the other gave more of its own samples; then it gives what it has left, until both have
    given all.
    """
    length, steps = 480, 140
    result = come_back("kill 0.0 before 0F0.1@4", lengths=(length, length), steps=steps)
    used = first_epoch(result, SQUARE)
    assert used == [[1] * length + [0] * (len(each) - length) for each in used]
    assert [each["step"] for each in unfilled(result)] == [2 * length // (2 * A_STEP) + 1]


@pytest.mark.parametrize(
    "kills",
    (
        ("kill 0.0 before 0F0.1@4",),
        pytest.param(("kill 0.0 before 0F0.1@4", "kill 0.1 before 1W0.1@4"), marks=pytest.mark.all_kills),
    ),
    ids=("one end", "both ends"),
)
def test_who_comes_back_in_a_later_epoch_hears_where_the_first_ended(come_back, kills):
    """What it had left of the first is not used, and of the second it gives its own."""
    length, steps = 480, 140
    result = come_back(*kills, lengths=(length, length), steps=steps, held=66, late=True)
    first, second = (
        [each[n * len(each) // 4 : (n + 1) * len(each) // 4] for each in counts(result, SQUARE)] for n in (0, 1)
    )
    (step,) = [each["step"] for each in unfilled(result)]
    assert all(end["ended"] == [step] for end in ends(result).values())
    assert all(each["step"] > step for each in result.of("rejoined"))
    for each in (*first, *second):
        assert each == [1] * sum(each) + [0] * (len(each) - sum(each))
    assert 0 < sum(first[0]) < length and sum(first[1]) > length - 2 * A_STEP
    assert 0 < sum(second[0]) < sum(second[1])
    assert sum(map(sum, first)) == 2 * A_STEP * (step - 1) and sum(map(sum, second)) == 2 * A_STEP * (steps - step + 1)
