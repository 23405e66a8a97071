"""``train_batch(data_iter=…)`` in jobs to which lost workers come back: whichever ends of a replica were lost, it goes
on at its place, and each sample is used once, of each epoch's iterator (see tests/jobs/iterators.py).
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.jobs.stateful import order
from tests.support.cluster import Result
from tests.support.iterators import A_STEP, counts, ends, retired
from tests.support.jobs import SQUARE, Shape
from tests.support.returns import LONG

EPOCH = 20  # steps


def stays_out(result: Result) -> list[str]:
    return [each["text"] for each in result.of("data") if "gives no data" in each["text"]]


def assert_each_once(result: Result, shape: Shape, lost: int, epoch: int = LONG) -> None:
    """Of each epoch's iterator of each replica everything up to some batch, once; replica ``lost`` was no source for
    some steps, and is one again.
    """
    ((first, replicas),) = retired(result)
    assert replicas == [lost] and not stays_out(result)
    used = counts(result, shape)
    of_epoch = len(used[0]) * epoch // LONG
    parts = [[each[begin : begin + of_epoch] for begin in range(0, len(each), of_epoch)] for each in used]
    for replica, epochs in enumerate(parts):
        for number, part in enumerate(epochs, 1):
            assert part == [1] * sum(part) + [0] * (of_epoch - sum(part)), f"replica {replica}, epoch {number}: {part}"
    for number in range(LONG // epoch):
        assert sum(sum(epochs[number]) for epochs in parts) == epoch * shape.replicas * A_STEP
    assert (first - 1) * A_STEP < sum(used[lost]) < LONG * A_STEP, "it was no source again"


@pytest.mark.some_of(2)
@pytest.mark.parametrize("shape", (SQUARE, Shape(3)), ids=("2x2", "3x2"))
@pytest.mark.parametrize("kill", ("kill 0.0 before 0F0.1@4", "kill 0.1 before 1W0.1@4"))
def test_a_replica_goes_on_at_its_place(come_back, shape, kill):
    """Who comes back reads its iterator up to where the other end stands: each sample is used once, all the time."""
    assert_each_once(come_back(kill, shape=shape), shape, lost=0)


@pytest.mark.parametrize("shape", (SQUARE, pytest.param(Shape(3), marks=pytest.mark.all_kills)), ids=("2x2", "3x2"))
def test_a_replica_that_has_lost_both_ends_at_once_goes_on_too(come_back, shape):
    """What others have of its batches in the interrupted step is used, and it goes on behind that."""
    assert_each_once(come_back("kill 0.0 before 0F0.1@4", "kill 0.1 before 1W0.1@4", shape=shape), shape, lost=0)


def test_a_replica_of_one_stage_goes_on_too(come_back):
    shape = Shape(2, 1)
    assert_each_once(come_back("kill 0.0 before 0I0.1@4", shape=shape), shape, lost=0)


@pytest.mark.parametrize(
    "kills",
    (
        ("kill 0.0 before 0F0.1@4",),
        ("kill 0.0 before 0F0.1@4", "kill 0.1 before 1W0.1@4"),
        pytest.param(("kill 0.0 before 0F0.1@21",), marks=pytest.mark.all_kills),
    ),
    ids=("one end", "both ends", "as an epoch begins"),
)
def test_with_a_new_iterator_for_each_epoch(come_back, kills):
    """It is lost in the first epoch and comes back in the second, whose iterator it reads from its beginning."""
    result = come_back(*kills, case="epochs", epoch=EPOCH, held=EPOCH + 3)
    assert all(EPOCH < each["step"] < LONG for each in result.of("rejoined"))
    assert_each_once(result, SQUARE, lost=0, epoch=EPOCH)


@pytest.mark.parametrize(
    "kills",
    (("kill 0.0 before 0F0.1@9",), ("kill 0.0 before 0F0.1@9", "kill 0.1 before 1W0.1@9")),
    ids=("one end", "both ends"),
)
def test_a_loader_begins_with_the_state_with_which_its_predecessor_has(launch, come_back, tmp_path, kills):
    """The order of the newcomer's own loader is another one; the job has gone on from a checkpoint, with the order of
    the one that saved it.
    """
    saved, each = str(tmp_path / "saved"), 2 * A_STEP * LONG
    job = {"folder": str(tmp_path / "run0"), "steps": 3, "case": "stateful", "seed": 1, "each": each, "saved": saved}
    job |= {"faults": [], "replicas": SQUARE.replicas, "stages": SQUARE.stages}
    launch(script="tests/jobs/iterators.py", RECYCLE_TEST_ITERATORS=json.dumps(job)).finish()
    result = come_back(*kills, case="stateful", seed=2, each=each, loaded=saved, resume=True, number=1)
    ((first, replicas),) = retired(result)
    assert replicas == [0] and not stays_out(result)
    flat = [count for used in counts(result, SQUARE) for count in used]
    numbers = [sum(flat[:each]), sum(flat[each : 2 * each])]
    assert (first - 1) * A_STEP < numbers[0] < LONG * A_STEP < numbers[1] and sum(numbers) == 2 * A_STEP * LONG
    for replica, number in enumerate(numbers):
        used = [sample for sample in range(each) if flat[replica * each + sample] == 1]
        assert used == sorted(order(each, 1)[:number]), f"replica {replica}"


@pytest.mark.parametrize(
    "kill", ("kill 0.1 before 1W0.1@2", pytest.param("kill 0.0 before 0F0.1@3", marks=pytest.mark.all_kills))
)
def test_who_comes_to_another_batch_size_behind_the_others_trains_with_it(come_back, kill):
    """From step 4 on there are twice as many micro-batches, as the script of who comes back says once more."""
    result = come_back(kill, case="another batch size")
    assert all(each["step"] > 4 for each in result.of("rejoined"))
    used = [end["rows"] for end in ends(result).values()]
    assert len(used) == SQUARE.ranks and all(torch.equal(each, used[0]) for each in used)


def test_an_iterator_that_ends_while_it_is_read_up(come_back):
    result = come_back("kill 0.0 before 0F0.1@4", case="short again", comes=False)
    said = {each["text"] for each in result.of("warning")}
    assert any(
        "the data iterator of seat 0.0 has ended at batch 5 of the 8 that its replica has had" in one for one in said
    ), said
