"""Some switches of the settings table in real jobs, by what their workers then execute: tests/settings/test_switches.py
has the list of all.
"""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.observability.trace import read_traces
from tests.support.jobs import LOSS_TOLERANCE, STEPS, assert_one_line, assert_same_training, faults

pytestmark = pytest.mark.plain_too(deepspeed=False)


def test_no_stage_steps_before_all_have_their_gradients(launch, reference):
    """Also where a step is finished after a loss.  That stages do step apart by default, test_kills.py shows."""
    kills = "kill 0.1 before 1VALIDATE@5", "kill 1.0 after 0REDUCE@9"
    result = launch("recycle.stagger_optimizer=false", "recycle.trace=true", faults(*kills)).finish()
    assert_same_training(result, reference(), {"0.1", "1.0"})
    spans = read_traces(result.folder / "trace")
    for step in range(1, STEPS + 1):
        begins = min(
            span.start_us for span in spans if span.instruction.op is Op.STEP and span.instruction.step == step
        )
        for stage in (0, 1):
            assert begins >= min(
                span.end_us for span in spans if span.instruction == Instruction(Op.REDUCE, stage, None, step)
            )
    assert {span.instruction.step for span in spans if span.instruction.op is Op.VALIDATE} == set(range(1, STEPS + 1))


def test_without_rerouting_a_loss_ends_the_job(launch, reference):
    """Without a split backward either, so that there is a B to be killed at; and another seed draws other dropout
    masks.
    """
    kill = "kill 0.1 before 1B0.1@6"
    result = launch("recycle.reroute=false", "recycle.split_backward=false", "recycle.seed=4321", faults(kill)).finish()
    assert_one_line(
        result, "the job ends: seats 0.1 are lost and reroute is off: switch `reroute` on to go on without them"
    )
    assert [event["fault"] for event in result.of("fault")] == [kill]
    other = [event["loss"] for event in result.of("loss")]
    assert len(other) >= 5 and max(abs(one - two) for one, two in zip(other, reference().losses)) > 100 * LOSS_TOLERANCE
