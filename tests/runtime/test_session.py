"""Every wait of a worker wakes for the right thing, has a deadline, and names what it waited for."""

from __future__ import annotations

import queue
import threading

import pytest

from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_coordinator import Collected, Committed, End, Resume
from recycle_plugin.core.messages.from_workers import Left
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.control import session as session_module
from recycle_plugin.runtime.control.in_process import InProcess
from recycle_plugin.runtime.control.session import Session, connect_from_environment
from tests.support.coordinator import generation
from tests.support.secret import SECRET


def arrived(session, what) -> None:
    session.waiting.until("the message", what, interruptible=False)


def test_a_commit_wakes_its_waiter(coordinator):
    session = coordinator.session(0)
    coordinator.tell(Committed(3))
    session.waiting.for_commit(3)
    assert session.view.committed == 3


def test_a_deadline_names_what_was_waited_for(coordinator):
    session = coordinator.session(0, wait_timeout_s=0.05)
    with pytest.raises(WaitTimeout, match="for the commit of step 4, before its script had come to the settings"):
        session.waiting.for_commit(4)
    session.configure(Deadlines(wait_timeout_s=0.05), "warn")
    with pytest.raises(WaitTimeout, match="for the commit of step 4; raise recycle.wait_timeout_s"):
        session.waiting.for_commit(4)


def test_a_newcomer_is_served_in_a_wait_that_nothing_else_wakes(coordinator):
    session, served = coordinator.session(0, wait_timeout_s=1.0), []
    session.thread.ident, session.thread.idle = threading.get_ident(), lambda waiting: bool(served.append(waiting))
    session.waiting.until("what a newcomer is given in two goes", lambda: len(served) > 1 or None)


def test_a_membership_change_interrupts_a_wait(coordinator):
    session = coordinator.session(0)
    coordinator.tell(generation(1, [0]))
    with pytest.raises(Interrupted, match="generation 1: test"):
        session.waiting.for_commit(9)


def test_a_planned_change_does_not(coordinator):
    session = coordinator.session(0)
    coordinator.tell(generation(1, [0], from_step=7))
    coordinator.tell(Committed(1))
    session.waiting.for_commit(1)
    session.view.check()
    assert session.view.pending.from_step == 7 and session.view.interruption() is None


def test_the_end_of_the_job_ends_every_wait(coordinator):
    session = coordinator.session(0)
    coordinator.tell(End(0, "stage 1 is gone", True))
    with pytest.raises(JobEnded, match="stage 1 is gone") as ended:
        session.waiting.until("nothing", lambda: None, interruptible=False)
    assert ended.value.failed


def test_a_job_that_fails_before_its_start_is_left_at_once(coordinator):
    """... from wherever the worker is blocked; a job that has started ends at the worker's next wait."""
    told: queue.Queue = queue.Queue()
    early, late = (coordinator.session(rank, ended_early=told.put) for rank in (0, 1))
    late.view.adopt(generation(1, [1]))
    coordinator.tell(End(0, "the store is gone", True))
    assert told.get(timeout=10) is early
    coordinator.tell(Committed(1))  # when that is read, the end has been dealt with
    with late.waiting.changed:
        assert late.waiting.changed.wait_for(lambda: late.view.committed == 1, 10) and late.view.end is not None
    assert told.empty()


def test_a_planned_end_lets_the_present_step_go_on(coordinator):
    session = coordinator.session(0)
    coordinator.tell(End(5, "told to", False))
    coordinator.tell(Committed(1))
    session.waiting.for_commit(1)
    session.view.check()


def test_the_loss_of_the_coordinator_is_the_end_and_says_why(coordinator, monkeypatch):
    """Where nobody goes on in its place."""
    monkeypatch.setattr(session_module, "RESUME_S", 0.2)
    session = coordinator.session(0)
    coordinator.close()
    with pytest.raises(JobEnded, match="coordinator's host is gone"):
        session.waiting.until("nothing", lambda: None)


def test_a_coordinator_that_says_nonsense_is_as_good_as_gone_and_the_reason_is_kept(coordinator):
    session = coordinator.session(0)
    coordinator.tell(Committed(1))
    coordinator.tell(encode(Committed("2")))
    with pytest.raises(
        JobEnded, match="the coordinator has sent an unreadable message: Committed.step is '2', and it has to be int"
    ):
        session.waiting.until("nothing", lambda: None)
    assert session.view.committed == 1 and session.coordinator_is_gone


def test_a_session_that_is_not_welcomed_says_why():
    with pytest.raises(
        RecycleError, match="the coordinator has not welcomed rank 3 within 60 s: the other end is gone"
    ):
        Session(InProcess(lambda far: far.close()), 3, SECRET)


def test_a_newer_generation_replaces_the_one_that_is_waited_for(coordinator):
    session = coordinator.session(0)
    coordinator.tell(generation(1, [0, 1]))
    first = session.waiting.until("one", lambda: session.view.pending, interruptible=False)
    coordinator.tell(generation(2, [0]))
    assert session.waiting.until("where to go on", lambda: session.view.resume_of(first), interruptible=False) is False
    coordinator.tell(Resume(2, 4))
    assert session.waiting.until(
        "where to go on", lambda: session.view.resume_of(session.view.pending), interruptible=False
    ) == Resume(2, 4)
    session.view.adopt(session.view.pending)
    assert session.view.number == 2 and session.view.pending is None


def test_contributions_are_handed_out_until_a_later_step_is_committed(coordinator):
    session = coordinator.session(0, wait_timeout_s=0.2)
    coordinator.tell(Collected(2, "loss", {"mean": 1.5}))
    for _ in range(2):
        assert session.waiting.until("all contributions to the loss of step 2", lambda: session.view.loss(2)) == 1.5
    coordinator.tell(Committed(3))
    session.waiting.for_commit(3)
    with pytest.raises(WaitTimeout, match="contributions to the loss of step 2"):
        session.waiting.until("all contributions to the loss of step 2", lambda: session.view.loss(2))


def test_a_blocking_call_is_left_behind_when_the_membership_changes(coordinator):
    session = coordinator.session(0)
    never = threading.Event()
    coordinator.tell(generation(1, [0]))
    with pytest.raises(Interrupted):
        session.waiting.run("for ever", never.wait)
    never.set()


def test_a_blocking_call_hands_on_its_result_and_its_error(coordinator):
    session = coordinator.session(0)
    assert session.waiting.run("sum", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        session.waiting.run("division", lambda: 1 // 0)


def test_goodbye_is_said_and_the_closed_line_is_no_error(coordinator):
    session = coordinator.session(0)
    session.leave()
    with coordinator.news:
        coordinator.news.wait_for(lambda: coordinator.heard, 5)
    assert coordinator.heard == [Left(0)]
    coordinator.close()
    assert session.view.end is None


def test_without_a_supervisor_the_launch_command_is_named():
    with pytest.raises(RecycleError, match="--module recycle_plugin.launch"):
        connect_from_environment({})
