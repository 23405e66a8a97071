"""Who is given up for stopped or stuck, and above all who is not."""

from __future__ import annotations

import random

import pytest

from recycle_plugin.core.coordinator.facts.output import SupervisorOf
from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, WAITS, Activity
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import End, Fence, Generation, Lease
from recycle_plugin.core.messages.from_workers import (
    Exited,
    Heartbeat,
    Leaving,
    Stepped,
    SupervisorHeartbeat,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.deadlines import LATE_S, TICK_S
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import agree, computes, said, started
from tests.support.played import DEADLINE_S, HEARTBEAT_S, IDLE_S, Played


def test_who_computes_the_same_instruction_for_too_long_is_given_up_and_fenced():
    played = Played().first_step()
    played.at[2] = computes("1F0.1@2")
    played.live_for(DEADLINE_S - 0.5)
    assert played.events == []
    played.live_for(1.0)
    assert played.given_up() == ["it computes 1F0.1@2"] and played.fenced() == [
        (SupervisorOf(2, former=True), 2),
        (WorkerId(2), 2),
    ]
    (generation,) = [one for out in played.outs for one in said(out, Generation)]
    assert [m.rank for m in generation.members] == [0, 1, 3] and generation.from_step == 0


def test_a_long_step_of_many_instructions_is_progress():
    played = Played().first_step()
    played.at[2] = computes("1F0.1@2")
    for _ in range(20):
        played.live_for(DEADLINE_S - 0.5)
        played.done[2] += 1
    assert played.events == []


def test_whoever_waits_for_a_slow_peer_is_not_to_blame():
    played = Played().first_step()
    played.at[0] = computes("0F0.0@2")
    played.live_for(10 * IDLE_S, instructions=(0,))
    assert played.events == []


def test_the_deadline_of_slow_steps_is_three_of_them():
    played = Played().steps(range(1, 6), 4.0)
    played.at[2] = computes("1F0.1@6")
    played.live_for(11.5)
    assert played.events == []
    played.live_for(1.0)
    assert len(played.given_up()) == 1


@pytest.mark.parametrize(
    "at",
    [Activity(WAITS, "0F0.0@2 from 0.0"), computes("1F0.1@2"), Activity(ELSEWHERE, "the training script")],
    ids=lambda at: at[0],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_stopped_process_is_given_up_whatever_it_was_at(at, first):
    played = Played()
    if not first:
        played.first_step()
    played.at[2] = at
    played.live_for(3.0)
    played.stopped = {2}
    played.live_for(DEADLINE_S - 0.5 if at[0] != COMPUTES or first else 0.0)
    assert played.events == []
    played.live_for(DEADLINE_S)
    (why,) = played.given_up()
    assert why in ("its process is stopped", f"it computes {at[1]}")
    assert played.fenced() == [(SupervisorOf(2, former=True), 2), (WorkerId(2), 2)]


def test_who_reports_between_two_stops_was_not_stopped_for_the_sum_of_both():
    """A report comes from the process itself; it may be stopped again before anybody sees it running."""
    played = Played().first_step()
    played.stopped = {1}
    played.live_for(DEADLINE_S - 1.0)
    played.outs.append(played.membership.receive(SurvivorReport(1, -1, 1, "plan"), played.now))
    played.live_for(DEADLINE_S - 1.0)
    assert not played.given_up()
    played.live_for(2.0)
    assert played.given_up()


@pytest.mark.parametrize(
    "what, ranks, for_s, back_s",
    [("stopped", {0, 2}, DEADLINE_S - 1, 1.0), ("gone", {1, 3}, HEARTBEAT_S - 2 * TICK_S, TICK_S)],
)
def test_a_short_stop_or_silence_is_nothing(what, ranks, for_s, back_s):
    played = Played().first_step()
    for _ in range(5):
        setattr(played, what, ranks)
        played.live_for(for_s)
        setattr(played, what, set())
        played.live_for(back_s)
    assert played.events == []


@pytest.mark.parametrize("step_s", [0.0, 20.0], ids=["quick steps", "slow steps"])
@pytest.mark.parametrize("heard_late_s", [0.0, 0.1, TICK_S])
def test_a_host_that_nothing_comes_from_is_found_within_its_deadline(step_s, heard_late_s):
    """... wherever between two ticks it was heard last; slow steps make that no longer."""
    played = Played().steps(range(1, 6), step_s)
    played.live_for(2.0)
    played.now += heard_late_s
    played.signs(3)
    played.now -= heard_late_s
    played.gone = {3}
    played.live_for(HEARTBEAT_S - 2 * TICK_S)
    assert played.events == []
    played.live_for(2 * TICK_S)
    assert played.given_up() == ["nothing was heard from it or its supervisor"]


LONGEST_S = {WAITS: IDLE_S, "gone": HEARTBEAT_S, "stopped": DEADLINE_S, COMPUTES: DEADLINE_S, ELSEWHERE: IDLE_S}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_shorter_than_its_deadline_is_nothing(seed):
    """Every worker is silent, stopped, computes or is elsewhere for random times, and the coordinator is held up now
    and then.
    """
    rng, played = random.Random(seed), Played()
    played.first_step()
    doing, until = dict.fromkeys(range(4), "done"), dict.fromkeys(range(4), 0.0)
    for _ in range(2000):
        for rank in range(4):
            if doing[rank] == "done":
                # somebody always does something, or else they all stand still
                doing[rank] = rng.choice(list(LONGEST_S)[rank == 0 :])
                until[rank] = played.clock + rng.uniform(0, LONGEST_S[doing[rank]] - LATE_S - 2 * TICK_S)
            elif played.clock >= until[rank]:
                doing[rank] = "done"  # one sign of that
                played.done[rank] += 1
            works = doing[rank] in (COMPUTES, ELSEWHERE)
            played.at[rank] = Activity(doing[rank], f"what {rank} is at") if works else Activity(WAITS)
        played.stopped, played.gone = ({rank for rank in range(4) if doing[rank] == of} for of in ("stopped", "gone"))
        for rank in range(4):
            played.signs(rank)
        played.tick(rng.choice((TICK_S, TICK_S, TICK_S, 30.0)))
    assert played.events == [] and min(played.done.values()) > 10


def test_no_beats_while_the_interpreter_is_held_up_is_no_death():
    """A large pickle, say: the supervisor sees the process run."""
    played = Played().first_step()
    played.at[1] = Activity(ELSEWHERE, "a checkpoint")
    played.live_for(1.0)
    played.at[1] = None
    played.live_for(IDLE_S - 2 - DEADLINE_S)
    played.stopped = {1}
    played.live_for(DEADLINE_S - 1)
    assert played.events == [], "until then it was seen to run"


@pytest.mark.parametrize(
    "at", [Activity(ELSEWHERE, "the training script"), computes("0F0.0@1")], ids=["script", "first step"]
)
def test_what_may_take_long_has_the_long_deadline_while_somebody_waits(at):
    played = Played()
    if at[0] == ELSEWHERE:
        played.first_step()
    played.at[0] = at
    played.live_for(IDLE_S - 1)
    assert played.events == []
    played.live_for(2)
    assert played.given_up() == [f"it {at[0]} {at[1]}"]


def test_the_script_may_take_as_long_as_it_likes_where_nobody_waits():
    played = Played(at=dict.fromkeys(range(4), Activity(ELSEWHERE, "the training script"))).first_step()
    played.live_for(10 * IDLE_S)
    assert played.events == []


def test_who_waits_and_says_nothing_any_more_is_given_up_in_the_end():
    played = Played().first_step()
    played.live_for(1.0)
    played.at[1] = None
    played.live_for(IDLE_S - 1)
    assert played.events == []
    played.live_for(3.0)
    assert played.given_up() == ["it says nothing"]


def test_while_the_coordinator_itself_is_stopped_nobody_is_to_blame():
    played = Played(at=dict.fromkeys(range(4), computes("0F0.0@2"))).first_step()
    played.live_for(1.0)
    for _ in range(5):
        assert played.tick(1000.0).messages == []
        assert played.tick(-500.0).messages == []  # nor does a clock that is set change anything


@pytest.mark.parametrize("heartbeat_s", [3.0, 100.0])
def test_the_promise_to_a_worker_ends_before_it_is_given_up_for_silence(heartbeat_s):
    """It may rely on what it was told last, although the deadline has shrunk since."""
    played = Played(started(heartbeat_timeout_s=heartbeat_s)).steps(range(1, 4), 10.0)
    (heard,) = said(played.membership.receive(Heartbeat(3, 7, 0, Activity(WAITS, "")), played.now), Lease)
    assert heard == Lease(7, min(30.0, heartbeat_s - LATE_S - TICK_S))
    played.steps(range(4, 14), 0.1, after_s=30.0)
    played.stopped = {3}
    if heartbeat_s < 30.0:
        played.gone = {3}
    played.live_for(heard.for_s)
    assert played.events == []
    played.live_for(2 * LATE_S)
    why = "nothing was heard from it or its supervisor" if played.gone else "its process is stopped"
    assert played.given_up() == [why]


def test_a_worker_that_wakes_up_is_not_heard():
    played = Played().first_step()
    played.stopped = {2}
    played.live_for(DEADLINE_S + 1)
    agree(played.membership, 1, {0: 1, 1: 1, 3: 1})
    for late in (
        Heartbeat(2, 1, 0, computes("1F0.1@2")),
        Stepped(2, 1, 2),
        SurvivorReport(2, 1, 9, "plan"),
        Leaving(2, "SIGTERM"),
    ):
        assert played.membership.receive(late, played.now).messages == []
    out = played.membership.receive(Exited(2, -9, played.now), played.now)
    assert [event.kind for event in out.events] == ["confirmed"] and not out.messages


def test_nobody_is_given_up_after_the_end():
    played = Played().first_step()
    played.membership.receive(Exited(0, -9, 0.0), 0.0)
    played.membership.receive(Exited(1, -9, 0.0), 0.0)
    played.stopped = {2, 3}
    played.live_for(DEADLINE_S + 2)
    assert played.events == [] and played.fenced() == []


def test_who_goes_after_a_failed_end_is_no_loss():
    """All do, and none of them is why."""
    membership = started()
    membership.connection_lost(WorkerId(0), 0.0)
    assert [end.failed for end in said(membership.connection_lost(WorkerId(1), 0.0), End)] == [True]
    out = membership.connection_lost(WorkerId(2), 0.0)
    assert not [event for event in out.events if event.kind == "lost"] and not out.messages


@pytest.mark.parametrize(
    "message", [Heartbeat(1, 2, 3, Activity(WAITS, "x")), SupervisorHeartbeat(1, True), Lease(3, 5.0), Fence(2, "why")]
)
def test_the_messages_survive_the_wire(message):
    assert decode(encode(message)) == message
