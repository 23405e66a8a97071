"""A stage that has lost its last worker is replayed by one, and others make shares of its gradients."""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import BF16, DEEPSPEED, PLAIN, WRAPPED, Shape, difference, faults
from tests.support.launching import Launch

LOG = ("++recycle.log={}", "++recycle.checkpoint.overhead=0.02", "recycle.rejoin=always")
EXACT = (*LOG, "recycle.exact=1")
LINE, SQUARE = Shape(1, 4, 4), Shape(2, 2, 2)

CASES = {
    "one of four stages, exact": (PLAIN, EXACT, LINE, ("kill 0.1 before 1F0.2@8",), 3),
    "both of two, exact": (PLAIN, EXACT, SQUARE, ("kill 0.1 before 1F0.0@8", "kill 1.1 before 1F1.0@8"), 2),
    "the first, DeepSpeed": (DEEPSPEED, LOG, LINE, ("kill 0.0 before 0F0.2@8",), 3),
    "the last, DeepSpeed in bf16": (DEEPSPEED, (*LOG, BF16), LINE, ("kill 0.3 before 3F0.2@8",), 3),
}


@pytest.mark.parametrize("vehicle, more, shape, kills, helpers", CASES.values(), ids=CASES, indirect=["vehicle"])
def test_it_is_the_same_training(launch: Launch, reference, more, shape, kills, helpers):
    """Dropout is in all of them; in exact mode all bits are those of the job that nobody was killed in.  Another
    newcomer of the stage helps too, if it is there in time; where it is called late, all may be done before it answers.
    """
    result = launch(*more, faults(*kills), shape=shape).ended_well()
    (said,) = result.of("helpers")
    late = [one for one in said["left"] if one.endswith("it has not answered")]  # another newcomer
    assert 0 <= said["helpers"] - helpers <= said["helpers"] + len(late) - helpers < len(kills), said
    assert said["left"] == late and said["lots"] >= helpers, said
    assert said["parameters_bytes"] > 0
    assert {"load", "spawn", "parameters", "compute", "wait", "reduce", "step"} == set(said["seconds"])
    found = difference(result, reference(*more, shape=shape))
    assert found.tolerated and ("recycle.exact=true" not in more or found.none)


BESIDE = {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps([{"name": "replay_beside"}])}


@pytest.mark.parametrize(
    "vehicle, shape",
    ((PLAIN, SQUARE), (DEEPSPEED, SQUARE), (PLAIN, Shape(2, 4, 4))),
    ids=("plain, 2x2", "DeepSpeed, 2x2", "plain, 4x2"),
    indirect=["vehicle"],
)
def test_the_second_newcomer_of_a_stage_helps_the_first(launch: Launch, reference, shape):
    """Beside all live workers of other stages; all bits are the same."""
    kills = ("kill 0.1 before 1F0.0@8", "kill 1.1 before 1F1.0@8")
    result = launch(*EXACT, faults(*kills), shape=shape, **BESIDE).ended_well()
    (said,) = result.of("helpers")
    (start,) = result.of("start")
    of_stage = {start["seats"][seat] for seat in ("0.1", "1.1")}
    assert said["helpers"] == len(said["ranks"]) == shape.ranks - 1 and not said["left"], said
    assert len(of_stage.intersection(said["ranks"])) == 1
    assert difference(result, reference(*EXACT, shape=shape)).none


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
def test_a_helper_that_is_killed_in_the_middle_is_one_less(launch: Launch, reference):
    """Its blocks are dealt anew, and its own stage is replayed afterwards."""
    result = launch(*EXACT, faults("kill 0.1 before 1F0.2@9", "kill 0.3 before 1F0.3@7"), shape=LINE).ended_well()
    assert len(result.of("replayed")) == 2, result.output[-8000:]
    assert difference(result, reference(*EXACT, shape=LINE)).none


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
@pytest.mark.parametrize(
    "more, why",
    (
        (("recycle.exact=true",), "are one block"),
        (("++recycle.log.helpers=0",), "recycle.log.helpers is 0"),
    ),
    ids=("one block", "none wanted"),
)
def test_where_nobody_can_help_it_is_replayed_alone(launch: Launch, more, why):
    result = launch(*LOG, *more, faults("kill 0.1 before 1F0.2@6"), shape=Shape(1, 3, 4)).finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-8000:]
    said = [event["why"] for event in result.of("helpers")]
    assert len(said) == 1 and why in said[0], said
