"""Who is given up for stopped or stuck, and above all who is not; and what becomes of a membership that is broken
apart.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest

from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.output import SUPERVISORS, CoordinatorOutput, Event
from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, WAITS
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.protocol import (
    CheckpointLoaded,
    Committed,
    Crashed,
    End,
    Exited,
    Fence,
    Generation,
    Heartbeat,
    Lease,
    Leaving,
    Left,
    Over,
    Resume,
    Stepped,
    SupervisorHeartbeat,
    SurvivorReport,
    Terminate,
)
from recycle_plugin.core.vocabulary.deadlines import LATE_S, TICK_S
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import DEADLINES, agree, said, started, step

BUSY_S, LAST_S = DEADLINES.busy_timeout_s, DEADLINES.last_worker_timeout_s
DEADLINE_S, IDLE_S, HEARTBEAT_S = DEADLINES.progress_timeout_s, DEADLINES.idle_timeout_s, DEADLINES.heartbeat_timeout_s


@dataclass
class Played:
    """A membership whose workers beat, and whose supervisors pulse, as ``at`` says; ``None``: not at all."""

    membership: Membership = field(default_factory=started)
    now: float = 1000.0
    at: dict[int, tuple[str, str] | None] = field(default_factory=lambda: dict.fromkeys(range(4), (WAITS, "")))
    done: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(4), 0))
    stopped: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # hosts that nothing comes from
    busy: set[int] = field(default_factory=set)  # processes that use a core
    cpu_s: float = 0.0  # that they have used
    outs: list[CoordinatorOutput] = field(default_factory=list)

    def live_for(self, seconds: float, instructions: tuple[int, ...] = ()) -> None:
        """Let time pass; ``instructions``: ranks that finish one with each tick."""
        for _ in range(round(seconds / TICK_S)):
            for rank in instructions:
                self.done[rank] += 1
            for rank in range(4):
                self.signs(rank)
            self.tick(TICK_S)

    def signs(self, rank: int) -> None:
        if rank in self.gone:
            return
        self.membership.receive(
            SupervisorHeartbeat(rank, rank in self.stopped, self.cpu_s if rank in self.busy else 0.0), self.now
        )
        if self.at[rank] is not None and rank not in self.stopped:
            self.membership.receive(Heartbeat(rank, 1, self.done[rank], *self.at[rank]), self.now)

    def tick(self, seconds: float) -> CoordinatorOutput:
        self.now += seconds
        self.cpu_s += seconds
        self.outs.append(self.membership.tick(self.now))
        return self.outs[-1]

    def first_step(self) -> None:
        """Done: everybody has compiled what there is to compile."""
        step(self.membership, 0, 1)

    @property
    def events(self) -> list[Event]:
        """What follows from suspicions, without these."""
        return [event for event in self.said if event.kind not in ("suspected", "cleared")]

    @property
    def said(self) -> list[Event]:
        return [event for out in self.outs for event in out.events]

    def doubts(self) -> list[tuple[str, str]]:
        return [(event.kind, event.details["seat"]) for event in self.said if event.kind in ("suspected", "cleared")]

    def given_up(self) -> list[str]:
        return [event.text.partition(": ")[2].partition(" for ")[0] for event in self.events if event.kind == "lost"]

    def fenced(self) -> list[tuple[object, int]]:
        return [(whom, one.rank) for out in self.outs for whom, one in out.messages if isinstance(one, Fence)]


def test_who_computes_the_same_instruction_for_too_long_is_given_up_and_fenced():
    played = Played()
    played.first_step()
    played.at[2] = (COMPUTES, "1F0.1@2")
    played.live_for(DEADLINE_S - 0.5)
    assert played.events == []
    played.live_for(1.0)
    assert played.given_up() == ["it computes 1F0.1@2"] and played.fenced() == [(SUPERVISORS, 2), (WorkerId(2), 2)]
    (generation,) = [one for out in played.outs for one in said(out, Generation)]
    assert [m.rank for m in generation.members] == [0, 1, 3] and generation.from_step == 0


def test_a_long_step_of_many_instructions_is_progress():
    played = Played()
    played.first_step()
    played.at[2] = (COMPUTES, "1F0.1@2")
    for _ in range(20):
        played.live_for(DEADLINE_S - 0.5)
        played.done[2] += 1
    assert played.events == []


def test_whoever_waits_for_a_slow_peer_is_not_to_blame():
    played = Played()
    played.first_step()
    played.at[0] = (COMPUTES, "0F0.0@2")
    played.live_for(10 * IDLE_S, instructions=(0,))
    assert played.events == []


def test_the_deadline_of_slow_steps_is_three_of_them():
    played = Played()
    for number in range(1, 6):
        for rank in range(4):
            played.membership.receive(Stepped(rank, 0, number), played.now + 4.0 * number)
    played.at[2] = (COMPUTES, "1F0.1@6")
    played.live_for(11.5)
    assert played.events == []
    played.live_for(1.0)
    assert len(played.given_up()) == 1


@pytest.mark.parametrize(
    "at", [(WAITS, "0F0.0@2 from 0.0"), (COMPUTES, "1F0.1@2"), (ELSEWHERE, "the training script")], ids=lambda at: at[0]
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
    assert why in ("its process is stopped", f"it computes {at[1]}") and played.fenced() == [
        (SUPERVISORS, 2),
        (WorkerId(2), 2),
    ]


def test_a_short_stop_is_nothing():
    played = Played()
    played.first_step()
    for _ in range(5):
        played.stopped = {0, 2}
        played.live_for(DEADLINE_S - 1)
        played.stopped = set()
        played.live_for(1.0)
    assert played.events == []


@pytest.mark.parametrize("step_s", [0.0, 20.0], ids=["quick steps", "slow steps"])
@pytest.mark.parametrize("heard_late_s", [0.0, 0.1, TICK_S])
def test_a_host_that_nothing_comes_from_is_found_within_its_deadline(step_s, heard_late_s):
    """... wherever between two ticks it was heard last; slow steps make that no longer."""
    played = Played()
    for number in range(1, 6):
        for rank in range(4):
            played.membership.receive(Stepped(rank, 0, number), played.now + step_s * number)
    played.live_for(2.0)
    played.now += heard_late_s
    played.signs(3)
    played.now -= heard_late_s
    played.gone = {3}
    played.live_for(HEARTBEAT_S - 2 * TICK_S)
    assert played.events == []
    played.live_for(2 * TICK_S)
    assert played.given_up() == ["nothing was heard of it or its supervisor"]


def test_a_host_that_is_silent_for_less_is_not_given_up():
    played = Played()
    played.first_step()
    for _ in range(5):
        played.gone = {1, 3}
        played.live_for(HEARTBEAT_S - 2 * TICK_S)
        played.gone = set()
        played.live_for(TICK_S)
    assert played.events == []


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
                doing[rank] = rng.choice(
                    list(LONGEST_S)[rank == 0 :]
                )  # somebody always does something, or else they all stand still
                until[rank] = played.membership.course.attendance.failure_detector.clock + rng.uniform(
                    0, LONGEST_S[doing[rank]] - LATE_S - 2 * TICK_S
                )
            elif played.membership.course.attendance.failure_detector.clock >= until[rank]:
                doing[rank] = "done"  # one sign of that
                played.done[rank] += 1
            played.at[rank] = (
                (doing[rank], f"what {rank} is at") if doing[rank] in (COMPUTES, ELSEWHERE) else (WAITS, "")
            )
        played.stopped, played.gone = ({rank for rank in range(4) if doing[rank] == of} for of in ("stopped", "gone"))
        for rank in range(4):
            played.signs(rank)
        played.tick(rng.choice((TICK_S, TICK_S, TICK_S, 30.0)))
    assert played.events == [] and min(played.done.values()) > 10


def test_no_beats_while_the_interpreter_is_held_up_is_no_death():
    """A large pickle, say: the supervisor sees the process run."""
    played = Played()
    played.first_step()
    played.at[1] = (ELSEWHERE, "a checkpoint")
    played.live_for(1.0)
    played.at[1] = None
    played.live_for(IDLE_S - 2)
    assert played.events == []


@pytest.mark.parametrize(
    "at", [(ELSEWHERE, "the training script"), (COMPUTES, "0F0.0@1")], ids=["script", "first step"]
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
    played = Played(at=dict.fromkeys(range(4), (ELSEWHERE, "the training script")))
    played.first_step()
    played.live_for(10 * IDLE_S)
    assert played.events == []


def test_who_waits_and_says_nothing_any_more_is_given_up_in_the_end():
    played = Played()
    played.first_step()
    played.live_for(1.0)
    played.at[1] = None
    played.live_for(IDLE_S - 1)
    assert played.events == []
    played.live_for(3.0)
    assert played.given_up() == ["it says nothing"]


def test_while_the_coordinator_itself_is_stopped_nobody_is_to_blame():
    played = Played(at=dict.fromkeys(range(4), (COMPUTES, "0F0.0@2")))
    played.first_step()
    played.live_for(1.0)
    for _ in range(5):
        assert played.tick(1000.0).messages == []
        assert played.tick(-500.0).messages == []  # nor does a clock that is set change anything


@pytest.mark.parametrize("heartbeat_s", [3.0, 100.0])
def test_the_promise_to_a_worker_ends_before_it_is_given_up_for_silence(heartbeat_s):
    """It may rely on what it was told last, although the deadline has shrunk since."""
    played = Played(started(heartbeat_timeout_s=heartbeat_s))
    for number in range(1, 4):
        for rank in range(4):
            played.membership.receive(Stepped(rank, 0, number), played.now + 10.0 * number)
    (heard,) = said(played.membership.receive(Heartbeat(3, 7, 0, WAITS, ""), played.now), Lease)
    assert heard == Lease(7, min(30.0, heartbeat_s - LATE_S - TICK_S))
    for number in range(4, 14):
        for rank in range(4):
            played.membership.receive(Stepped(rank, 0, number), played.now + 30.0 + 0.1 * number)
    played.stopped = {3}
    if heartbeat_s < 30.0:
        played.gone = {3}
    played.live_for(heard.for_s)
    assert played.events == []
    played.live_for(2 * LATE_S)
    assert played.given_up() == [
        "nothing was heard of it or its supervisor" if played.gone else "its process is stopped"
    ]


def test_a_worker_that_wakes_up_is_not_heard():
    played = Played()
    played.first_step()
    played.stopped = {2}
    played.live_for(DEADLINE_S + 1)
    agree(played.membership, 1, {0: 1, 1: 1, 3: 1})
    for late in (
        Heartbeat(2, 1, 0, COMPUTES, "1F0.1@2"),
        Stepped(2, 1, 2),
        SurvivorReport(2, 1, 9, "plan"),
        Leaving(2, "SIGTERM"),
    ):
        assert played.membership.receive(late, played.now).messages == []
    out = played.membership.receive(Exited(2, -9, played.now), played.now)
    assert [event.kind for event in out.events] == ["confirmed"] and not out.messages


def test_nobody_is_given_up_after_the_end():
    played = Played()
    played.first_step()
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
    "message", [Heartbeat(1, 2, 3, WAITS, "x"), SupervisorHeartbeat(1, True), Lease(3, 5.0), Fence(2, "why")]
)
def test_the_messages_survive_the_wire(message):
    assert decode(encode(message)) == message


# --- partitions -----------------------------------------------------------------------------------------


def broken(*ranks: int) -> Played:
    """Connections have broken; nobody knows more."""
    played = Played()
    played.first_step()
    for rank in ranks:
        played.outs.append(played.membership.connection_lost(WorkerId(rank), played.now))
    return played


def generations(played: Played) -> list[list[int]]:
    return [[member.rank for member in one.members] for out in played.outs for one in said(out, Generation)]


def ends(played: Played) -> list[End]:
    return [one for out in played.outs for one in said(out, End)]


def test_half_of_the_seats_with_the_coordinator_go_on():
    played = broken(0, 3)
    assert generations(played)[-1] == [1, 2] and not ends(played)


@pytest.mark.parametrize("asked_to_end", (False, True))
def test_three_of_four_dead_go_on_once_their_deaths_are_known(asked_to_end):
    """... of a job with one stage, in whatever order the news arrive, and also on the way to a planned end."""
    membership = started(replicas=4, stages=1)
    played = Played(membership)
    played.first_step()
    if asked_to_end:
        membership.receive(Terminate(0, "SIGTERM"), played.now)
    for rank in (1, 2, 3):
        played.outs.append(membership.connection_lost(WorkerId(rank), played.now))
    assert generations(played) == [[0, 2, 3], [0, 3]]
    played.outs.append(membership.receive(Exited(1, -9, played.now), played.now))
    assert generations(played)[2:] == []  # one of three is known to be dead: of the other three one is left
    played.outs.append(membership.receive(Exited(3, -9, played.now), played.now))
    assert generations(played)[2:] == [[0]] and not ends(played)
    assert agree(membership, membership.generation, {0: 1}).events[-1].kind == "resume"


def test_the_smaller_side_commits_nothing_and_ends_with_a_line():
    played = Played(started(replicas=4, stages=1))
    played.first_step()
    for rank in (1, 2, 3):
        played.outs.append(played.membership.connection_lost(WorkerId(rank), played.now))
    assert not any(said(played.membership.receive(Stepped(0, number, 2), played.now), Committed) for number in range(4))
    for rank in range(4):  # also where the report of a lost one was still under way
        assert not said(
            played.membership.receive(SurvivorReport(rank, played.membership.generation, 1, "plan"), played.now), Resume
        )
    played.live_for(DEADLINE_S - 0.5)
    assert not ends(played)
    played.live_for(1.0)
    (end,) = ends(played)
    assert end.failed and end.reason.startswith(
        "3 workers can't be reached and aren't known to be dead, and only 1 are left here"
    )


def test_a_planned_leave_is_no_loss():
    played = Played(started(replicas=4, stages=1))
    played.first_step()
    played.membership.receive(Leaving(3, "SIGTERM"), played.now)
    played.outs.append(played.membership.connection_lost(WorkerId(1), played.now))
    assert generations(played)[-1] == [0, 2, 3]


@pytest.mark.parametrize("seed", range(300))
def test_random_histories_never_go_on_with_less_than_half(seed):
    """Workers step, stop, die and are cut off in random order, and deaths are confirmed late or never: whatever is
    committed or published is so with at least half of the seats that aren't known to be dead."""
    rng = random.Random(seed)
    played = Played(started(replicas=4, stages=1))
    membership, stepped, lost, dead = played.membership, 0, set(), set()
    for _ in range(60):
        rank, chance = rng.randrange(4), rng.random()
        if chance < 0.05 and rank not in lost:
            lost.add(rank)
            out = membership.connection_lost(WorkerId(rank), played.now)
        elif chance < 0.1:
            lost.add(rank)
            dead.add(rank)
            out = membership.receive(Exited(rank, -9, played.now), played.now)
        elif chance < 0.15:
            played.stopped ^= {rank}
            continue
        elif chance < 0.7:
            stepped = membership.committed + 1
            out = membership.receive(Stepped(rank, membership.generation, stepped), played.now)
        else:
            for each in set(range(4)) - lost:
                played.signs(each)
            out = played.tick(rng.choice((TICK_S, 4 * TICK_S)))
        pending = [out]
        while pending:
            out = pending.pop()
            for _, message in out.messages:
                if isinstance(message, Fence):
                    lost.add(message.rank)
                if isinstance(message, (Committed, Generation)):
                    assert 2 * (4 - len(lost)) >= 4 - len(dead)
                if isinstance(message, Generation) and rng.random() < 0.8:
                    members = rng.sample(message.members, len(message.members))
                    pending += [
                        membership.receive(
                            SurvivorReport(m.rank, message.number, membership.committed, "plan"), played.now
                        )
                        for m in members
                    ]
                if isinstance(message, End):
                    return


# --- suspicion before eviction ---------------------------------------------------------------------------


def test_suspicion_is_said_before_anybody_is_given_up_and_taken_back_where_it_was_wrong():
    played = Played(busy={2})
    played.first_step()
    played.at[2] = (COMPUTES, "1F0.1@2")
    played.live_for(BUSY_S / 3 - 0.5)
    assert played.said == []
    played.live_for(1.0)
    played.done[2] += 1
    played.live_for(1.0)
    suspected, cleared = played.said
    assert re.fullmatch(
        r"seat 0\.1 \(rank 2\): it computes 1F0\.1@2 for 6\.\d s, its process using 1\d\d% of a core; it is given up "
        r"after 20\.0 s",
        suspected.text,
    )
    assert cleared.text.startswith("seat 0.1 (rank 2) goes on after 7.")


def test_a_process_that_computes_has_longer_than_one_that_does_nothing():
    played = Played(busy={2})
    played.first_step()
    played.at[2] = (COMPUTES, "1F0.1@2")
    played.live_for(BUSY_S - 0.5)
    assert played.events == []
    played.live_for(1.0)
    assert played.given_up() == ["it computes 1F0.1@2"]


def test_where_nobody_can_tell_what_it_uses_it_may_be_computing():
    played = Played()
    played.first_step()
    played.at[2] = (COMPUTES, "1F0.1@2")
    for _ in range(round((BUSY_S - 0.5) / TICK_S)):
        for rank in range(4):
            played.membership.receive(SupervisorHeartbeat(rank, False), played.now)
            played.membership.receive(Heartbeat(rank, 1, 0, *played.at[rank]), played.now)
        played.tick(TICK_S)
    assert played.events == [] and played.doubts() == [("suspected", "0.1")]


@pytest.mark.parametrize(
    "again, for_s", [("0F0.1@2", IDLE_S), ("0I0.1@2", IDLE_S), ("0F1.0@2", DEADLINE_S), ("0F0.1@3", DEADLINE_S)]
)
def test_what_has_cost_one_worker_is_no_proof_against_the_next(again, for_s):
    """... whatever the next does with that micro-batch, in that step."""
    played = Played(started(replicas=4, stages=1))
    played.first_step()
    played.at[2] = (COMPUTES, "0F0.1@2")
    played.live_for(DEADLINE_S + 0.5)
    assert played.given_up() == ["it computes 0F0.1@2"]
    agree(played.membership, 1, {0: 1, 1: 1, 3: 1})
    played.at[1] = (COMPUTES, again)
    played.live_for(for_s - 0.5)
    assert len(played.given_up()) == 1
    played.live_for(1.0)
    assert played.given_up()[1:] == [f"it computes {again}"]


def test_who_was_at_a_step_that_is_committed_is_so_no_more():
    """Its next beat may be under way."""
    played = Played()
    played.first_step()
    played.at[2] = (COMPUTES, "1F0.1@2")
    played.live_for(DEADLINE_S - 0.5)
    step(played.membership, 0, 2)
    played.live_for(1.0)
    assert played.events == [] and played.doubts() == [("suspected", "0.1"), ("cleared", "0.1")]


def test_after_an_earlier_checkpoint_its_steps_are_computed_again():
    played = Played()
    for number in range(1, 6):
        step(played.membership, 0, number)
    for rank in range(4):
        played.membership.receive(CheckpointLoaded(rank, 0), played.now)
    for rank in range(4):
        played.membership.receive(SurvivorReport(rank, 1, 1, "plan", loaded=True), played.now)
    played.at[2] = (COMPUTES, "1F0.1@2")
    played.live_for(DEADLINE_S + 0.5)
    assert played.given_up() == ["it computes 1F0.1@2"]


@pytest.mark.parametrize("how", ["stopped", "gone", "computes"])
def test_the_last_worker_of_a_stage_is_not_given_up_but_the_job_ends_after_its_own_deadline(how):
    played = Played()
    played.first_step()
    played.membership.receive(Exited(2, -9, 0.0), played.now)
    agree(played.membership, 1, {0: 1, 1: 1, 3: 1})
    played.live_for(1.0)
    if how == "computes":
        played.at[3] = (COMPUTES, "1F0.1@2")
    else:
        setattr(played, how, {3})
    played.live_for(LAST_S - 1)
    assert (
        played.events == []
        and played.doubts() == [("suspected", "1.1")]
        and "the job ends after 40 s" in played.said[0].text
    )
    played.live_for(2.0)
    (end,) = ends(played)
    assert (
        end.failed
        and "seat 1.1 (rank 3), the last worker of stage 1: " in end.reason
        and "Who waits for whom: seats 0.0 (rank 0), 1.0 (rank 1) wait for something" in end.reason
    )
    assert not played.given_up() and not played.fenced()


def test_the_last_worker_may_come_back_until_then():
    played = Played()
    played.first_step()
    played.membership.receive(Exited(2, -9, 0.0), played.now)
    agree(played.membership, 1, {0: 1, 1: 1, 3: 1})
    played.live_for(1.0)
    played.gone = {3}
    played.live_for(LAST_S - 2)
    played.gone = set()
    played.live_for(1.0)
    assert played.events == [] and played.doubts() == [("suspected", "1.1"), ("cleared", "1.1")]


# --- everybody waits -------------------------------------------------------------------------------------


def all_wait(played: Played) -> None:
    played.at = {
        0: (WAITS, "grad 0.1@2 from seat 0.1"),
        1: (WAITS, "the commit of step 2"),
        2: (WAITS, "act 0.1@2 from seat 0.0, once more"),
        3: (WAITS, "the commit of step 2"),
    }


def test_where_everybody_waits_all_meet_again_once_and_then_the_job_ends_with_the_graph():
    played = Played()
    played.first_step()
    all_wait(played)
    played.live_for(2 * DEADLINE_S - 0.5)
    assert played.said == []
    played.live_for(1.0)
    assert [len(each) for each in generations(played)] == [4] and not ends(played)
    (waits,) = (event for event in played.events if event.kind == "wait_graph")
    assert waits.details["edges"] == [
        {
            "who": ["0.0"],
            "at": WAITS,
            "what": "grad 0.1@2 from seat 0.1",
            "whom": ["0.1"],
            "for_s": pytest.approx(10.0, abs=0.5),
        },
        {
            "who": ["1.0", "1.1"],
            "at": WAITS,
            "what": "the commit of step 2",
            "whom": ["0.0", "0.1"],
            "for_s": pytest.approx(10.0, abs=0.5),
        },
        {
            "who": ["0.1"],
            "at": WAITS,
            "what": "act 0.1@2 from seat 0.0, once more",
            "whom": ["0.0"],
            "for_s": pytest.approx(10.0, abs=0.5),
        },
    ]
    agree(played.membership, 1, dict.fromkeys(range(4), 1))
    for rank in range(4):
        played.done[rank] += 1
    played.live_for(2 * DEADLINE_S - 0.5)
    assert not ends(played)
    played.live_for(1.0)
    (end,) = ends(played)
    assert (
        end.failed
        and "once more since step 1 was committed" in end.reason
        and "seats 1.0 (rank 1), 1.1 (rank 3) wait for the commit of step 2 for" in end.reason
    )
    assert "which seats 0.0 (rank 0), 0.1 (rank 2) have not come to" in end.reason


def test_the_second_time_counts_from_when_all_had_met_again():
    """Also where nobody has done anything since: what is sent once more may be under way."""
    played = Played()
    played.first_step()
    all_wait(played)
    played.live_for(2 * DEADLINE_S + 0.5)
    agree(played.membership, 1, dict.fromkeys(range(4), 1))
    played.live_for(2 * DEADLINE_S - 0.5)
    assert not ends(played)
    played.live_for(1.0)
    (end,) = ends(played)
    assert "everybody waits for 10.2 s, once more" in end.reason, end.reason


@pytest.mark.parametrize(
    "what, missing",
    [
        ("all_reduce among ranks 0, 2", "seat 0.1 (rank 2) has"),
        (
            "the connections among ranks 0, 2; not there of 2 are number 1 for all_reduce among ranks 0, 2",
            "seat 0.1 (rank 2) has",
        ),
        ("all_reduce among ranks 0, 1, 2, 3", "seats 1.0 (rank 1), 0.1 (rank 2), 1.1 (rank 3) have"),
        ("barrier among ranks 0, 1".ljust(200, "0"), "seats 1.0 (rank 1), 0.1 (rank 2), 1.1 (rank 3) have"),
    ],
)
def test_a_collective_waits_for_members_of_its_group_only(what, missing):
    """A name that was cut off does not have all of them."""
    played = Played()
    played.first_step()
    all_wait(played)
    played.at[0] = (WAITS, what)
    played.live_for(2 * DEADLINE_S + 0.5)
    (waits,) = (event for event in played.events if event.kind == "wait_graph")
    assert f"which {missing} not come to" in waits.text.split("; seat")[0], waits.text


def test_after_a_commit_it_may_happen_again():
    played = Played()
    played.first_step()
    for number in range(1, 4):
        all_wait(played)
        played.live_for(2 * DEADLINE_S + 0.5)
        agree(played.membership, number, dict.fromkeys(range(4), number))
        step(played.membership, number, number + 1)
        for rank in range(4):
            played.done[rank] += 1
    assert len(generations(played)) == 3 and not ends(played)


@pytest.mark.parametrize(
    "other", [(COMPUTES, "1F0.1@2"), (ELSEWHERE, "the training script")], ids=lambda other: other[0]
)
def test_as_long_as_one_does_something_nobody_stands_still(other):
    played = Played(busy={2})
    played.first_step()
    all_wait(played)
    played.at[2] = other
    played.live_for(3 * DEADLINE_S)
    assert played.events == []


def test_a_wait_after_a_silence_is_a_new_one():
    """What was under way may still come."""
    played = Played()
    played.first_step()
    all_wait(played)
    played.live_for(2 * DEADLINE_S - 3)
    played.gone = {1, 3}
    played.live_for(HEARTBEAT_S - 0.5)
    played.gone = set()
    played.live_for(2 * DEADLINE_S - 1)
    assert played.events == []


# --- scripts end alike -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["said before", "said afterwards"])
def test_a_script_that_ends_earlier_than_the_others_ends_the_job(order):
    played = Played()
    played.first_step()
    going_on, through = Heartbeat(1, 1, 9, WAITS, "anything", 2), Left(0, 0, False, 1)
    for message in (going_on, through) if order == "said before" else (through, going_on):
        played.outs.append(played.membership.receive(message, played.now))
    (end,) = ends(played)
    assert end.failed and end.reason.startswith(
        "the training script of seat 0.0 (rank 0) ended after step 1, and that of seat 1.0 (rank 1) is in step 2: all "
        "have to train equally many steps"
    )
    assert [one.code for out in played.outs for whom, one in out.messages if isinstance(one, Over)] == [1]


def test_scripts_that_end_alike_end_well_in_any_order():
    played = Played()
    played.first_step()
    for rank in (3, 0, 2, 1):
        played.membership.receive(Heartbeat(rank, 1, 9, ELSEWHERE, "the training script", 1), played.now)
    for rank in (3, 0, 2, 1):
        played.outs.append(played.membership.receive(Left(rank, 0, False, 1), played.now))
    assert not ends(played) and played.events[-1].kind == "finished"


@pytest.mark.parametrize("step, code", [(1, 1), (0, 0)], ids=["behind the last step", "before it"])
def test_what_a_script_ends_with_behind_the_last_step_is_the_jobs_code(step, code):
    """In any order; and one that was lost on the way is not."""
    played = Played()
    played.first_step()
    played.membership.receive(Crashed(0, "ValueError: no", "", step), played.now)
    for rank in (3, 2, 1):
        played.outs.append(played.membership.receive(Left(rank, 0, False, 1), played.now))
    played.outs.append(played.membership.receive(Exited(0, 1, played.now), played.now))
    (finished,) = (event for event in played.events if event.kind == "finished")
    assert ("the script of seat 0.0 (rank 0) ended with ValueError: no" in finished.text) == bool(code), finished.text
    assert [one.code for out in played.outs for whom, one in out.messages if isinstance(one, Over)] == [code]


def test_who_leaves_as_planned_ends_no_script():
    played = Played()
    played.first_step()
    played.membership.receive(Leaving(0, "SIGTERM"), played.now)
    agree(played.membership, 1, dict.fromkeys(range(4), 1))
    played.outs.append(played.membership.receive(Left(0, 0, True, 1), played.now))
    played.membership.receive(Heartbeat(1, 1, 9, WAITS, "anything", 2), played.now)
    assert not ends(played)
