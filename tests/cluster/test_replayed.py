"""A stage that has lost its last worker is replayed from what its neighbours have logged, and nothing else is lost."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Launch
from tests.support.jobs import DEEPSPEED, PLAIN, Shape, difference, faults

LOG = ("++recycle.log={}", "++recycle.checkpoint.overhead=0.02", "recycle.rejoin=always")
ALONE = Shape(1, 3, 4)


@pytest.fixture(params=[PLAIN, DEEPSPEED], ids=lambda vehicle: vehicle.name)
def vehicle(request):
    return request.param


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(("kill 0.1 before 1F0.0@6",), id="between two"),
        pytest.param(("kill 0.0 after 0STEP@7",), id="the first"),
        pytest.param(("kill 0.2 before 2STEP@7",), id="the last"),
        pytest.param(("kill 0.1 before 1F0.2@6", "kill 0.2 before 2F0.2@6"), id="two beside each other"),
        pytest.param(("kill 0.1 before 1F0.2@6", "kill 0.1#1 after 1F0.0@6"), id="twice"),
        pytest.param(("kill 0.1 before 1F0.0@6", "kill 0.2 before 2F0.0@9"), id="one after the other"),
    ],
)
def test_a_job_without_replicas_goes_on(launch: Launch, reference, kills):
    result = launch(*LOG, faults(*kills), shape=ALONE).finish()
    assert result.code == 0, result.output[-8000:]
    assert len(result.of("replayed")) == len(kills), result.output[-8000:]
    assert difference(result, reference(*LOG, shape=ALONE)).tolerated


@pytest.mark.parametrize("exact", (True, False))
def test_a_stage_that_has_lost_all_replicas_is_replayed_by_one(launch: Launch, reference, exact):
    """The other one catches up from it later, or is started again too late for that."""
    more, kills = (*LOG, f"recycle.exact={exact}"), ("kill 0.1 before 1F0.0@6", "kill 1.1 before 1F1.0@6")
    result = launch(*more, faults(*kills), shape=Shape(2, 2, 2)).finish()
    assert result.code == 0, result.output[-8000:]
    assert len(result.of("replayed")) == 1, result.output[-8000:]
    found = difference(result, reference(*more, shape=Shape(2, 2, 2)))
    assert found.tolerated and (not exact or found.loss == found.parameters == 0)
