"""Whatever an optimizer keeps, and wherever: its worker is lost, comes back, and has it, to the bit."""

from __future__ import annotations

import json

import pytest

from tests.jobs.odd_optimizers import MADE
from tests.support.jobs import WRAPPED, assert_one_line, difference
from tests.support.launching import Launch
from tests.support.returns import assert_came_back, comes_back

pytestmark = pytest.mark.plain_too
STEPS = 80  # a step in which slow weights and fast ones meet is behind the return
EXACT = ("recycle.exact=true", "recycle.check_replicas=1")


@pytest.mark.parametrize("kind", MADE)
def test_it_comes_back_with_its_worker(launch: Launch, tmp_path, kind):
    wrap = {"name": "odd_optimizer", "kind": kind}
    whole = launch(f"steps={STEPS}", *EXACT, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps([wrap])).ended_well()
    result = comes_back(launch, tmp_path, "kill 1.1 before 1W1.0@5", *EXACT, wraps=(wrap,), steps=STEPS).finish()
    assert_came_back(result, whole, "1.1", exact=True)


@pytest.mark.plain_too(deepspeed=False)
def test_steps_of_one_that_calls_no_hooks_are_taken_back(launch: Launch):
    """With "validate" each step that is clipped is."""
    wrap = json.dumps([{"name": "odd_optimizer", "kind": "lookahead5"}])
    more = ("steps=30", "gradient_clipping=0.2", "recycle.exact=true")
    runs = [
        launch(*more, f"recycle.clip={clip}", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
        for clip in ("sync", "validate")
    ]
    assert [run.code for run in runs] == [0, 0], runs[1].output[-6000:]
    assert difference(runs[1], runs[0]).none


@pytest.mark.plain_too(deepspeed=False)
def test_what_could_not_come_back_is_refused_before_the_first_step(launch: Launch):
    wrap = json.dumps([{"name": "odd_optimizer", "kind": "iterating"}])
    result = launch(script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_one_line(result, "Iterating: attributes.numbers is a itertools.count, whose content can't be read")
    assert not result.of("committed")
