"""What becomes of a membership whose connections are broken apart."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from recycle_plugin.core.messages.from_coordinator import Committed, End, Fence, Generation, Resume
from recycle_plugin.core.messages.from_workers import Exited, Leaving, Stepped, SurvivorReport, Terminate
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from tests.support.membership import agree, member, said, started
from tests.support.played import DEADLINE_S, Played, ends, generations


def broken(*ranks: int) -> Played:
    """Connections have broken; nobody knows more."""
    played = Played().first_step()
    for rank in ranks:
        played.outs.append(played.membership.connection_lost(WorkerId(rank), played.now))
    return played


def test_half_of_the_seats_with_the_coordinator_go_on():
    played = broken(0, 3)
    assert generations(played)[-1] == [1, 2] and not ends(played)


@pytest.mark.parametrize("asked_to_end", (False, True))
def test_three_of_four_dead_go_on_once_their_deaths_are_known(asked_to_end):
    """... of a job with one stage, in whatever order the news arrive, and also on the way to a planned end."""
    membership = started(replicas=4, stages=1)
    played = Played(membership).first_step()
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
    played = Played(started(replicas=4, stages=1)).first_step()
    for rank in (1, 2, 3):
        played.outs.append(played.membership.connection_lost(WorkerId(rank), played.now))
    numbers = range(played.membership.generation + 1)
    assert not any(said(played.membership.receive(Stepped(0, number, 2), played.now), Committed) for number in numbers)
    for rank in range(4):  # also where the report of a lost one was still under way
        assert not said(
            played.membership.receive(SurvivorReport(rank, played.membership.generation, 1, "plan"), played.now), Resume
        )
    played.live_for(DEADLINE_S - 0.5)
    assert not ends(played)
    played.live_for(1.0)
    (end,) = ends(played)
    assert end.failed
    assert end.reason.startswith("3 workers can't be reached and aren't known to be dead, and only 1 are left here")


def test_whose_seat_another_process_has_taken_counts_no_more():
    """Of four seats two are lost with their host, again and again, and each time taken by processes of another host."""
    played = Played(started(replicas=4, stages=1)).first_step()
    membership = played.membership
    for incarnation in range(3):
        for rank in (2, 3):
            played.outs.append(membership.connection_lost(WorkerId(rank, incarnation), played.now))
        agree(membership, membership.generation, {0: 1, 1: 1})
        followed = [replace(member(rank, replicas=4), incarnation=incarnation + 1) for rank in (2, 3)]
        for each in followed:
            membership.state.vacancies.entered(each.worker)
        membership.state.attendance.agreed(Roster((*membership.roster, *followed)))
    assert [len(each) for each in generations(played)] == [3, 2] * 3
    for worker in (WorkerId(1), WorkerId(2, 3), WorkerId(3, 3)):
        played.outs.append(membership.connection_lost(worker, played.now))
    assert [len(each) for each in generations(played)][6:] == [3, 2]
    played.tick(TICK_S)
    for _ in range(round(2 * DEADLINE_S / TICK_S)):
        played.signs(0)
        played.tick(TICK_S)
    (end,) = ends(played)
    assert end.reason.startswith("3 workers can't be reached and aren't known to be dead, and only 1 are left here")


def test_a_planned_leave_is_no_loss():
    played = Played(started(replicas=4, stages=1)).first_step()
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
