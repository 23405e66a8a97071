"""What the benchmarks compute, on event logs written by hand and on traces whose costs are known."""

from __future__ import annotations

import pytest

from recycle_plugin import planner
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.executor import Span
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import Instruction
from recycle_plugin.core.plan import Policy
from recycle_plugin.core.topology import Topology
from recycle_plugin.measure import Constants, Kill, TooShort, calibrate, intervals, recovery_costs
from recycle_plugin.simulator import simulate

LOST = Seat(0, 1)


def events(stall_s: float, before_s: float = 1.0, after_s: float = 2.0) -> list[dict]:
    """Steps 1 to 6, a kill half-way through step 7 that adds ``stall_s`` to its repetition, and six degraded steps."""
    log = [{"event": "committed", "step": step, "time": step * before_s} for step in range(1, 7)]
    killed = 6.5 * before_s
    log.append({"event": "lost", "seat": str(LOST), "time": killed + 0.03})
    log.append({"event": "resume", "committed": 6, "ahead": 0, "time": killed + 0.05, "timings": {"plan_s": 0.01, "notice_s": 0.0}})
    return log + [{"event": "committed", "step": 6 + n, "time": killed + stall_s + n * after_s} for n in range(1, 8)]


def started(step: int, seconds: float) -> Span:
    return Span(Seat(0, 0), Instruction.parse(f"0F0.0@{step}"), round(1e6 * seconds), round(1e6 * seconds) + 1)


def test_what_a_kill_cost_is_the_repetition_at_the_degraded_speed_and_the_stall():
    (cost,) = recovery_costs([Kill(LOST, 6.5)], events(stall_s=0.25), [started(7, 6.0), started(7, 6.6)])
    assert (cost.before_s, cost.after_s, cost.phase) == pytest.approx((1.0, 2.0, 0.5))
    assert cost.redone_s == pytest.approx(0.5 * 2.0)  # half a step, run again at half the speed
    assert cost.stall_s == pytest.approx(0.25)
    assert cost.cost_s == pytest.approx(1.25)


def test_the_shares_add_up_to_the_cost():
    (cost,) = recovery_costs([Kill(LOST, 6.5)], events(stall_s=0.4), [started(7, 5.9)])
    assert cost.detection_s + cost.regroup_s + cost.redone_s + cost.rest_s == pytest.approx(cost.cost_s)
    assert cost.detection_s == pytest.approx(0.03) and cost.regroup_s == pytest.approx(0.02)


def test_work_on_the_step_from_before_its_predecessors_commit_is_redone_too():
    early, late = (recovery_costs([Kill(LOST, 6.5)], events(0.3), [started(7, at)])[0] for at in (5.8, 6.0))
    assert early.cost_s == pytest.approx(late.cost_s)
    assert early.redone_s - late.redone_s == pytest.approx(0.2 * 2.0)


def test_a_run_that_ends_too_early_is_no_measurement():
    with pytest.raises(TooShort, match="before it went on without seat 0.1"):
        recovery_costs([Kill(LOST, 6.5)], [event for event in events(0.2) if event["event"] != "resume"], [])
    with pytest.raises(TooShort, match="no two commits"):
        intervals({1: 1.0, 3: 3.0}, 1, 3)


@pytest.mark.parametrize("constants", [Constants(0, 0, 0, 0), Constants(dispatch=120, communication=700, reduce=2500, step=900)])
def test_calibration_finds_the_constants_that_a_trace_was_made_with(constants):
    nominal = 20_000
    costs = CostModel((nominal,) * 2, (nominal,) * 2, (nominal,) * 2, constants.communication, (constants.reduce,) * 2, (constants.step,) * 2, constants.dispatch)
    plan = planner.plan(Topology(replicas=2, stages=2, micro_batches=4).full(), costs, Policy())
    assert calibrate(simulate(plan, costs, steps=8), nominal) == constants


def test_a_trace_without_what_is_to_be_measured_says_so():
    with pytest.raises(TooShort, match="nowhere shows a worker that waits for a tensor"):
        calibrate([started(step, step) for step in range(1, 8)], 10)
