"""An activation cap in bytes, from a profile, holds in a real job, and changes nothing of what is trained."""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary import profile
from recycle_plugin.lab.planner import analytic
from tests.support.jobs import assert_one_line, assert_same_training, faults

pytestmark = pytest.mark.plain_too


def test_room_for_one_micro_batch(launch, reference, tmp_path):
    """Without a cap each worker holds two; after the loss the stage's survivor runs all four through room for one."""
    model = analytic.profile(analytic.GptShape("tiny", layers=2, hidden=16, sequence=16, vocabulary=256))
    costs, path = model.costs(stages=2, replicas=2), tmp_path / "profile.json"
    profile.write(model, path)
    needed = [max(pair) for pair in zip(costs.activation_bytes, costs.pending_bytes)]
    tight = needed.index(max(needed))
    cap = f"recycle.activation_cap={needed[tight]}B", f"recycle.costs={path}"
    result = launch(*cap, faults(f"kill 0.{tight} before {tight}F0.1@6")).finish()
    assert_same_training(result, reference(), {f"0.{tight}"})
    held = {event["seat"]: event["held"] for event in result.of("peak")}
    assert held[f"1.{tight}"] == 1
    assert max(event["held"] for event in reference().of("peak") if event["seat"].endswith(f".{tight}")) == 2


@pytest.mark.plain_too(deepspeed=False)
def test_what_a_profile_does_not_fit_is_refused(launch, tmp_path):
    path = tmp_path / "profile.json"
    profile.write(analytic.profile(analytic.GptShape("tiny", layers=2, hidden=16), micro_batch=3), path)
    result = launch("recycle.activation_cap=auto", f"recycle.costs={path}").finish()
    assert_one_line(result, "recycle.costs: measured with micro-batches of 3, and the job's have 1; measure again")
