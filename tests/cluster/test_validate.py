"""``clip: validate``: steps are applied before their norm is known, and the training is that of a job that has waited for it.

The reference clips with ``clip: sync``.  The limit is one that some steps are over and some are not, which the tests check.
"""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import STEPS, WRAPPED, Shape, assert_one_line, assert_same_training, difference, faults

CLIPPED = "gradient_clipping=1.25"
VALIDATE = (CLIPPED, "recycle.clip=validate")
MORE = pytest.mark.all_kills


def rejected(result) -> list[int]:
    return [event["step"] for event in result.of("rejected")]


def test_without_a_failure_it_is_bit_for_bit_what_waiting_gives(reference):
    result, waited = reference(*VALIDATE), reference(CLIPPED)
    assert 0 < len(rejected(result)) < STEPS, "the limit has to divide the steps"
    assert result.losses == waited.losses and difference(result, waited).parameters == 0
    (rate,) = result.of("validated")
    assert (rate["rejected"], rate["judged"]) == (len(rejected(result)), STEPS)
    assert difference(waited, reference()).exceeds(10)


def late_norm(folder, step: int) -> dict:
    """Stage 1 sums only once stage 0 has begun the step after, with weights that are then rejected."""
    return {"name": "gate", "folder": str(folder / "gate"), "before": f"1REDUCE@{step}", "until": f"0F0.1@{step + 1}", "by": ["0.0"]}


@pytest.mark.parametrize("undo", ("snapshot", pytest.param("inverse", marks=MORE)))
def test_what_was_computed_with_rejected_weights_counts_nowhere(launch, reference, tmp_path, undo):
    step = rejected(reference(*VALIDATE))[1]
    wrap = json.dumps(late_norm(tmp_path, step))
    result = launch(*VALIDATE, f"recycle.undo={undo}", "recycle.trace=true", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert step in rejected(result)
    assert_same_training(result, reference(CLIPPED))


def test_it_would_show(launch, reference, tmp_path):
    step = rejected(reference(*VALIDATE))[1]
    wrap = json.dumps(late_norm(tmp_path, step) | {"name": "keep_rejected"})
    result = launch(*VALIDATE, script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert difference(result, reference(CLIPPED)).exceeds(10)


@pytest.mark.parametrize(
    "kill",
    (
        "kill 0.0 after 0F0.1@{next}",  # it has sent what the others must not use
        "kill 1.0 at recovery.resume:{recovery}",  # some have heard of the norm, some have not
        pytest.param("kill 0.1 before 1STEP@{step}", marks=MORE),
        pytest.param("kill 1.1 after 1STEP@{step}", marks=MORE),
        pytest.param("kill 0.1 at recovery.report:{recovery}", marks=MORE),
        pytest.param("kill 0.0 at recovery.undone", marks=MORE),
    ),
)
def test_a_failure_around_a_rejection(launch, reference, tmp_path, kill):
    steps = rejected(reference(*VALIDATE))
    step = steps[1]
    fault = kill.format(step=step, next=step + 1, recovery=3)  # the start, the first rejection, this one
    wrap = json.dumps(late_norm(tmp_path, step)) if "after 0F" in kill else ""
    more = {"script": WRAPPED, "RECYCLE_TEST_WRAP": wrap} if wrap else {}
    result = launch(*VALIDATE, faults(fault), **more).finish()
    assert result.of("fault"), "the kill has to strike"
    assert_same_training(result, reference(CLIPPED), {fault.split()[1]})


# --- gradients that are not finite --------------------------------------------------------------------

OVERFLOW = json.dumps({"name": "overflow", "at": ["1W0.1@4", "0W1.0@9"]})


def overflowing(launch, *more: str, **options):
    return launch("recycle.nonfinite=skip", *more, script=WRAPPED, RECYCLE_TEST_WRAP=OVERFLOW, **options).finish()


@pytest.mark.parametrize("undo", (pytest.param("inverse", marks=MORE), pytest.param("snapshot", marks=MORE)))
def test_steps_that_are_not_finite_are_skipped_on_all_stages(launch, undo):
    waited, result = overflowing(launch, CLIPPED), overflowing(launch, *VALIDATE, f"recycle.undo={undo}")
    assert {4, 9} < set(rejected(result)) and "taken back and skipped" in result.output
    found = assert_same_training(result, waited)
    assert found.loss == 0 or undo == "inverse"


@pytest.mark.all_kills
def test_a_failure_between_a_step_that_is_not_finite_and_its_commit(launch):
    shape = Shape(replicas=3)
    result = overflowing(launch, *VALIDATE, faults("kill 0.1 after 1STEP@4", "kill 1.0 before 0REDUCE@9"), shape=shape)
    assert_same_training(result, overflowing(launch, CLIPPED, shape=shape), {"0.1", "1.0"})


@pytest.mark.parametrize("clip", (pytest.param("sync", marks=MORE), "validate"))
def test_the_job_ends_where_they_are_not_to_be_skipped(launch, clip):
    result = launch(CLIPPED, f"recycle.clip={clip}", script=WRAPPED, RECYCLE_TEST_WRAP=OVERFLOW).finish()
    assert_one_line(result, "the gradient norm of step 4 is inf. No checkpoint was saved")


# --- the loss scale -----------------------------------------------------------------------------------

SCALING = {"initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 1}
SCALED = (*VALIDATE, "recycle.nonfinite=skip", "recycle.loss_scaling=true")


def scaled(launch, *more: str, also: tuple[dict, ...] = (), **options):
    wraps = json.dumps([{"name": "fp16_section", "section": SCALING}, *also])
    return launch(*SCALED, *more, script=WRAPPED, RECYCLE_TEST_WRAP=wraps, **options).finish()


def scales(skipped: set[int]) -> list[tuple[int, float]]:
    """After which steps the scale changes, and to what: four good steps in a row double it, an overflow halves it."""
    scale, good, found = 2.0**8, 0, []
    for step in range(1, STEPS + 1):
        before = scale
        if step in skipped:
            scale, good = scale / 2, -1
        elif good and good % 4 == 0:
            scale *= 2
        good += 1
        if scale != before:
            found.append((step, scale))
    return found


def test_a_scaled_loss_changes_nothing_but_what_overflows(launch, reference):
    """Scales are powers of two, so every number is the same."""
    result = scaled(launch)
    assert_same_training(result, reference(CLIPPED))
    assert result.losses == reference(CLIPPED).losses and difference(result, reference(CLIPPED)).parameters == 0
    assert {(event["step"], event["scale"]) for event in result.of("loss_scale")} == set(scales(set()))


@pytest.mark.parametrize("kill", (pytest.param(None, marks=MORE), "kill 0.1 after 1STEP@4", pytest.param("kill 1.0 before 0STEP@9", marks=MORE)))
def test_an_overflow_takes_the_scale_down_on_all_stages_and_what_had_the_old_one_is_void(launch, kill):
    result = scaled(launch, *([faults(kill)] if kill else []), also=(json.loads(OVERFLOW),))
    assert_same_training(result, overflowing(launch, CLIPPED), {kill.split()[1]} if kill else set())
    final = dict(sorted((event["step"], event["scale"]) for event in result.of("loss_scale")))  # the last word counts
    assert set(scales({4, 9})) <= set(final.items()) and {4, 9} <= set(rejected(result))
