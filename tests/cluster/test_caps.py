"""An activation cap holds in a real job, and changes nothing of what is trained."""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import assert_same_training, faults

pytestmark = pytest.mark.plain_too


def test_room_for_one_micro_batch(launch, reference, tmp_path):
    """Without a cap each worker holds two; after the loss the stage's survivor runs all four through room for one."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": [90, 120], "input": [90, 120], "weight": [90, 120]}))
    cap = "recycle.activation_cap=[2,1]", f"recycle.costs={path}"
    result = launch(*cap, faults("kill 0.1 before 1F0.1@6")).finish()
    assert_same_training(result, reference(), {"0.1"})
    held = {event["seat"]: event["held"] for event in result.of("peak")}
    assert held["1.1"] == 1
    assert max(event["held"] for event in reference().of("peak") if event["seat"].endswith(".1")) == 2
