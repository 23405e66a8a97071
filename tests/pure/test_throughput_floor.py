"""``max_slowdown``: where the survivors are too slow, the job ends at a commit with a checkpoint and a code of its
own.
"""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.output import SUPERVISORS, WORKERS, CoordinatorOutput
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, End, Over
from recycle_plugin.core.messages.from_workers import Exited, Left, Ready, SurvivorReport, Terminate
from recycle_plugin.core.worker.control_view import ControlView, JobEnded
from tests.support.membership import holds, job, member, resumed, said, step


def report(
    membership: Membership, generation: int, ranks: list[int], period_us: int, stepped: int = 0
) -> CoordinatorOutput:
    for rank in ranks:
        out = membership.receive(
            SurvivorReport(rank, generation, stepped, "plan", holds(rank), period_us=period_us), 0.0
        )
    return out


def begun(**more: object) -> Membership:
    """Four workers whose plan takes 1000 us a step."""
    membership = Membership(4)
    for rank in range(4):
        membership.receive(Ready(member(rank), 0, job(**more)), 0.0)
    report(membership, 0, [0, 1, 2, 3], 1000)
    return membership


def after_a_loss(period_us: int, **more: object) -> tuple[Membership, CoordinatorOutput]:
    membership = begun(**more)
    step(membership, 0, 1)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    return membership, report(membership, 1, [0, 1, 3], period_us, 1)


def test_too_slow_is_the_end_of_a_step_that_nobody_can_have_started():
    _, out = after_a_loss(2001, max_slowdown=0.5)
    (end,) = said(out, End)
    assert (end.step, end.failed, end.code) == (4, False, TRY_AGAIN) and "50% of the fault-free plan's" in end.reason
    assert resumed(out) == [(1, 1)], "the interrupted step is finished first"
    (event,) = [event for event in out.events if event.kind == "throughput_floor"]
    assert (
        event.details == {"throughput": 0.4998, "step": 3, "code": 75}
        and "checkpoint of step 3 and exit code 75" in event.text
    )
    assert decode(encode(end)) == end


@pytest.mark.parametrize("period, limit", [(2000, 0.5), (5000, None), (5000, 0.9)])
def test_not_too_slow_goes_on(period, limit):
    _, out = after_a_loss(period, max_slowdown=limit)
    assert not said(out, End) and resumed(out) == [(1, 1)]
    (event,) = [event for event in out.events if event.kind == "resume"]
    assert event.details["throughput"] == 1000 / period


def test_the_launcher_gets_the_code_where_the_workers_left_with_it():
    for codes, expected in (((75, 75, 75), 75), ((0, 0, 0), 0)):  # the second: the script was through before that step
        membership, _ = after_a_loss(3000, max_slowdown=0.5)
        for rank, code in zip((0, 1, 3), codes):
            out = membership.receive(Left(rank, code), 0.0)
        assert out.messages == [(SUPERVISORS, Over(expected))]


def test_the_first_reason_to_end_counts():
    membership = begun(max_slowdown=0.5)
    (end,) = said(membership.receive(Terminate(0, "SIGTERM"), 0.0), End)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    out = report(membership, 1, [0, 1, 3], 9000)
    assert end.code == 0 and not said(out, End) and not any(event.kind == "throughput_floor" for event in out.events)


def test_a_stage_that_dies_out_on_the_way_is_a_failure():
    membership, _ = after_a_loss(3000, max_slowdown=0.5)
    out = membership.receive(Exited(3, -9, 0.0), 0.0)
    assert [(whom, message.failed) for whom, message in out.messages if isinstance(message, End)] == [(WORKERS, True)]
    assert said(out, Over) == [Over(1)]


def test_an_end_carries_its_code_to_the_script():
    line = ControlView(0)
    line.take(End(0, "lost", True))
    with pytest.raises(JobEnded) as caught:
        line.check()
    assert (
        caught.value.code == 1
        and JobEnded("slow", False, TRY_AGAIN).code == TRY_AGAIN
        and JobEnded("leave", False).code == 0
    )
