"""The coordinator's host dies, or is cut off: the job goes on from another host."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.support.hosts import HostsRun
from tests.support.jobs import PLAIN, WRAPPED, Shape, after_step, assert_same_training, hold
from tests.support.launching import launching

pytestmark = pytest.mark.plain_too
THREE = Shape(replicas=3, stages=1)


@pytest.fixture
def launch(request, vehicle, tmp_path, trio):
    with launching(request.getfixturevalue(vehicle.server), tmp_path, partial(HostsRun, trio), vehicle) as launch:
        yield launch
    for name in trio.names:
        trio.mend(name)


def held(folder) -> dict[str, object]:
    return {"script": WRAPPED, "shape": THREE, "RECYCLE_TEST_WRAP": json.dumps([hold(folder)])}


def test_the_coordinators_host_dies(launch, reference, tmp_path):
    run = launch("recycle.heartbeat_timeout_s=3", **held(tmp_path))
    after_step(run, 4)
    run.hear("standby", 2)
    run.crash("alpha")
    run.hear("coordinator")
    (tmp_path / "go").touch()
    result = run.finish()
    assert_same_training(result, reference(shape=THREE), {"0.0"})
    assert run.others["gamma"].wait(60) == 0
