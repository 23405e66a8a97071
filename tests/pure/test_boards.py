"""What workers post for each other at the coordinator: who gets it, what is kept, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from recycle_plugin.core.coordinator.facts.boards import EACH, PIECE, SHARE, Boards
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.messages.encoding import LIMIT, encode
from recycle_plugin.core.messages.from_coordinator import Generation, Posted
from recycle_plugin.core.messages.from_workers import ALWAYS, Post, ReadBoard, WantResult
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.whereabouts import PASSED, Reading, Whereabouts
from tests.support.membership import member, started

MEMBERS = tuple(member(rank) for rank in range(3))
GONE = frozenset[WorkerId]().__contains__


def posts(boards: Boards, rank: int, board: str, value: bytes, generation: int = 1, incarnation: int = 0) -> dict:
    out = CoordinatorOutput()
    boards.post(Post(rank, generation, board, value, incarnation=incarnation), GONE, out)
    return told(out)


def reads(boards: Boards, rank: int, board: str, of: Iterable[int], generation: int = 1, incarnation: int = 0) -> dict:
    out = CoordinatorOutput()
    boards.read(ReadBoard(rank, generation, board, tuple(of), incarnation=incarnation), out)
    return told(out)


def told(out: CoordinatorOutput) -> dict[int, dict[str, bytes]]:
    return {whom.rank: message.values for whom, message in out.messages}  # type: ignore[union-attr, attr-defined]


def test_a_reader_gets_what_is_there_and_then_what_comes() -> None:
    boards = Boards()
    assert posts(boards, 0, "here", b"zero") == {}
    assert reads(boards, 1, "here", (0, 1, 2)) == {1: {"0": b"zero"}}
    assert posts(boards, 2, "here", b"two") == {1: {"2": b"two"}}
    assert posts(boards, 2, "elsewhere", b"two") == {}
    assert posts(boards, 1, "here", b"one") == {1: {"1": b"one"}}
    assert posts(boards, 0, "here", b"another") == {}
    assert reads(boards, 2, "here", (0,)) == {2: {"0": b"zero"}}


def test_what_is_posted_for_newcomers_stays_and_is_answered_at_once() -> None:
    boards = Boards()
    assert reads(boards, 1, "begun", (1,), ALWAYS, incarnation=1) == {1: {}}
    posts(boards, 1, "begun", b"first", ALWAYS)
    for generation in range(5):
        posts(boards, 1, "where", b"", generation)
    assert reads(boards, 1, "begun", (1,), ALWAYS, incarnation=2) == {1: {"1": b"first"}}
    posts(boards, 1, "begun", b"of a newcomer", ALWAYS, incarnation=2)
    assert reads(boards, 1, "begun", (1,), ALWAYS, incarnation=3) == {1: {"1": b"first"}}


def test_what_is_of_a_generation_goes_when_its_rank_speaks_of_a_later_one() -> None:
    boards = Boards()
    posts(boards, 0, "here", b"zero", 1)
    assert reads(boards, 1, "here", (0, 2), 1) == {1: {"0": b"zero"}}
    posts(boards, 0, "there", b"", 2)
    assert reads(boards, 2, "here", (0,), 1) == {2: {}}
    assert posts(boards, 0, "here", b"late", 1) == {}
    posts(boards, 1, "there", b"", 2)
    assert posts(boards, 2, "here", b"two", 1) == {}, "nobody waits for it any more"


def test_a_later_process_of_a_rank_takes_its_place() -> None:
    boards = Boards()
    posts(boards, 0, "here", b"dead", 1)
    assert posts(boards, 0, "here", b"alive", 1, incarnation=1) == {}
    assert reads(boards, 1, "here", (0,), 1) == {1: {"0": b"alive"}}
    posts(boards, 0, "more", b"dead", 1)
    assert reads(boards, 1, "more", (0,), 1) == {1: {}}


def test_who_is_gone_is_told_nothing() -> None:
    boards, out = Boards(), CoordinatorOutput()
    reads(boards, 1, "here", (0,))
    boards.post(Post(0, 1, "here", b""), {WorkerId(1)}.__contains__, out)
    assert out.messages == []


def test_what_all_have_read_is_kept_no_longer() -> None:
    boards = Boards()
    for rank in range(3):
        posts(boards, rank, "link", bytes(1000))
        reads(boards, rank, "link", range(3))
    assert all(not of_rank.values and not of_rank.wishes for of_rank in boards._present.values())
    posts(boards, 0, "link", b"again")  # another one of this name
    assert reads(boards, 1, "link", (0,)) == {1: {"0": b"again"}}


class Looked(dict):
    """Counts the records that are looked at."""

    looks = 0

    def __getitem__(self, rank: int) -> object:
        self.looks += 1
        return super().__getitem__(rank)

    def values(self):
        self.looks += len(self)
        return super().values()


def test_a_post_costs_a_look_at_those_who_read_its_board_however_many_ranks_there_are() -> None:
    looks = []
    for ranks in (4, 400):
        boards = Boards()
        boards._present = found = Looked()
        for rank in range(ranks):
            reads(boards, rank, f"pair {rank // 2}", (rank, rank ^ 1))
        found.looks = 0
        assert posts(boards, 0, "pair 0", b"zero") == {0: {"0": b"zero"}, 1: {"0": b"zero"}}
        looks.append(found.looks)
        assert posts(boards, 1, "pair 0", b"one") == {0: {"1": b"one"}, 1: {"1": b"one"}}
        for rank in range(2, ranks):
            posts(boards, rank, "another", b"", 2)
        assert not boards._readers, "one board was read, and the rest are of a generation that is over"
    assert looks == [2, 2]


def test_what_is_kept_of_a_rank_is_bounded() -> None:
    boards = Boards()
    posts(boards, 0, "begun", bytes(SHARE // 2 - EACH), ALWAYS)
    posts(boards, 0, "one", bytes(SHARE // 2 - EACH))
    posts(boards, 0, "two", b"")
    assert reads(boards, 1, "two", (0,)) == {1: {}} and reads(boards, 1, "one", (0,))[1]
    posts(boards, 0, "two", b"", 2)
    assert reads(boards, 1, "two", (0,), 2) == {1: {"0": b""}}


def test_what_is_answered_fits_into_messages() -> None:
    boards, out = Boards(), CoordinatorOutput()
    for rank in range(8):
        posts(boards, rank, "here", bytes(PIECE - EACH))
    boards.read(ReadBoard(9, 1, "here", tuple(range(8))), out)
    found: dict[str, bytes] = {}
    for _, message in out.messages:
        assert isinstance(message, Posted) and len(encode(message)) < LIMIT
        found |= message.values
    assert sorted(found) == sorted(map(str, range(8)))
    posts(boards, 0, "begun", bytes(SHARE - EACH), ALWAYS)
    assert len(encode(Post(0, ALWAYS, "begun", bytes(SHARE - EACH)))) < LIMIT


def test_a_member_that_posts_more_than_its_share_is_given_up() -> None:
    membership = started()
    out = membership.receive(Post(1, 0, "much", bytes(SHARE)), 1.0)
    (lost,) = [event for event in out.events if event.kind == "lost"]
    assert lost.details["cause"] == "confused" and "more than 12 MiB would be kept for it" in str(lost)


def test_what_a_lost_worker_posts_is_dropped_and_a_request_for_a_result_is_passed_on() -> None:
    membership = started()
    wanted = WantResult(1, 0, 2, "line", 3)
    assert membership.receive(wanted, 1.0).messages == [(WorkerId(2), wanted)]
    assert membership.receive(WantResult(1, 0, 99, "line", 3), 1.0).messages == []
    membership.connection_lost(WorkerId(1), 1.0)
    membership.receive(Post(1, 0, "here", b"lost"), 1.0)
    assert membership.receive(ReadBoard(0, 0, "here", (1,)), 1.0).messages == [(WorkerId(0), Posted("here", {}))]


# --- where a worker's script is, as it says there ---------------------------------------------------------


class Worker:
    """The boards as a worker of ``rank`` uses them: what it says gets there at once, and the answer too."""

    def __init__(self, boards: Boards, rank: int, others: dict[int, Worker]) -> None:
        self._boards, self._rank, self._others, self._readings = boards, rank, others, dict[str, Reading]()
        self.whereabouts = Whereabouts(self)
        others[rank] = self

    def _answer(self, out: CoordinatorOutput) -> None:
        for whom, message in out.messages:
            assert isinstance(message, Posted) and isinstance(whom, WorkerId)
            if (reading := self._others[whom.rank]._readings.get(message.board)) is not None:
                reading.take(message.values)

    def post(self, board: str, value: bytes, generation: int) -> None:
        out = CoordinatorOutput()
        self._boards.post(Post(self._rank, generation, board, value), GONE, out)
        self._answer(out)

    def read(self, board: str, ranks: Sequence[int], generation: int) -> Reading:
        reading, out = self._readings.setdefault(board, Reading()), CoordinatorOutput()
        self._boards.read(ReadBoard(self._rank, generation, board, tuple(ranks)), out)
        self._answer(out)
        return reading

    def forget(self, board: str) -> None:
        self._readings.pop(board, None)

    def adopt(self, number: int, words: str, lets_in: bool = False, first: int | None = None) -> None:
        self.whereabouts.adopt(Generation(number, MEMBERS, 0, "", 0.0), words.encode(), lets_in, first)


def test_a_newcomer_hears_where_another_was_that_had_reported_for_what_let_it_in_and_passed_it_over() -> None:
    """Generation 5 lets rank 2 in, and would have let rank 1 in, which comes in by 6 only."""
    others: dict[int, Worker] = {}
    here, late, newcomer = [Worker(boards, rank, others) for boards in [Boards()] for rank in range(3)]
    here.adopt(5, "here")
    newcomer.adopt(5, "nowhere", lets_in=True)
    assert newcomer.whereabouts.missing() == [1]
    late.adopt(6, "let in", lets_in=True, first=5)
    assert newcomer.whereabouts.missing() == []
    assert newcomer.whereabouts.read(5).values == {0: b"here", 1: b"let in", 2: b"nowhere"}


@pytest.mark.parametrize("passed", range(1, PASSED + 1))
@pytest.mark.parametrize("first", ("the newcomer", "the other"))
def test_a_newcomer_hears_where_somebody_was_who_has_passed_over_what_let_it_in(first: str, passed: int) -> None:
    """Ranks 0 and 2 adopt generation 5, which lets 2 in; rank 1 hears of later ones before it can."""
    others: dict[int, Worker] = {}
    here, passes, newcomer = [Worker(boards, rank, others) for boards in [Boards()] for rank in range(3)]
    here.adopt(4, "before")
    passes.adopt(4, "before")
    newcomer.adopt(5, "nowhere", lets_in=True)
    here.adopt(5, "here")
    assert newcomer.whereabouts.missing() == [1]
    last = 5 + passed
    turns = [lambda: newcomer.adopt(last, "let in"), lambda: passes.adopt(last, "waits")]
    here.adopt(last, "further")
    for turn in turns if first == "the newcomer" else turns[::-1]:
        turn()
    assert newcomer.whereabouts.missing() == []
    said = newcomer.whereabouts.read(5).values
    assert said == {0: b"here", 1: b"waits", 2: b"nowhere"}
    passes.adopt(last + 1, "moved")
    newcomer.adopt(last + 1, "moved")
    assert newcomer.whereabouts.read(5).values == said
