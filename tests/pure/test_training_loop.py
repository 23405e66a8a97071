"""A worker's loop at planned changes: they hold from their step on, no earlier and no later."""

from __future__ import annotations

import pytest

from recycle_plugin.core.messages.contributions import LOSS, Contributions
from recycle_plugin.core.messages.from_coordinator import End, Generation, Resume
from recycle_plugin.core.messages.from_workers import Contribution
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.packed_data import among_all, pack
from recycle_plugin.core.worker.control_view import ControlView, JobEnded
from recycle_plugin.core.worker.training_loop import PLANS
from tests.support.loop_worker import MEMBERS, SHAPE, Worker


def test_without_a_change_it_runs_one_step_after_the_other() -> None:
    assert Worker().train(4) == [1, 2, 3, 4]


def test_a_planned_end_holds_from_its_step_on() -> None:
    worker = Worker()
    worker.control_view.take(End(3, "enough", False, 75))
    with pytest.raises(JobEnded, match="enough") as ended:
        worker.train(4)
    assert [program.step for program in worker.ran] == [1, 2] and (ended.value.failed, ended.value.code) == (False, 75)


def test_a_planned_leave_is_left_at_its_step() -> None:
    worker = Worker()
    worker.control_view.take(Generation(2, MEMBERS[1:], 3, "leave", 0.0))
    with pytest.raises(JobEnded, match="planned leave"):
        worker.train(4)
    assert [program.step for program in worker.ran] == [1, 2]


def test_who_was_to_leave_while_its_script_did_something_else_has_left_whatever_the_others_do_since() -> None:
    """They go on without it from the step before which it is to leave, lose somebody, and plan for who is to come back,
    before it comes to that step.
    """
    worker = Worker()
    worker.train(2)
    worker.control_view.take(Generation(2, MEMBERS[1:], 3, "leave", 0.0))
    worker.control_view.take(Generation(3, MEMBERS[2:], 0, "a loss", 0.0))
    worker.control_view.take(Generation(4, MEMBERS[1:], 8, "a return", 0.0))
    with pytest.raises(JobEnded, match="planned leave") as ended:
        list(worker.loop.recover())
    assert not ended.value.failed


def test_a_leave_that_a_loss_puts_off_is_none_yet() -> None:
    control_view = ControlView(0)
    for generation in (Generation(2, MEMBERS[1:], 3, "leave", 0.0), Generation(3, MEMBERS[:3], 0, "a loss", 0.0)):
        control_view.take(generation)
    assert not control_view.departed


def test_who_stays_does_the_others_work_from_that_step_on() -> None:
    worker = Worker()
    worker.control_view.take(
        Generation(2, tuple(member for member in MEMBERS if member.seat != Seat(1, 0)), 3, "leave", 0.0)
    )
    assert worker.train(4) == [1, 2, 3, 4]
    assert [sum(one.op is Op.F for one in program.instructions) for program in worker.ran] == [2, 2, 4, 4]


def test_a_worker_keeps_the_last_plans_alone(monkeypatch) -> None:
    """The pace of a worker may change for as long as the job runs."""
    loop, made = Worker().loop, []
    plan = loop._planner.plan
    monkeypatch.setattr(loop._planner, "plan", lambda view, generation: made.append(view) or plan(view, generation))
    paces = [Generation(2, MEMBERS, 0, "pace", 0.0, slowness=((Seat(0, 0), percent),)) for percent in range(200, 210)]
    for pace in (*paces, *paces[-PLANS:], paces[-2]):
        loop._plan_for(pace)
    assert len(loop._plans) == PLANS and len(made) == len(paces)


def test_what_is_void_has_no_say_in_where_data_comes_from() -> None:
    """A batch that only void work was done with need not be kept by anybody: another one may be drawn."""
    worker = Worker()
    worker.train(1)
    held = {seat: {Datum("params", seat.stage, None, 2)} for seat in SHAPE.seats}
    held[Seat(1, 0)] |= {
        Datum("stash", 0, MicroBatch(1, 0), 3),
        Datum("act", 0, MicroBatch(1, 0), 3),
        Datum("wgrad", 0, MicroBatch(1, 1), 2),
    }
    generation = Generation(2, MEMBERS, 0, "rejection of step 2", 0.0)
    worker.control_view.take(generation)
    resume = Resume(2, 1, among_all({str(seat): pack(have) for seat, have in held.items()}), norm=50.0, rejected=True)
    worker.loop._take_up(worker.loop.plan, resume)
    known = {datum for have in worker.iterator_state.held.values() for datum in have if datum.kind != "params"}
    assert known == {Datum("wgrad", 0, MicroBatch(1, 1), 2)}


def test_a_commit_takes_no_losses_of_later_steps() -> None:
    losses = Contributions()
    assert losses.add(Contribution(0, 1, LOSS, {"0.0": 1.0}, 2)) is None
    assert losses.add(Contribution(0, 2, LOSS, {"0.0": 2.0}, 2)) is None
    assert list(losses.committed(1)) == [(1, {"0.0": 1.0})]
    assert losses.add(Contribution(1, 2, LOSS, {"1.0": 3.0}, 2)) == {"0.0": 2.0, "1.0": 3.0}


def test_an_end_that_has_failed_says_why_also_when_the_coordinator_goes() -> None:
    control_view = ControlView(0)
    control_view.take(End(0, "stage 1 has no live worker left", failed=True))
    assert not control_view.lose_coordinator() and control_view.end.reason == "stage 1 has no live worker left"
    control_view.take(End(7, "SIGTERM", failed=False))
    assert control_view.lose_coordinator() and control_view.end.failed
    assert "coordinator's host is gone" in control_view.end.reason
