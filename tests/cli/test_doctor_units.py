"""The table of units of ``recycle doctor``: its figures against the planner's, and what a job survives whose unit is a
replica.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from tests.support.doctor import ON, SIZES, data

SHAPE, COSTS = Topology(4, 3, 6), CostModel.uniform(3, 1000, 1000, 1000)
UNIT = {"recycle": {"enabled": True, "unit": "replica"}}
SHRINKS = {"recycle": {"enabled": True, "unit": "replica", "batch": "shrink"}}


def period(*lost: Seat, shrinks: bool = False) -> int:
    return planner.plan(SHAPE.full().without(*lost), COSTS, Policy(shrinks=shrinks)).period_us


@pytest.mark.parametrize("config", (ON, UNIT, SHRINKS))
def test_throughput_is_the_planners(doctor, config):
    """Whatever unit the job has."""
    rows = data(doctor, {**SIZES, **config, "gradient_clipping": 0.0}, "--pp 3 --dp 4 --micro-batches 6")["units"]
    assert [row["losses"] for row in rows] == [1, 2, 3]
    free = period()
    for row in rows:
        losses, found = row["losses"], {way: each["throughput"] for way, each in row["ways"].items()}
        worst = max(period(*(Seat(replica, stage) for replica in range(losses))) for stage in range(3))
        apart = period(*(Seat(replica, replica) for replica in range(losses)))
        gone = [seat for seat in SHAPE.seats if seat.replica < losses]
        assert found["worker, at worst"] == pytest.approx(free / worst, abs=1e-4)
        assert found["worker, at best"] == pytest.approx(free / apart, abs=1e-4)
        assert found["replica, constant"] == pytest.approx(free / period(*gone), abs=1e-4)
        shrunk = free / period(*gone, shrinks=True) * (4 - losses) / 4
        assert found["replica, shrink"] == pytest.approx(shrunk, abs=1e-4)
        stalls = {way: each["stalls_ms"] for way, each in row["ways"].items()}
        assert stalls["replica, shrink"] == 37.0 < min(stalls[way] for way in stalls if way != "replica, shrink")


def test_a_host_with_a_worker_of_every_replica_ends_a_job_of_whole_replicas(doctor):
    hosts = {"a": 1, "b": 2, "c": 1}  # 0.0, then 1.0 and 0.1, then 1.1
    of_workers, of_replicas = (
        data(doctor, {**SIZES, **config}, "--pp 2 --dp 2", hosts)["survives"]["hosts"] for config in (ON, UNIT)
    )
    assert [host["ends"] for host in of_workers] == ["coordinator", "", ""]
    assert [host["ends"] for host in of_replicas] == ["coordinator", "a worker of every replica", ""]


def test_the_documents_table(doctor):
    """A command that prints it stands beside it."""
    document = (Path(__file__).parents[2] / "recycle_plugin/docs/replicas.md").read_text()
    table = document.split("--micro-batches 6`):\n\n```\n")[1].split("```")[0].splitlines()
    _, text = doctor({**SIZES, **ON}, "--pp 4 --dp 4 --micro-batches 6")
    assert len(table) == 4 and [line for line in table if line not in text.splitlines()] == []
