"""A line that loses many packets for a while costs at most the worker whose host it is."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.cluster.test_succession import FOUR, end, start
from tests.support.hosts import HostsRun
from tests.support.jobs import PLAIN, assert_same_training
from tests.support.launching import launching

LOSS, DELAY_S, LOSSY_S = 0.3, 0.2, 10.0


@pytest.fixture
def vehicle():
    return PLAIN


@pytest.fixture
def launch(plain_server, tmp_path, four):
    with launching(plain_server, tmp_path, partial(HostsRun, four), PLAIN) as launch:
        yield launch


@pytest.mark.all_kills
@pytest.mark.parametrize("name", ("alpha", "beta"), ids=("the coordinator's", "the standby's"))
def test_a_lossy_line_costs_no_worker_of_another_host(name, launch, reference, four, tmp_path):
    run = start(launch, tmp_path, "recycle.rejoin=never")
    with four.lossy(name, LOSS, DELAY_S, seed=1):
        time.sleep(LOSSY_S)  # how long it lasts
    result = end(run, tmp_path)
    lost = {each["seat"] for each in result.of("lost")}
    assert lost <= {f"{four.names.index(name)}.0"}, result.output[-6000:]
    assert_same_training(result, reference(shape=FOUR), lost)
