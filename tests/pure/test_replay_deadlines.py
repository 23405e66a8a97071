"""How long stages that nobody holds may be silent, and who is given up for that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from recycle_plugin.core.coordinator import replay_deadlines
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.replay_deadlines import FACTOR, FLOOR_S, LATER_S
from recycle_plugin.core.messages.from_coordinator import Expected, Fence, Generation, Replay
from recycle_plugin.core.messages.from_workers import Durable, Exited, Replaying, SupervisorHeartbeat
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.control_view import ControlView
from tests.support.loop_worker import MEMBERS, Worker
from tests.support.membership import said, started
from tests.support.replaying import BACK, come, has_replayed, lose, trained

WAIT_S = 100.0  # of tests/support/membership; busy_timeout_s is 20 there


def away(**more: object) -> Membership:
    """Stage 1 has nobody; its two workers together computed 1 s in each step."""
    membership = trained(**more)
    lose(membership, 2, 3, now=7.0)
    return membership


def starts(membership: Membership, now: float) -> None:
    """The supervisor of rank 3 says that the next process there still starts."""
    membership.receive(SupervisorHeartbeat(3, False, 1.0, incarnation=1), now)


def limits(membership: Membership) -> tuple[float | None, float]:
    found = replay_deadlines.patience(membership.state, (1,))
    return found.give_up_s, found.end_s


def test_a_start_has_as_long_as_starts_took_and_never_less_than_the_user_says():
    membership = away()
    assert limits(membership) == (None, WAIT_S), "nothing was measured"
    membership.state.recovery_times.ready(0, 60.0, due=30.0, again=True)
    assert limits(membership) == (None, FACTOR * 31.0), "with the second before it"
    membership.state.recovery_times.ready(0, 33.0, due=30.0, again=True)
    assert limits(membership) == (None, WAIT_S)


@pytest.mark.parametrize(
    ("busy_s", "work_s", "found"),
    (
        (1.0, 1.0, (FLOOR_S, WAIT_S)),
        (60.0, 1.0, (60.0, WAIT_S)),
        (20.0, 5.0, (50.0, WAIT_S)),
        (20.0, 30.0, (300.0, 300.0)),
    ),
)
def test_a_step_has_ten_times_what_one_worker_needs_for_it_and_never_less_than_a_floor(busy_s, work_s, found):
    membership = away(busy_timeout_s=busy_s)
    come(membership, busy_timeout_s=busy_s)
    membership.state.steps.figures._work[1].extend([int(work_s * 1e6)] * 20)
    assert limits(membership) == found


def test_the_first_step_comes_behind_a_load():
    membership = away(write_s=4.0)
    come(membership)
    assert limits(membership) == (FACTOR * 5.0, WAIT_S)


def test_what_was_not_measured_costs_nobody():
    membership = started(log=True, rejoin="always")
    membership.receive(Durable(0, 0, "a folder"), 0.0)
    lose(membership, 2, 3, now=7.0)
    come(membership)
    assert limits(membership) == (None, WAIT_S)


def test_who_waits_is_told_what_to_expect_and_waits_longer_than_the_coordinator():
    membership = trained()
    (first,) = said(lose(membership, 2, 3, now=7.0), Expected)
    assert first == Expected("the start of the next process, predicted to take 10 s, assumed", WAIT_S + LATER_S)
    (then,) = said(come(membership), Expected)
    assert then == Expected("the next replayed step, predicted to take 1 s", WAIT_S + LATER_S)
    view = ControlView(0)
    view.take(then)
    assert (view.expected, view.replayed) == (then, 1)


def test_who_is_silent_for_too_long_is_given_up_and_another_one_replays():
    membership = away()
    come(membership)
    come(membership, WorkerId(3, 1))
    assert not said(membership.tick(1.0 + FLOOR_S), Fence)
    out = membership.tick(1.5 + FLOOR_S)
    assert {fence.worker for fence in said(out, Fence)} == {BACK} and membership.ended is None
    (warned,) = [event.text for event in out.events if event.kind == "warning"]
    assert "nothing was heard of its replay for 30.5 s: the next replayed step, predicted to take 1 s" in warned
    out = membership.receive(Exited(2, -9, 32.0, incarnation=1), 32.0)
    assert [whom for whom, each in out.messages if isinstance(each, Replay)] == [WorkerId(3, 1)]
    assert limits(membership) == (2 * FLOOR_S, WAIT_S), "a machine that is slow for good comes through in the end"
    has_replayed(membership, WorkerId(3, 1))
    assert membership.state.replay.given_up == 0


def test_a_word_of_a_replayed_step_begins_the_time_anew():
    membership = away()
    come(membership)
    membership.receive(Replaying(2, 1, incarnation=1), FLOOR_S)
    starts(membership, 2 * FLOOR_S)
    assert not said(membership.tick(2 * FLOOR_S), Fence)


def test_nobody_is_given_up_whom_nobody_follows_and_the_job_ends_no_sooner_than_the_user_says():
    membership = away(rejoin=1)
    come(membership, rejoin=1)
    starts(membership, 1.5 + FLOOR_S)
    assert not said(membership.tick(1.5 + FLOOR_S), Fence) and membership.ended is None
    membership.tick(1.5 + WAIT_S)
    assert (
        "for 100 s of the process that was to replay it: the next replayed step, predicted to take 1 s"
        in membership.ended.reason
    )


class Parked(Worker):
    """A worker whose last wait is for a stage that nobody holds; that is noted, and then the stage is there again."""

    def park(self) -> None:
        pass

    def asked_to_help(self) -> None:
        return None

    def help(self, wanted: Any) -> Iterator[Any]:
        return iter(())

    def wait(self, what: Any, ready: Any, interruptible: bool = True, at_least_s: float = 0.0) -> Iterator[Any]:
        if ready() is None:
            self.asked = what, at_least_s
            self.control_view.take(Generation(3, MEMBERS, 0, "it was replayed", 0.0))
        return (yield from super().wait(what, ready, interruptible))


def test_a_parked_worker_waits_as_long_as_it_was_told_and_says_what_for():
    worker = Parked()
    of_stage_0 = tuple(each for each in MEMBERS if each.seat.stage == 0)
    worker.control_view.take(Expected("the next replayed step, predicted to take 7 s", 500.0))
    worker.control_view.take(Generation(2, of_stage_0, 0, "a loss", 0.0))
    list(worker.loop.recover())
    assert worker.asked == ("the replay of stage 1 (a loss): the next replayed step, predicted to take 7 s", 500.0)
