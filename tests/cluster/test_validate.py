"""``clip: validate``: steps are applied before their norm is known, and the training is that of a job that has waited
for it.

The reference clips with ``clip: sync``.  The limit is one that some steps are over and some are not, which the tests
check.  Loss scales have tests/cluster/test_loss_scale.py.
"""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import (
    DEEPSPEED,
    PLAIN,
    STEPS,
    WRAPPED,
    Shape,
    assert_one_line,
    assert_same_training,
    difference,
    faults,
)

# Adam's steps hardly depend on how long gradients are
CLIPPED = {DEEPSPEED: ("gradient_clipping=1.25",), PLAIN: ("optimizer=sgd", "gradient_clipping=0.55")}

pytestmark = pytest.mark.plain_too(deepspeed=False)


@pytest.fixture
def clipped(vehicle) -> tuple[str, ...]:
    return CLIPPED[vehicle]


@pytest.fixture
def validate(clipped) -> tuple[str, ...]:
    return *clipped, "recycle.clip=validate"


def rejected(result) -> list[int]:
    return [event["step"] for event in result.of("rejected")]


def to_reject(result) -> int:
    """A step that is rejected behind one that is not: whose rejection finds nobody at a gate of :func:`late_norm`,
    which waits for a step that a rejection on its way keeps from beginning.
    """
    steps = rejected(result)
    return next(step for step in steps if step < STEPS and step - 1 not in steps)


def test_without_a_failure_it_is_bit_for_bit_what_waiting_gives(reference, clipped, validate):
    result, waited = reference(*validate), reference(*clipped)
    assert 0 < len(rejected(result)) < STEPS, "the limit has to divide the steps"
    assert result.losses == waited.losses and difference(result, waited).parameters == 0
    (rate,) = result.of("validated")
    assert (rate["rejected"], rate["judged"]) == (len(rejected(result)), STEPS)
    assert difference(waited, reference(*clipped[:-1])).exceeds(10)


def late_norm(folder, step: int) -> dict:
    """Stage 1 sums only once stage 0 has begun the step after, with weights that are then rejected."""
    return {
        "name": "gate",
        "folder": str(folder / "gate"),
        "before": f"1REDUCE@{step}",
        "until": f"0F0.1@{step + 1}",
        "by": ["0.0"],
    }


@pytest.mark.parametrize("undo", ("snapshot", "host_snapshot", "inverse"))
def test_what_was_computed_with_rejected_weights_counts_nowhere(launch, reference, clipped, validate, tmp_path, undo):
    step = to_reject(reference(*validate))
    wrap = json.dumps(late_norm(tmp_path, step))
    result = launch(
        *validate, f"recycle.undo={undo}", "recycle.trace=true", script=WRAPPED, RECYCLE_TEST_WRAP=wrap
    ).finish()
    assert step in rejected(result)
    assert_same_training(result, reference(*clipped))


def test_it_would_show(launch, reference, clipped, validate, tmp_path):
    step = to_reject(reference(*validate))
    wrap = json.dumps(late_norm(tmp_path, step) | {"name": "keep_rejected"})
    result = launch(*validate, script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert difference(result, reference(*clipped)).exceeds(10)


@pytest.mark.plain_too
@pytest.mark.some_of(2)
@pytest.mark.parametrize(
    "kill",
    (
        "kill 0.0 after 0F0.1@{next}",  # it has sent what the others must not use
        "kill 1.0 at recovery.resume:{recovery}",  # some have heard of the norm, some have not
        "kill 0.1 before 1STEP@{step}",
        "kill 1.1 after 1STEP@{step}",
        "kill 0.1 at recovery.report:{recovery}",
        "kill 0.0 at recovery.undone",
    ),
)
def test_a_failure_around_a_rejection(launch, reference, clipped, validate, tmp_path, kill):
    fault_free = reference(*validate)
    step = to_reject(fault_free)
    recovery = rejected(fault_free).index(step) + 2  # the start is the first, then each rejection
    fault = kill.format(step=step, next=step + 1, recovery=recovery)
    wrap = json.dumps(late_norm(tmp_path, step)) if "after 0F" in kill else ""
    more = {"script": WRAPPED, "RECYCLE_TEST_WRAP": wrap} if wrap else {}
    result = launch(*validate, faults(fault), **more).finish()
    assert result.of("fault"), "the kill has to strike"
    assert_same_training(result, reference(*clipped), {fault.split()[1]})


# --- gradients that are not finite --------------------------------------------------------------------

OVERFLOW = json.dumps({"name": "overflow", "at": ["1W0.1@4", "0W1.0@9"]})


def overflowing(launch, *more: str, **options):
    return launch("recycle.nonfinite=skip", *more, script=WRAPPED, RECYCLE_TEST_WRAP=OVERFLOW, **options).finish()


@pytest.mark.parametrize("undo", ("inverse", "snapshot"))
def test_steps_that_are_not_finite_are_skipped_on_all_stages(launch, clipped, validate, undo):
    waited, result = overflowing(launch, *clipped), overflowing(launch, *validate, f"recycle.undo={undo}")
    assert {4, 9} < set(rejected(result)) and "taken back and skipped" in result.output
    found = assert_same_training(result, waited)
    assert found.loss == 0 or undo == "inverse"


def test_a_failure_between_a_step_that_is_not_finite_and_its_commit(launch, clipped, validate):
    shape = Shape(replicas=3)
    result = overflowing(launch, *validate, faults("kill 0.1 after 1STEP@4", "kill 1.0 before 0REDUCE@9"), shape=shape)
    assert_same_training(result, overflowing(launch, *clipped, shape=shape), {"0.1", "1.0"})


@pytest.mark.parametrize("clip", ("sync", "validate"))
def test_the_job_ends_where_they_are_not_to_be_skipped(launch, clipped, clip):
    result = launch(*clipped, f"recycle.clip={clip}", script=WRAPPED, RECYCLE_TEST_WRAP=OVERFLOW).finish()
    assert_one_line(result, "the gradient norm of step 4 is inf. No checkpoint was saved")
