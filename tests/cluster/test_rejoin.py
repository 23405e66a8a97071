"""A lost worker comes back beside those that train, catches up, and trains on with them: the losses and weights of the
run without a failure.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.conftest import Launch
from tests.support.cluster import Result, Run
from tests.support.jobs import SQUARE, WRAPPED, Shape, difference, faults, held

pytestmark = pytest.mark.plain_too
STEPS, HELD = 60, 12  # the others wait at this step until the newcomer's process is there


def comes_back(launch: Launch, folder: Path, kill: str, *more: str, shape: Shape = SQUARE) -> Run:
    """A job in which the worker is killed, and the others go on once its newcomer asks to take part."""
    wrap = json.dumps(held(folder, HELD, "go"))
    run = launch(
        f"steps={STEPS}",
        "recycle.rejoin=always",
        faults(kill),
        *more,
        shape=shape,
        script=WRAPPED,
        RECYCLE_TEST_WRAP=wrap,
    )
    run.wait_for(lambda: any(event["event"] == "newcomer" for event in run.events()), "a newcomer")
    (folder / "go").touch()
    return run


def assert_came_back(result: Result, reference: Result, seat: str) -> None:
    """All workers have trained to the end, the newcomer from where it was let in."""
    assert result.code == 0, result.output[-6000:]
    came_back = [event["seat"] for event in result.of("rejoined")]
    assert [event["seat"] for event in result.of("lost")] == [seat] == came_back, result.output[-6000:]
    assert result.records.keys() == reference.records.keys()
    assert difference(result, reference).tolerated


@pytest.mark.parametrize(
    "kill, shape, more",
    [
        pytest.param("kill 1.1 before 1F1.0@5", SQUARE, (), id="the last stage's"),
        pytest.param("kill 1.0 after 0STEP@5", SQUARE, ("recycle.check_replicas=1",), id="the first stage's, compared"),
        pytest.param("kill 1.0 before 0REDUCE@5", SQUARE, ("recycle.undo=inverse",), id="in a sum, inverse undo"),
        pytest.param("kill 2.1 before 1F2.0@5", Shape(3, 2, 2), ("gradient_clipping=0.5",), id="two sources, clipped"),
    ],
)
def test_it_trains_on_with_the_others(launch: Launch, reference, tmp_path, kill, shape, more):
    result = comes_back(launch, tmp_path, kill, *more, shape=shape).finish()
    assert_came_back(result, reference(f"steps={STEPS}", *more, shape=shape), kill.split()[1])


def test_in_exact_mode_it_has_the_same_bits(launch: Launch, reference, tmp_path):
    more = ("recycle.exact=true",)
    result = comes_back(launch, tmp_path, "kill 1.1 before 1W1.0@5", *more).finish()
    whole = reference(f"steps={STEPS}", *more)
    assert_came_back(result, whole, "1.1")
    assert difference(result, whole).loss == difference(result, whole).parameters == 0.0
