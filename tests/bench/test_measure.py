"""What the benchmarks compute, on event logs written by hand and on traces whose costs are known."""

from __future__ import annotations

import pytest

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.experiments.measurements import (
    Constants,
    Kill,
    TooShort,
    calibrate,
    intervals,
    leave_costs,
    recovery_costs,
)
from recycle_plugin.lab.simulator import simulate

LOST = Seat(0, 1)


def commits(*took: float) -> list[dict]:
    """Of steps that took so many seconds, from step 1 on."""
    return [{"event": "committed", "step": step, "time": sum(took[:step])} for step in range(1, len(took) + 1)]


def resumed(*steps: int) -> list[dict]:
    return [{"event": "resume", "committed": step} for step in steps]


def test_what_a_leave_cost_is_what_steps_took_longer_than_those_with_the_same_members():
    """Asked for in step 7, gone after step 8; another one in step 16, gone after it."""
    steps = [1.0] * 6 + [1.1, 1.0] + [2.3, 2.0, 1.9] + [2.0] * 4 + [2.0] + [3.0, 3.5] + [3.0] * 5
    log = resumed(0, 8, 16) + commits(*steps)
    first, second = leave_costs([(LOST, 6.5), (Seat(1, 0), sum(steps[:15]) + 0.1)], log)
    assert (first.seat, first.before_s, first.after_s) == ("0.1", pytest.approx(1.0), pytest.approx(2.0))
    assert first.extra_s == pytest.approx(0.1 + 0.3 - 0.1) and first.worst_s == pytest.approx(0.3)
    assert (second.before_s, second.after_s) == pytest.approx((2.0, 3.0))
    assert second.extra_s == second.worst_s == pytest.approx(0.5)
    with pytest.raises(TooShort, match="2 were to leave, and training went on 1 times without one"):
        leave_costs([(LOST, 6.5), (LOST, 7.0)], resumed(0, 8) + commits(*steps))


def events(stall_s: float, before_s: float = 1.0, after_s: float = 2.0) -> list[dict]:
    """Steps 1 to 6, a kill half-way through step 7 that costs ``stall_s``, and degraded steps up to 13."""
    log = [{"event": "committed", "step": step, "time": step * before_s} for step in range(1, 7)]
    killed = 6.5 * before_s
    log.append({"event": "lost", "seat": str(LOST), "time": killed + 0.03})
    log.append(
        {
            "event": "resume",
            "committed": 6,
            "ahead": 0,
            "time": killed + 0.05,
            "timings": {"plan_s": 0.01, "notice_s": 0.0},
        }
    )
    return log + [
        {"event": "committed", "step": 6 + n, "time": killed + stall_s + (n - 0.5) * after_s} for n in range(1, 8)
    ]


def ran(seat: str, text: str, at_s: float, took_s: float) -> Span:
    return Span(Seat.parse(seat), Instruction.parse(text), round(1e6 * at_s), round(1e6 * (at_s + took_s)))


def step_7() -> list[Span]:
    """Two micro-batches of each replica, F 0.1 s, I 0.1 s, W 0.05 s.

    0.1 had two F and an I behind it when it was killed, and was at the next I, which has left no trace; 1.1 runs both
    micro-batches.  0.0 makes an activation once more, a little slower.
    """
    before = [
        ran("0.0", "0F0.0@7", 6.0, 0.1),
        ran("0.0", "0F0.1@7", 6.1, 0.1),
        ran("0.1", "1F0.0@7", 6.1, 0.1),
        ran("0.1", "1F0.1@7", 6.2, 0.1),
        ran("0.1", "1I0.0@7", 6.3, 0.1),
        ran("1.0", "0F1.0@7", 6.0, 0.1),
        ran("1.1", "1F1.0@7", 6.45, 0.1),
    ]
    again = [
        ran("1.1", "1F0.0@7", 6.6, 0.1),
        ran("1.1", "1F0.1@7", 6.7, 0.1),
        ran("1.1", "1I0.0@7", 6.8, 0.1),
        ran("0.0", "0F0.1@7", 6.6, 0.15),
    ]
    rest = [
        ran("1.1", "1I0.1@7", 6.9, 0.1),
        ran("1.1", "1W0.0@7", 7.0, 0.05),
        ran("1.1", "1REDUCE@7", 7.05, 0.1),
        ran("0.0", "0F0.0@8", 7.2, 0.1),
    ]
    return before + again + rest


def test_what_is_run_again_is_what_has_two_spans():
    (cost,) = recovery_costs([Kill(LOST, 6.5)], events(stall_s=0.55), step_7())
    assert (cost.before_s, cost.after_s, cost.phase) == pytest.approx((1.0, 2.0, 0.5))
    assert cost.redone_s == pytest.approx(0.3), "of 1.1; 0.0 had less, and nobody ran it after the other"
    assert cost.redone_share == pytest.approx(0.45 / (0.1 + 0.15 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.05))
    assert cost.restart_share == pytest.approx(0.7 / 0.9), (
        "seven had been run, one of them a little quicker than when it was again"
    )
    assert cost.finished_share == pytest.approx(0.3 / 0.9)
    assert cost.cost_s == pytest.approx(0.55) and cost.stall_s == pytest.approx(0.25)


def events_of_two_kills() -> list[dict]:
    """Another worker dies half-way through the step after 12."""
    log = [event for event in events(0.55) if event.get("step", 0) <= 12]
    killed = log[-1]["time"] + 1.0
    log.append({"event": "lost", "seat": "1.0", "time": killed + 0.02})
    log.append(
        {
            "event": "resume",
            "committed": 12,
            "ahead": 1,
            "time": killed + 0.06,
            "timings": {"plan_s": 0.02, "notice_s": 0.0},
        }
    )
    return log + [{"event": "committed", "step": 12 + n, "time": killed + 0.1 + n * 4.0} for n in range(1, 8)]


def test_of_two_kills_each_has_its_own():
    log = events_of_two_kills()
    second = next(event["time"] for event in log if event.get("seat") == "1.0") - 0.02
    later = [ran("1.0", "0F1.0@13", second - 0.3, 0.1), ran("0.0", "0F1.0@13", second + 0.2, 0.2)]
    first, other = recovery_costs([Kill(LOST, 6.5), Kill(Seat(1, 0), second)], log, step_7() + later)
    assert first.redone_s == pytest.approx(0.3)
    assert (other.redone_s, other.redone_share) == pytest.approx((0.2, 1.0)) and other.ahead == 1


def test_the_shares_add_up_to_the_cost():
    (cost,) = recovery_costs([Kill(LOST, 6.5)], events(stall_s=0.4), step_7())
    assert cost.detection_s + cost.regroup_s + cost.redone_s + cost.rest_s == pytest.approx(cost.cost_s)
    assert cost.detection_s == pytest.approx(0.03) and cost.regroup_s == pytest.approx(0.02)


def test_where_the_survivors_had_it_all_nothing_is_run_again():
    """The worker died with its gradients in its stage's sum."""
    (cost,) = recovery_costs([Kill(LOST, 6.5)], events(0.3), [span for span in step_7() if span.start_us < 6.5e6])
    assert (cost.redone_s, cost.redone_share) == (0, 0) and cost.stall_s == cost.cost_s == pytest.approx(0.3)


def test_a_run_that_ends_too_early_is_no_measurement():
    with pytest.raises(TooShort, match="before it went on without seat 0.1"):
        recovery_costs([Kill(LOST, 6.5)], [event for event in events(0.2) if event["event"] != "resume"], [])
    with pytest.raises(TooShort, match="no two commits"):
        intervals({1: 1.0, 3: 3.0}, 1, 3)


@pytest.mark.parametrize(
    "constants", [Constants(0, 0, 0, 0), Constants(dispatch=120, communication=700, reduce=2500, step=900)]
)
def test_calibration_finds_the_constants_that_a_trace_was_made_with(constants):
    nominal = 20_000
    costs = CostModel(
        (nominal,) * 2,
        (nominal,) * 2,
        (nominal,) * 2,
        constants.communication,
        (constants.reduce,) * 2,
        (constants.step,) * 2,
        constants.dispatch,
    )
    plan = planner.plan(Topology(replicas=2, stages=2, micro_batches=4).full(), costs, Policy())
    assert calibrate(simulate(plan, costs, steps=8), nominal) == constants


def test_a_trace_without_what_is_to_be_measured_says_so():
    with pytest.raises(TooShort, match="nowhere shows a worker that waits for a tensor"):
        calibrate([ran("0.0", f"0F0.0@{step}", step, 1e-6) for step in range(1, 8)], 10)
