"""A worker's loop at planned changes: they hold from their step on, no earlier and no later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from recycle_plugin.core.messages.contributions import LOSS, Contributions
from recycle_plugin.core.messages.from_coordinator import Committed, End, Generation, Resume
from recycle_plugin.core.messages.from_workers import Contribution, SurvivorReport
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, pack
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlView, JobEnded
from recycle_plugin.core.worker.training_loop import StepProgram, TrainingLoop
from recycle_plugin.simulator.shared_planner import SharedPlanner

SHAPE, COSTS = Topology(2, 2, 2), CostModel.uniform(2)
MEMBERS = tuple(Member(rank, seat, str(rank), "here") for rank, seat in enumerate(sorted(SHAPE.seats)))


class Worker:
    """Rank 0's port and replica: whatever it reports holds at once, and each step that it executes is committed.

    No wait may be needed.
    """

    valid_from = 0

    def __init__(self) -> None:
        self.control_view, self.ran = ControlView(0), []
        self.loop = TrainingLoop(self, self, SharedPlanner(COSTS, Policy()), SHAPE, MEMBERS[0].seat, StepMachine(0))
        self.control_view.take(Generation(1, MEMBERS, 0, "start", 0.0))
        list(self.loop.start())

    def send(self, message: object) -> None:
        if isinstance(message, SurvivorReport):
            self.control_view.take(Resume(message.generation, message.stepped, {str(MEMBERS[0].seat): message.held}))

    def wait(self, what: Any, ready: Callable[[], Any], interruptible: bool = True) -> Iterator[Any]:
        yield from ()
        value = ready()
        assert value is not None, f"it would wait for {what}"
        return value

    def execute(self, program: StepProgram) -> Iterator[Any]:
        yield from ()
        self.ran.append(program)
        self.loop.applied(program.step)
        self.control_view.take(Committed(program.step, {}))
        self.loop.machine.commit(program.step)

    def stop_helping(self) -> None:
        pass

    def held(self) -> set:
        return set()

    def held_draws(self) -> dict:
        return {}

    @property
    def places(self) -> dict:
        return {}

    @property
    def ended(self) -> int:
        return 0

    @property
    def lacks(self) -> int:
        return 0

    def place_behind(self, step: int) -> None:
        return None

    def clock(self) -> float:
        return 0.0

    def reach(self, point: str) -> None:
        pass

    def take_state(self, iterator_state: Any) -> None:
        self.iterator_state = iterator_state

    def record_norm(self, step: int, norm: float) -> None:
        pass

    def discard_after(self, after: int, valid_from: int) -> None:
        pass

    def keep_only(self, members: Any) -> None:
        pass

    def train(self, steps: int) -> list[int]:
        list(self.loop.advance(steps))
        return [program.step for program in self.ran]


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
    """They go on without it from the step before which it is to leave, and lose somebody, before it comes to that
    step.
    """
    worker = Worker()
    worker.train(2)
    worker.control_view.take(Generation(2, MEMBERS[1:], 3, "leave", 0.0))
    worker.control_view.take(Generation(3, MEMBERS[2:], 0, "a loss", 0.0))
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
    resume = Resume(2, 1, {str(seat): pack(have) for seat, have in held.items()}, norm=50.0, rejected=True)
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
    assert (
        control_view.lose_coordinator()
        and control_view.end.failed
        and "coordinator's host is gone" in control_view.end.reason
    )
