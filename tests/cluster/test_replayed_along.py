"""Stages between which nothing is logged replay together: lost ones, and live ones beside their own state."""

from __future__ import annotations

import pytest

from tests.support.jobs import ALONE, BF16, BOTH, DEEPSPEED, LOG, PLAIN, Shape, difference, faults
from tests.support.launching import Launch

FOUR = (*LOG, "model.layers=4")


@pytest.mark.some_of(2)
@BOTH
@pytest.mark.parametrize(
    "boundaries, kill, along",
    [
        pytest.param("[1]", "kill 0.0 before 0F0.1@7", ["0.1"], id="the stage behind"),
        pytest.param("[0]", "kill 0.2 after 2F0.1@7", ["0.1"], id="the stage before"),
        pytest.param("[]", "kill 0.1 before 1REDUCE@7", ["0.0", "0.2"], id="all"),
        pytest.param("[]", "kill 0.2 after 2STEP@7", ["0.0", "0.1"], id="all, some a step ahead"),
    ],
)
def test_stages_between_which_nothing_is_logged_replay_together(launch: Launch, reference, boundaries, kill, along):
    more = (*LOG, f"++recycle.log.boundaries={boundaries}", "recycle.exact=true")
    result = launch(*more, faults(kill), shape=ALONE).finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-8000:]
    assert sorted(event["seat"] for event in result.of("accompanied")) == along, result.output[-8000:]
    assert difference(result, reference(*more, shape=ALONE)).none


MORE = {
    "bf16": (DEEPSPEED, (BF16,)),
    "tied": (DEEPSPEED, ("model.tied=true",)),
    "clipped later": (DEEPSPEED, ("gradient_clipping=1.25", "recycle.clip=validate")),
    "inverse undo": (PLAIN, ("recycle.undo=inverse",)),
    "set by the script": (PLAIN, ("by_hand=true", "recycle.exact=true")),
    "with a scheduler": (PLAIN, ("recycle.split_backward=false", "schedule=true")),
}


@pytest.mark.some_of(3)
@pytest.mark.parametrize("vehicle, more", MORE.values(), ids=MORE, indirect=["vehicle"])
@pytest.mark.parametrize("kill", ("kill 0.1 before 1F0.1@7", "kill 0.1 after 1STEP@7"))
def test_it_is_the_same_training(launch: Launch, reference, more, kill):
    """Dropout is in all of them; without exact sums a companion has its own bits again, which are not those of its
    replay.
    """
    more = (*LOG, "++recycle.log.boundaries=[1]", *more)
    result = launch(*more, faults(kill), shape=ALONE).finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-8000:]
    assert [event["seat"] for event in result.of("accompanied")] == ["0.0"], result.output[-8000:]
    found = difference(result, reference(*more, shape=ALONE))
    assert found.tolerated and ("recycle.exact=true" not in more or found.none)


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
def test_a_companion_that_is_killed_is_replayed_too(launch: Launch, reference):
    """It dies in the middle of its replay, at what it had done in the step itself before."""
    more = (*FOUR, "++recycle.log.boundaries=[0]", "recycle.exact=true")
    kills = faults("kill 0.1 before 1F0.0@7", "kill 0.2 before 2F0.1@6:2")
    result = launch(*more, kills, shape=Shape(1, 4, 4)).finish()
    assert result.code == 0 and len(result.of("replayed")) == 2, result.output[-8000:]
    assert "0.3" in {event["seat"] for event in result.of("accompanied")}
    assert difference(result, reference(*more, shape=Shape(1, 4, 4))).none


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
def test_one_of_two_replicas_replays_along(launch: Launch, reference):
    more, shape = (*LOG, "++recycle.log.boundaries=[]", "recycle.exact=true"), Shape(2, 2, 2)
    kills = faults("kill 0.1 before 1F0.0@7", "kill 1.1 before 1F1.1@7")
    result = launch(*more, kills, shape=shape).finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-8000:]
    assert [event["seat"] for event in result.of("accompanied")] == ["0.0"], result.output[-8000:]
    assert difference(result, reference(*more, shape=shape)).none
