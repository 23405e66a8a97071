"""A worker's beats, and what it may do without the coordinator's word."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, WAITS, Activity
from recycle_plugin.core.messages.from_coordinator import Committed, Fence, Lease
from recycle_plugin.core.messages.from_workers import Heartbeat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.errors import CutOff
from recycle_plugin.runtime.control import heartbeats as heartbeats_module
from recycle_plugin.runtime.control.heartbeats import SCRIPT, Heartbeats
from tests.support.coordinator import generation
from tests.support.membership import computes


def beats(coordinator, count: int) -> list[Heartbeat]:
    with coordinator.news:
        assert coordinator.news.wait_for(lambda: len(coordinator.heard) >= count, 10)
        return list(coordinator.heard[:count])


def test_a_beat_says_what_the_worker_is_at(coordinator):
    heartbeats = coordinator.session(3).heartbeats
    heartbeats.beat()
    with heartbeats.at(ELSEWHERE, "a checkpoint"):
        heartbeats.beat()
    heartbeats.done += 1
    with heartbeats.at(WAITS, "whatever"):
        heartbeats.beat()
    said = beats(coordinator, 3)
    assert [(beat.rank, beat.number, beat.done) for beat in said] == [(3, 1, 0), (3, 2, 0), (3, 3, 1)]
    assert [beat.doing for beat in said] == [
        Activity(ELSEWHERE, SCRIPT),
        Activity(ELSEWHERE, "a checkpoint"),
        Activity(WAITS, "whatever"),
    ]


def test_a_beat_goes_out_though_what_it_tells_of_changes_meanwhile(coordinator):
    """Its text is made in the heart's thread, of what the main thread goes on with; no beat is a worker's end."""
    changing: dict[str, tuple[int]] = {}
    heartbeats = coordinator.session(3).heartbeats
    with heartbeats.at(WAITS, lambda: f"a result of rank {changing['gone'][0]}"):
        heartbeats.beat()
    assert [beat.doing for beat in beats(coordinator, 1)] == [Activity(WAITS, "what has just changed")]


def test_who_was_said_to_compute_says_at_once_when_that_is_over(coordinator):
    """Then nothing that holds the interpreter up is taken for a stuck instruction."""
    heartbeats = coordinator.session(0).heartbeats
    with heartbeats.at(COMPUTES, Instruction.parse("0F0.0@1")):
        heartbeats.beat()
        with heartbeats.at(WAITS, ""):
            pass
    with heartbeats.at(COMPUTES, Instruction.parse("0F0.1@1")):
        pass
    heartbeats.beat()
    assert [beat.doing for beat in beats(coordinator, 3)] == [
        computes("0F0.0@1"),
        Activity(WAITS, ""),
        Activity(ELSEWHERE, SCRIPT),
    ]


def test_an_answer_that_comes_again_or_behind_a_later_one_extends_nothing(coordinator):
    """Nor one to a beat that was never sent; the thread that hears the coordinator goes on."""
    heartbeats = coordinator.session(0).heartbeats
    for _ in range(3):
        heartbeats.beat()
    heartbeats.heard(Lease(2, 60.0))
    until = heartbeats.lease_until
    for number in (2, 1, 7):
        heartbeats.heard(Lease(number, 600.0))
        assert heartbeats.lease_until == until
    heartbeats.heard(Lease(3, 60.0))
    assert heartbeats.lease_until >= until


def test_a_worker_whose_promise_has_run_out_asks_before_it_acts(coordinator):
    session = coordinator.session(0)
    session.waiting.for_lease("0REDUCE@4")  # nothing was promised yet, and nobody can have been given up
    session.heartbeats.lease_until = time.monotonic()
    answering = threading.Thread(target=lambda: coordinator.tell(Lease(beats(coordinator, 1)[0].number, 60.0)))
    answering.start()
    session.waiting.for_lease("0REDUCE@4")
    answering.join(10)
    assert session.heartbeats.has_lease and len(coordinator.heard) == 1


def test_the_end_of_the_promise_and_a_late_answer_are_told(coordinator, monkeypatch):
    """At the former a silent host is left, at the latter a silent process."""
    monkeypatch.setattr(heartbeats_module, "ANSWER_S", 0.2)
    told: queue.Queue[bool] = queue.Queue()

    def tell(long: bool) -> None:
        told.put(long)
        if long:
            threading.Event().wait()  # its daemon thread does nothing more

    Heartbeats(coordinator.session(0).view, lambda message: None, tell).start(0.1, 60.0)
    assert told.get(timeout=10) is False
    while not told.get(timeout=10):
        pass


class Clock:
    """As much of the module ``time`` as heartbeats need: it passes as they sleep, a little longer each time."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.001


class Told(Exception):
    """Enough was told."""


def test_a_late_answer_is_looked_for_at_its_end_and_not_at_the_next_beat(coordinator, monkeypatch):
    clock, told = Clock(), list[tuple[bool, float]]()
    monkeypatch.setattr(heartbeats_module, "time", clock)
    monkeypatch.setattr(heartbeats_module, "ANSWER_S", 0.25)

    def tell(long: bool) -> None:
        told.append((long, clock.now - 100.0))
        if long:
            raise Told

    heartbeats = Heartbeats(coordinator.session(0).view, lambda message: None, tell)
    heartbeats._lease_s, heartbeats.lease_until = 4.5, 104.5
    with pytest.raises(Told):
        heartbeats._beat_on(1.0)
    assert [(long, round(at, 2)) for long, at in told] == [(False, 4.5), (True, 4.75)]


def test_a_worker_that_gets_no_answer_stops_before_it_acts(coordinator):
    session = coordinator.session(0)
    session.heartbeats.lease_until, session.waiting.cut_off_s = time.monotonic(), 0.05
    with pytest.raises(CutOff, match="heard nothing from the coordinator .* the coordinator's answer before 0REDUCE@4"):
        session.waiting.for_lease("0REDUCE@4")
    assert [type(message) for message in beats(coordinator, 1)] == [Heartbeat]


def test_waiting_for_a_peer_ends_as_well_when_the_coordinator_is_silent(coordinator):
    session = coordinator.session(0, wait_timeout_s=60.0)
    session.heartbeats.lease_until, session.waiting.cut_off_s = time.monotonic(), 0.05
    with pytest.raises(CutOff, match="stops waiting for the commit of step 4"):
        session.waiting.for_commit(4)


def test_a_membership_change_is_heard_while_the_word_is_waited_for(coordinator):
    session = coordinator.session(0)
    session.heartbeats.lease_until = time.monotonic()
    coordinator.tell(generation(1, [0]))
    with pytest.raises(Interrupted):
        session.waiting.for_lease("0REDUCE@4")


@pytest.mark.parametrize(
    ("message", "reason"), [(Fence(1, "it is stopped"), "it is stopped"), (generation(2, [0]), "test")]
)
def test_a_worker_that_was_given_up_is_told_and_nobody_else(coordinator, message, reason):
    told: queue.Queue = queue.Queue()
    sessions = [coordinator.session(rank) for rank in (0, 1)]
    for session in sessions:
        session.given_up = lambda why, rank=session.rank: told.put((rank, why))
    coordinator.tell(generation(1, [0], from_step=7))  # a planned leave, from a step that is still to come
    coordinator.tell(message)
    coordinator.tell(Committed(1))  # when that is read, the rest has been dealt with
    for session in sessions:
        session.waiting.until(
            "the commit", lambda session=session: session.view.is_committed(1) or None, interruptible=False
        )
    assert [told.get(timeout=10)] == [(1, reason)] and told.empty()
