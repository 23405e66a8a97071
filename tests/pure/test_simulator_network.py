"""Links: latency, bandwidth, and lines that carry one tensor at a time."""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.profile import Wire
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator import Conditions, simulate
from recycle_plugin.lab.simulator.network import Contended, alone, by_replica, by_stage
from recycle_plugin.planner import plan

INSIDE, ACROSS = Wire(1, 100), Wire(5, 10)


def send(stage: int, receiver: Seat, op: Op = Op.SEND_ACT) -> Instruction:
    return Instruction(op, stage, MicroBatch(0, 0), 0, receiver)


def test_two_tensors_on_one_line_follow_each_other() -> None:
    lines = Contended(by_stage, INSIDE, ACROSS, (1000, 1000))
    assert lines.arrival(0, Seat(0, 0), send(0, Seat(0, 1))) == 105
    assert lines.arrival(0, Seat(1, 0), send(0, Seat(1, 1))) == 205, "another worker of the same host"
    assert lines.arrival(50, Seat(0, 1), send(1, Seat(0, 0), Op.SEND_GRAD)) == 155, "the other way is free"
    assert lines.arrival(500, Seat(0, 0), send(0, Seat(0, 1))) == 605


def test_lanes_inside_a_host_are_each_workers_own() -> None:
    lines = Contended(by_replica, INSIDE, ACROSS, (1000, 1000))
    assert lines.arrival(0, Seat(0, 0), send(0, Seat(0, 1))) == lines.arrival(0, Seat(0, 1), send(1, Seat(0, 2))) == 11
    assert lines.arrival(0, Seat(0, 0), send(0, Seat(1, 1))) == 105, "a rerouted micro-batch leaves the host"


def test_contention_slows_a_step_and_plenty_of_bandwidth_does_not() -> None:
    shape = Topology(4, 2, 4)
    costs = CostModel.uniform(2, 100, 100, 100, communication=20)
    planned = plan(shape.full(), costs, Policy())

    def end(network) -> int:
        return max(span.end_us for span in simulate(planned, costs, 1, Conditions(network)))

    wide = Wire(20, 1e9)
    assert end(Contended(by_stage, wide, wide, (1000,))) == end(None)
    assert end(Contended(alone, INSIDE, Wire(0, 50), (1000,))) == end(None)
    assert end(Contended(by_stage, INSIDE, Wire(0, 50), (1000,))) > end(None)


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Wire(0, 0)
