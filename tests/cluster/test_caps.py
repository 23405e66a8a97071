"""An activation cap holds in a real job, and changes nothing of what is trained."""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary import profile
from recycle_plugin.lab.planner import analytic
from tests.support.jobs import assert_one_line, assert_same_training, faults

pytestmark = pytest.mark.plain_too


def test_room_for_one_micro_batch(launch, reference, tmp_path):
    """Without a cap each worker holds two; after the loss the stage's survivor runs all four through room for one."""
    model = analytic.profile(analytic.GptShape("tiny", layers=2, hidden=16, sequence=16, vocabulary=256))
    path = tmp_path / "profile.json"
    profile.write(model, path)
    cap = "recycle.activation_cap=[2,1]", f"recycle.costs={path}"
    result = launch(*cap, faults("kill 0.1 before 1F0.1@6")).finish()
    assert_same_training(result, reference(), {"0.1"})
    held = {event["seat"]: event["held"] for event in result.of("peak")}
    assert held["1.1"] == 1
    assert max(event["held"] for event in reference().of("peak") if event["seat"].endswith(".1")) == 2


@pytest.mark.plain_too(deepspeed=False)
def test_what_a_profile_does_not_fit_is_refused(launch, tmp_path):
    path = tmp_path / "profile.json"
    profile.write(analytic.profile(analytic.GptShape("tiny", layers=2, hidden=16), micro_batch=3), path)
    result = launch(f"recycle.costs={path}").finish()
    assert_one_line(result, "recycle.costs: measured with micro-batches of 3, and the job's have 1; measure again")
