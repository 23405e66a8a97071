"""Who may take the coordinator's place from another host: never two at once, and only where there is a third."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.mirror import GONE_S, LATER_S, Known, Turned
from recycle_plugin.core.coordinator.succession import AGAIN_S, Electorate, Succession
from recycle_plugin.core.coordinator.switchboard import NEWS, News, Switchboard
from recycle_plugin.core.messages.encoding import decode
from recycle_plugin.core.messages.from_coordinator import ForkStandby, Welcome
from recycle_plugin.core.messages.from_workers import Hello, Ready
from recycle_plugin.core.messages.line_end import AT_HOME_S, HEALS_S, TRY_S, Tries
from recycle_plugin.core.messages.mirroring import Knows, StandsBy
from recycle_plugin.core.vocabulary.deadlines import Deadlines, lease_s
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from tests.support.membership import job, member

HOSTS = ("alpha", "beta", "gamma", "beta")
BOTH = {"more": True}, {"more": False}


def roster(ranks: set[int]) -> Roster:
    return Roster(tuple(member(rank, host=HOSTS[rank % len(HOSTS)]) for rank in ranks))


def of(ranks: set[int]) -> set[WorkerId]:
    return {WorkerId(rank) for rank in ranks}


# --- where an end turns --------------------------------------------------------------------------------


@pytest.mark.parametrize("silent, alone_s", ((False, AT_HOME_S), (True, HEALS_S)), ids=("closed", "silent"))
def test_no_try_at_home_puts_off_the_first_one_elsewhere(silent, alone_s):
    """Each try at home takes all the time that it may; afterwards both addresses have the same."""
    tries, now, begun = Tries(100.0, 30.0, True, 2.0, silent), 100.0, []
    while now < 100.0 + 2 * AT_HOME_S:
        begun.append((tries.next(now, True), now))
        now += tries.lasts_s(now)
    assert next(at for goes, at in begun if goes) == 100.0 + alone_s
    assert tries.lasts_s(100.0 + alone_s) == TRY_S


def test_a_silent_host_is_left_when_others_would_be_given_up():
    deadlines = Deadlines(heartbeat_timeout_s=3.0)
    assert lease_s(deadlines) + HEALS_S == deadlines.heartbeat_timeout_s


def test_ends_on_the_old_host_are_awaited_unless_it_is_silent_to_every_worker():
    turned: Turned[object] = Turned()
    for rank, silent in ((1, True), (2, True), (3, False)):
        awaits = turned.gone_s(hangs=True)
        turned.add(object(), Hello(rank, "worker", 100 + rank, HOSTS[rank], silent=silent), None)
    assert awaits == 0.0 and turned.gone_s(hangs=False) == GONE_S and turned.gone_s(hangs=True) == LATER_S


# --- the electorate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, needed", ((range(4), (3, 2)), (range(5), (3, 3)), (range(1), (1, 1))))
def test_who_takes_over_needs_more_than_half_and_who_goes_on_half(ranks, needed):
    electorate = Electorate()
    electorate.add(0, roster(set(ranks)))
    for rule, least in zip(BOTH, needed):
        assert electorate.gives(of(set(range(least))), **rule)
        assert not electorate.gives(of(set(range(least - 1))), **rule)
        assert not electorate.gives(of({100 + each for each in range(least)}), **rule), "strangers count for nothing"


def test_what_is_out_leaves_only_what_somebody_may_still_go_by():
    """Before the last word about the second membership is out, whoever goes on needs enough of both."""
    electorate = Electorate()
    for news, ranks in ((1, {0, 1, 2, 3}), (5, {0, 1})):
        electorate.add(news, roster(ranks))
    electorate.out(4)
    assert not electorate.gives(of({0, 1}), more=True) and not electorate.gives(of({1, 2, 3}), more=True)
    electorate.out(5)
    assert electorate.gives(of({0, 1}), more=True)


@pytest.mark.parametrize("seed", range(300))
def test_two_sides_that_share_no_worker_never_both_have_enough(seed):
    """Each knows the job up to some news of its own, and that what followed from some others is out: what really is out
    both know.
    """
    random = Random(seed)
    news, ranks = 0, set(range(random.randint(3, 8)))
    course = [(0, roster(ranks))]
    while len(ranks) > 2 and random.random() < 0.8:
        news, ranks = news + random.randint(1, 4), ranks - {random.choice(sorted(ranks))}
        course.append((news, roster(ranks)))
    last = news + 3
    out = random.randint(0, last)
    sides = []
    for _ in range(2):
        electorate, taken = Electorate(), random.randint(out, last)
        for number, members in course:
            if number <= taken:
                electorate.add(number, members)
        electorate.out(random.randint(0, out))
        sides.append(electorate)
    everybody = set(range(8))
    for _ in range(40):
        ours = {rank for rank in everybody if random.random() < random.random()}
        assert not (sides[0].gives(of(ours), more=True) and sides[1].gives(of(everybody - ours), more=False))


# --- who is asked --------------------------------------------------------------------------------------


def test_each_other_host_is_asked_in_turn_until_one_stands_by():
    succession, members = Succession("alpha"), roster({0, 1, 2, 3})
    assert [succession.asks(members, now) for now in (0.0, 1.0, AGAIN_S, 2 * AGAIN_S)] == [1, None, 2, 1]
    succession.begin(("gamma", 1))
    assert succession.asks(members, 9 * AGAIN_S) is None
    succession.begin(None)
    assert succession.asks(members, 9 * AGAIN_S) == 2 and succession.term == 2


@pytest.mark.parametrize("ranks", ({0}, {0, 1}, {1, 3}))
def test_of_two_hosts_nobody_is_asked(ranks):
    """Of which none could have more than half against the other."""
    assert Succession("alpha").asks(roster(ranks), 0.0) is None and not Succession("alpha").wants_one(roster(ranks))


def test_a_coordinator_on_a_host_without_workers_counts_as_one():
    assert Succession("head").asks(roster({1, 2}), 0.0) == 1


def test_who_takes_over_begins_another_term_than_the_one_before_can_have_begun():
    succession = Succession("alpha")
    succession.begin(("beta", 1))
    elsewhere = replace(succession)
    succession.begin(None)  # of which not enough have heard
    elsewhere.moves("beta")
    elsewhere.begin(("gamma", 1))
    assert elsewhere.term > succession.term and elsewhere.host == "beta"


# --- at the switchboard --------------------------------------------------------------------------------


class Board:
    """A job's connections at a coordinator on alpha, each with what it is told."""

    def __init__(self) -> None:
        self.board = Switchboard(4, "a job", 0.0, "alpha")
        self.told: dict[int, list[object]] = {}
        self.supervisors = [self.comes("supervisor", rank) for rank in range(4)]
        self.workers = [self.comes("worker", rank) for rank in range(4)]
        for rank, line in enumerate(self.workers):
            self.take("said", line=line, message=Ready(member(rank, host=HOSTS[rank]), 0, job()))

    def take(self, kind: str, **news: object) -> object:
        effects = Effects()
        answer = NEWS[kind](self.board, News(kind, 1.0, **news), effects)
        for line, frame in effects.frames:
            self.told.setdefault(line, []).append(decode(frame))
        return answer

    def comes(self, role: str, rank: int) -> int:
        return self.take("opened", hello=Hello(rank, role, 100 + rank, HOSTS[rank], token="its own"), text="somebody")

    def hello(self, line: int, **more: object) -> Hello:
        return replace(self.board.lines[line].hello, line=line, **more)


def test_the_supervisor_of_another_host_is_asked_once_training_starts():
    job = Board()
    job.take("tick")
    asked = {line: said for line, said in job.told.items() if any(isinstance(each, ForkStandby) for each in said)}
    assert list(asked) == [job.supervisors[1]]


def test_all_hear_of_a_term_and_who_comes_later_too():
    job = Board()
    job.take("stands by", text="10.0.0.2:77")
    term = StandsBy(1, "10.0.0.2", 77, lease_s(job.board.job.deadlines))
    assert all(job.told[line][-1] == term for line in (*job.supervisors, *job.workers))
    line = job.workers[2]
    job.told.clear()
    assert job.take("goes on", hello=job.hello(line)) and job.told[line][1] == term
    assert job.board.knowing(1) == set()
    job.take("said", line=line, message=Knows(1))
    assert job.board.knowing(1) == {WorkerId(2)}
    job.take("goes on", hello=job.hello(job.workers[1], term=1))
    assert job.board.knowing(1) == {WorkerId(1), WorkerId(2)}
    assert isinstance(job.told[job.workers[1]][0], Welcome) and term not in job.told[job.workers[1]], "it knows"


@pytest.mark.parametrize(
    "address, text",
    [
        ("10.0.0.2:77", "a standby on another host, at 10.0.0.2:77, goes on if host alpha dies"),
        ("", "no standby on another host: the job ends if host alpha dies"),
    ],
)
def test_the_user_hears_whether_the_coordinators_host_may_die(address, text):
    board, effects = Board().board, Effects()
    board.stands_by(address, 1.0, effects)
    assert [event.text for event in effects.events] == [text]


def test_who_knows_of_a_later_term_is_not_known_here():
    """What it has heard meanwhile, nobody here has."""
    job = Board()
    job.take("stands by", text="10.0.0.2:77")
    assert job.board.known(job.hello(job.workers[0], term=1)) is job.board.lines[job.workers[0]]
    assert job.board.known(job.hello(job.workers[0], term=2)) is None
    assert job.board.known(job.hello(job.workers[0], token="another's")) is None
    job.take("said", line=job.workers[0], message=Knows(7))
    assert job.board.knowing(2) == set(), "nobody knows of what has not begun"


def test_who_turns_after_its_connection_was_closed_counts_for_the_standby():
    """On a bad line a worker may be lost without its death, just before others turn, too."""
    job = Board()
    job.take("stands by", text="10.0.0.2:77")
    turned = [job.hello(job.workers[rank], term=1) for rank in (1, 2, 3)]
    job.take("closed", line=job.workers[2])
    standby = Known(job.board, 9)
    standby.electorate.add(0, roster({0, 1, 2, 3}))
    assert standby.is_elected(77, turned) and not standby.is_elected(77, turned[:2])
    others = [replace(turned[1], **each) for each in ({"term": 2}, {"line": 99}, {"incarnation": 1}, {"line": -1})]
    assert not any(standby.is_elected(77, [turned[0], each, turned[2]]) for each in others)
