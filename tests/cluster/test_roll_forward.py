"""Some workers of a stage have the whole reduced gradient, and others were cut off by a death before they had it.

The collective is over on all of them; who is late has its result taken away by the failure, at the place where that
would happen (wrappers.lose_result).  Trace and events show what the recovery did about it.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.observability.trace import read_traces
from tests.support.jobs import WRAPPED, Shape, assert_same_training, faults, in_halves

THREE, FOUR = Shape(replicas=3), Shape(replicas=4)
CLIPPED = "gradient_clipping=0.5"
STEP = 7

pytestmark = pytest.mark.plain_too


def cut_off(launch, folder, shape: Shape, stage: int, late: list[str], *more: str, also: tuple[str, ...] = ()):
    """The job's result: seat 0.stage dies with the reduced gradient once seat 1.stage has it too, and ``late``
    don't.
    """
    reduce, before = f"{stage}REDUCE@{STEP}", f"{stage}STEP@{STEP}"
    wrap = {
        "name": "lose_result",
        "seats": late,
        "reduce": reduce,
        "folder": str(folder / "gate"),
        "before": before,
        "by": [f"1.{stage}"],
    }
    kills = faults(f"kill 0.{stage} before {before}", *also)
    return launch(
        kills, *more, "recycle.trace=true", shape=shape, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wrap)
    ).finish()


def runs(result, seat: str, op: Op) -> int:
    """How often ``seat`` has completed the instruction of the interrupted step."""
    one = Instruction(op, int(seat.partition(".")[2]), None, STEP)
    return sum(str(span.seat) == seat and span.instruction == one for span in read_traces(result.folder / "trace"))


def computed_twice(result, stage: int) -> set[str]:
    """Of the interrupted step, by anybody, the dead too."""
    spans = [span for span in read_traces(result.folder / "trace") if span.instruction.step == STEP]
    counts = Counter(in_halves(span for span in spans if span.instruction.stage == stage))
    assert len(counts) == 3 * 2 * len(result.pids) // 2, "F, I and W of two micro-batches of each replica"
    return {one for one, count in counts.items() if count > 1}


@pytest.mark.some_of(2)
@pytest.mark.parametrize("setting", ((), (CLIPPED,)))
@pytest.mark.parametrize("stage", (0, 1))
def test_who_has_the_reduced_gradient_gives_it_to_who_has_not(launch, reference, tmp_path, stage, setting):
    """The dead worker's contributions are in it, so nothing of that stage is computed again."""
    holder, late = f"1.{stage}", f"2.{stage}"
    result = cut_off(launch, tmp_path, THREE, stage, [late], *setting)
    assert_same_training(result, reference(*setting, shape=THREE), {f"0.{stage}"})
    assert not computed_twice(result, stage)
    assert not any(event["undone"] for event in result.of("recovery_plan"))
    assert [runs(result, seat, Op.REDUCE) for seat in (f"0.{stage}", holder, late)] == [1, 2, 1]
    assert [runs(result, seat, Op.STEP) for seat in (holder, late)] == [1, 1]


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.some_of(3)
@pytest.mark.parametrize(
    "when", ("at recovery.report:2", "at recovery.resume:2", "before {}REDUCE@7:2", "after {}REDUCE@7:2")
)
@pytest.mark.parametrize("stage", (0, 1))
def test_who_has_the_reduced_gradient_dies_as_well(launch, reference, tmp_path, stage, when):
    """Then the contributions of those that are left count, and the dead ones' are made again, or it was handed over
    just before.
    """
    holder, late = f"1.{stage}", [f"2.{stage}", f"3.{stage}"]
    kill = f"kill {holder} {when.format(stage)}"
    result = cut_off(launch, tmp_path, FOUR, stage, late, also=(kill,))
    assert_same_training(result, reference(shape=FOUR), {f"0.{stage}", holder})
    assert {event["fault"] for event in result.of("fault")} >= {kill}
    if not when.startswith("after"):
        lost = {f"{stage}{op}{replica}.{index}@{STEP}" for op in "FIW" for replica in (0, 1) for index in (0, 1)}
        assert {one for one in computed_twice(result, stage) if one in lost} == lost
