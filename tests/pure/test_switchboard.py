"""The coordinator's connections as a state machine: a process that takes in the same comes to the same."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from recycle_plugin.core.coordinator.facts.key_values import EACH as EACH_KEY
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.coordinator.switchboard import LAST_WORDS_S, NEWS, News, Switchboard
from recycle_plugin.core.messages import from_workers
from recycle_plugin.core.messages.contributions import EACH, LOSS, MEAN
from recycle_plugin.core.messages.encoding import HEAD, decode, encode
from recycle_plugin.core.messages.from_coordinator import (
    Collected,
    FirstGeneration,
    Generation,
    GenerationChange,
    Restart,
    StoreAnswer,
    Welcome,
)
from recycle_plugin.core.messages.from_operators import AskDrain, AskLeave
from recycle_plugin.core.messages.from_workers import (
    Contribution,
    Exited,
    Hello,
    Leaving,
    Left,
    Post,
    Ready,
    Stepped,
    StoreCall,
    SupervisorHeartbeat,
    SurvivorReport,
)
from recycle_plugin.core.messages.kept import BEATS, EVERY
from recycle_plugin.core.messages.line_end import LineEnd
from recycle_plugin.core.messages.mirroring import Got
from recycle_plugin.core.messages.said import LONGEST
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import job, member

RANKS = 4


class Played:
    """A job at a switchboard, and at a second one that takes in the same, from bytes, and is written down now and
    then, as one that stands by is.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.now = Random(seed), 0.0
        self.board, self.other = (Switchboard(RANKS, "a job", 0.0) for _ in range(2))
        self.heard: dict[int, list[object]] = {}  # by line
        self.lines: dict[tuple[str, int], int] = {}  # of workers and supervisors
        self.incarnation = dict.fromkeys(range(RANKS), 0)
        self.stepped = dict.fromkeys(range(RANKS), 0)
        self.next_process = 100

    def take(self, kind: str, **what: object) -> object:
        self.now += self.random.random() / 10
        news, effects, others = News(kind, self.now, **what), Effects(), Effects()
        answer = NEWS[kind](self.board, news, effects)
        if self.random.random() < 0.2:
            self.other = load(json.loads(json.dumps(dump(self.other))))
        assert NEWS[kind](self.other, News.of(decode(encode(news.taken()))), others) == answer
        assert others == effects
        for line, frame in effects.frames:
            self.heard.setdefault(line, []).append(decode(frame))
        return answer

    def comes(self, role: str, rank: int, incarnation: int = 0, pid: int = 0) -> int:
        self.next_process += 1
        hello = Hello(rank, role, pid or self.next_process, "h", incarnation, token=f"of {self.next_process}")
        line = self.lines[role, rank] = self.take("opened", hello=hello, text="somebody")
        return line

    def says(self, role: str, rank: int, message: object) -> None:
        if (role, rank) in self.lines:
            self.take("said", line=self.lines[role, rank], message=message)

    def goes(self, role: str, rank: int) -> None:
        if (role, rank) in self.lines:
            self.take("closed", line=self.lines.pop((role, rank)))

    def generations(self, line: int) -> list[Generation]:
        end = LineEnd()
        return [whole for each in self.heard.get(line, ()) if isinstance(whole := end._whole(each), Generation)]

    def begin(self) -> None:
        for rank in range(RANKS):
            self.comes("supervisor", rank)
            self.comes("worker", rank)
        for rank in range(RANKS):
            self.says("worker", rank, Ready(member(rank), 0, job(rejoin="always")))
        self.report()

    def report(self) -> None:
        """All report for the newest generation that they have heard of."""
        for rank in range(RANKS):
            line = self.lines.get(("worker", rank))
            generations = self.generations(line)
            if generations and self.incarnation[rank] == 0:
                number = generations[-1].number
                self.says("worker", rank, SurvivorReport(rank, number, self.stepped[rank], "plan"))

    def act(self) -> None:
        rank = self.random.randrange(RANKS)
        one = self.incarnation[rank]
        match self.random.choice(
            ("step", "step", "step", "beat", "exit", "again", "tick", "ask", "join", "leave", "got")
        ):
            case "step" if one == 0 and self.stepped[rank] <= self.board.membership.committed:
                self.stepped[rank] += 1
                self.says("worker", rank, Stepped(rank, 0, self.stepped[rank]))
            case "beat":
                beat = SupervisorHeartbeat(rank, False, incarnation=one)
                self.take("beat", line=self.lines.get(("supervisor", rank), -1), message=beat)
            case "exit" if self.random.random() < 0.2:
                for do in self.random.sample((self.exits, self.goes), 2):
                    do("worker", rank)
                self.report()
            case "again":
                self.goes("supervisor", rank)
                self.comes("supervisor", rank, pid=1000 + rank)
            case "tick":
                self.take("tick")
                self.report()
            case "ask":
                asks = self.take("opened", hello=Hello(-1, "operator", 1, "h"), text="an operator")
                self.take("said", line=asks, message=self.random.choice((AskLeave("1.0"), AskDrain("h"))))
                self.take("closed", line=asks)
            case "join":
                self.comes("joining", -1)
            case "leave" if self.random.random() < 0.1:
                self.says("worker", rank, Leaving(rank, "it was told to"))
            case "got":
                line = self.lines.get(("worker", rank), -1)
                self.take("said", line=line, message=Got(len(self.heard.get(line, ()))))

    def exits(self, role: str, rank: int) -> None:
        self.says("supervisor", rank, Exited(rank, -9, self.now))


@pytest.mark.parametrize("seed", range(30))
def test_who_takes_in_the_same_comes_to_the_same(seed):
    played = Played(seed)
    played.begin()
    for _ in range(150):
        played.act()
    assert json.dumps(dump(played.board)) == json.dumps(dump(played.other))
    assert played.board.membership.started


def test_these_jobs_have_what_there_is_in_a_job():
    """Steps that commit, losses, orders to start another process, and answers to operators."""
    seen: set[str] = set()
    for seed in range(30):
        played = Played(seed)
        played.begin()
        for _ in range(150):
            played.act()
        seen |= {type(each).__name__ for line in played.heard.values() for each in line}
    assert {
        "Committed",
        "FirstGeneration",
        "GenerationChange",
        "Resume",
        "Restart",
        "Answer",
        "Lease",
        "End",
        "Refused",
    } <= seen


def test_who_comes_again_gets_what_it_lacks_once_and_in_order():
    played = Played(0)
    played.begin()
    line = played.lines["worker", 1]
    said = [each for each in played.heard[line] if not isinstance(each, Welcome)]
    played.heard[line].clear()
    hello = played.board.lines[line].hello
    again = replace(hello, line=line, heard=1)
    assert played.take("goes on", hello=again)
    welcome, *rest = played.heard[line]
    assert isinstance(welcome, Welcome) and (welcome.line, welcome.heard) == (line, played.board.lines[line].heard)
    assert rest == said[1:] and len(said) > 1
    played.heard[line].clear()
    assert played.take("goes on", hello=replace(again, heard=0))
    assert played.heard[line][1:] == said[1:], "what it has said that it has is kept no longer"
    assert not played.take("goes on", hello=replace(again, token="another"))
    assert not played.take("goes on", hello=replace(again, token=""))


def test_it_says_now_and_then_how_much_it_has_heard():
    played = Played(0)
    played.begin()
    line = played.lines["supervisor", 2]
    played.heard[line].clear()
    for _ in range(EVERY):
        played.says("supervisor", 2, SupervisorHeartbeat(2, False))
    counts = range(BEATS, EVERY + 1, BEATS)
    assert [each for each in played.heard[line] if isinstance(each, Got)] == [Got(count) for count in counts]


@pytest.mark.parametrize("left", (False, True), ids=("killed", "has said goodbye"))
def test_a_worker_whose_process_is_dying_is_lost_though_its_connection_stands(left):
    """Not before its last messages may have come; and it is dead only once its process has ended."""
    board, effects = Switchboard(RANKS, "a job", 0.0), Effects()
    lines = {}
    for rank in range(RANKS):
        for role in ("supervisor", "worker"):
            hello = Hello(rank, role, 10 + rank, "h", token=f"{role} {rank}")
            lines[role, rank] = board.opened(hello, "somebody", 0.0, effects)
    dying = SupervisorHeartbeat(2, False, dying=True)
    board.said(lines["supervisor", 2], dying, 0.5, effects)
    board.tick(1.0, effects)
    assert board.membership.ended is None, "before the start its supervisor says how it has ended"
    for rank in range(RANKS):
        board.said(lines["worker", rank], Ready(member(rank), 0, job()), 1.0, effects)
    board.said(lines["supervisor", 2], dying, 2.0, effects)
    board.tick(2.0 + LAST_WORDS_S / 2, effects)
    assert not board.membership.lost
    if left:
        board.said(lines["worker", 2], Left(2), 2.0 + LAST_WORDS_S / 2, effects)
    board.tick(2.0 + LAST_WORDS_S, effects)
    lost = [event.details for event in effects.events if event.kind == "lost"]
    if left:
        assert not board.membership.lost and not lost
        return
    assert board.membership.unreachable == {WorkerId(2)} and lines["worker", 2] in board.lines
    board.said(lines["supervisor", 2], dying, 3.0, effects)
    board.tick(4.0, effects)
    assert [(each["rank"], each["cause"], each["how"]) for each in lost] == [(2, "died", "its process is ending")]
    board.said(lines["supervisor", 2], Exited(2, -9, 4.0), 4.0, effects)
    board.closed(lines["worker", 2], 4.1, effects)
    board.tick(5.0, effects)
    assert not board.membership.unreachable
    assert [event.kind for event in effects.events if event.kind in ("lost", "confirmed")] == ["lost", "confirmed"]


def test_an_order_to_start_another_process_is_kept_for_a_supervisor_that_is_away():
    """Whose connection is to go on with another coordinator."""
    played = Played(0)
    played.begin()
    line = played.lines["supervisor", 3]
    hello = played.board.lines[line].hello
    heard = len([each for each in played.heard[line] if not isinstance(each, Welcome)])
    played.exits("worker", 3)
    played.goes("worker", 3)
    for _ in range(40):
        played.take("tick")
        played.report()
    played.heard[line].clear()
    played.take("goes on", hello=replace(hello, line=line, heard=heard))
    assert [each for each in played.heard[line] if isinstance(each, Restart)]


@pytest.mark.parametrize("gone", (False, True), ids=("waits", "is gone"))
def test_a_spare_gets_the_seat_unless_it_is_gone(gone):
    played = Played(0)
    played.begin()
    spare, own = played.comes("joining", -1), played.lines["supervisor", 3]
    if gone:
        played.goes("joining", -1)
    played.exits("worker", 3)
    played.goes("worker", 3)
    for _ in range(40):
        played.take("tick")
        played.report()
    ordered = {line for line, said in played.heard.items() if any(isinstance(each, Restart) for each in said)}
    assert ordered == {own if gone else spare}


def test_a_worker_that_was_not_answered_may_come_once_more():
    """Who was to welcome it has died; once it was heard, or as another process, it is another worker."""
    board, effects = Switchboard(RANKS, "a job", 0.0), Effects()
    hello = Hello(1, "worker", 7, "h")
    first = board.opened(replace(hello, token="one"), "somebody", 0.0, effects)
    again = board.opened(replace(hello, token="two"), "somebody", 0.1, effects)
    assert effects.closed == [first] and board.lines[again].worker == WorkerId(1)
    welcomes = [message for line, frame in effects.frames if line == again and (message := decode(frame))]
    assert [message.line for message in welcomes if isinstance(message, Welcome)] == [again]
    assert len([event for event in effects.events if event.kind == "worker"]) == 1 and board.membership.ended is None
    board.closed(first, 0.2, effects)
    board.said(again, Ready(member(1), 0, job()), 0.3, effects)
    other = board.opened(replace(hello, token="three"), "somebody", 0.4, effects)
    assert board.lines[other].worker != WorkerId(1) and again in board.lines


def test_a_worker_that_was_not_answered_hears_that_the_job_has_ended_meanwhile():
    board, effects = Switchboard(RANKS, "a job", 0.0), Effects()
    hello = Hello(1, "worker", 7, "h")
    board.opened(replace(hello, token="one"), "somebody", 0.0, effects)
    board.fail("nobody needs it", 0.1, effects)
    effects = Effects()
    again = board.opened(replace(hello, token="two"), "somebody", 0.2, effects)
    assert board.membership.ended in [decode(frame) for line, frame in effects.frames if line == again]


def test_a_wait_in_the_store_goes_with_its_worker():
    """Who is lost hears no answer, though it may still be connected."""
    played = Played(0)
    played.begin()
    for rank in (2, 3):
        played.says("worker", rank, StoreCall(rank, 5, "wait", ("a",), ()))
    played.exits("worker", 3)
    while WorkerId(3) not in played.board.membership.lost:
        played.take("tick")
    played.says("worker", 0, StoreCall(0, 0, "set", ("a",), (b"",)))
    answers = [
        each
        for each in ("2", "3")
        for said in played.heard[played.lines["worker", int(each)]]
        if isinstance(said, StoreAnswer)
    ]
    assert answers == ["2"]
    played.says("worker", 1, StoreCall(1, 5, "wait", ("b",), ()))
    played.goes("worker", 1)
    store = played.board.membership.state.key_values
    assert not store.waits and store.used == EACH_KEY + len("a")


@pytest.mark.parametrize(
    "made", (partial(Post, 1, 0, "a board"), lambda value: StoreCall(1, 0, "set", ("a",), (value,)))
)
def test_the_longest_message_gets_to_who_stands_by(made):
    """Within another one. A longer one is refused where it is said."""
    long = bytes(LONGEST - 100)
    message = made(long + bytes(LONGEST - (len(encode(made(long))) - HEAD.size)))
    assert len(encode(message)) == HEAD.size + LONGEST
    news = News("said", 1e9, 1 << 62, message=message)
    assert News.of(decode(encode(news.taken(1 << 62, True)))) == news
    with pytest.raises(ValueError, match="too long"):
        encode(made(bytes(LONGEST)))
    assert all(getattr(kind, "MOST", 0) <= LONGEST for kind in vars(from_workers).values())


def test_who_has_heard_of_the_last_generation_hears_what_has_changed_alone():
    """And who comes back, all of it."""
    played = Played(0)
    played.begin()
    played.exits("worker", 3)
    played.goes("worker", 3)
    played.report()
    played.take("tick")
    line = played.lines["worker", 0]
    _, change = (each for each in played.heard[line] if isinstance(each, FirstGeneration | GenerationChange))
    whole = played.generations(line)[0]
    assert len(whole.members) == RANKS and (change.since, change.gone, change.come) == (0, (WorkerId(3),), ())
    assert played.generations(line)[-1] == Generation(1, whole.members[:3], 0, change.cause, change.at)
    again = played.comes("worker", 3, 1)
    played.says("worker", 3, Ready(replace(member(3), incarnation=1), 0, job(rejoin="always")))
    played.exits("worker", 1)
    played.goes("worker", 1)
    assert [each.number for each in played.heard[again] if isinstance(each, FirstGeneration)] == [2]
    last = [each for each in played.heard[line] if isinstance(each, GenerationChange)][-1]
    assert (last.number, last.since, last.gone) == (2, 1, (WorkerId(1),))


def test_a_change_of_a_generation_that_was_not_heard_of_is_no_message():
    change = Generation(2, (member(0),), 0, "", 0.0).changed(Generation(1, (member(0), member(1)), 0, "", 0.0))
    assert "is of generation 1, and the last that was heard is none" in str(LineEnd()._whole(change))


def test_what_is_logged_of_each_loss_reaches_the_last_stage_alone_and_the_mean_all():
    played = Played(0)
    played.begin()
    logged = {"lm loss": (1.0, 2.0)}
    for rank, losses in ((2, {"0.0": (1.0, logged)}), (3, {"1.0": 2.0})):
        played.says("worker", rank, Contribution(rank, 1, LOSS, losses, 2))
    heard = {
        rank: [each for each in played.heard[played.lines["worker", rank]] if isinstance(each, Collected)]
        for rank in range(RANKS)
    }
    all_hear, last_hears = Collected(1, LOSS, {MEAN: 1.5}), Collected(1, EACH, {"0.0": (1.0, logged), "1.0": 2.0})
    assert heard == {0: [all_hear], 1: [all_hear], 2: [last_hears, all_hear], 3: [last_hears, all_hear]}
