"""Boards: what workers post at the coordinator for each other, on connections that are known to be theirs.

On a named board each rank has at most one value of bytes, which the coordinator does not read. Posted are:
* where a worker listens for the links of its groups (runtime/collectives/gloo.py),
* which of the script's collectives are behind it, with results that others asked for (runtime/collectives/outcomes.py),
* what the beginning of the script gave it (runtime/collectives/startup.py): for newcomers of the same rank, and kept
  for good (ALWAYS). All else belongs to a generation.

A reader gets the values that are there, then each later one as it is posted.

What a rank has posted and asked for in a generation is dropped when it speaks of a later one, and the values on a board
once all ranks on it have read it. A rank has at most SHARE bytes on all boards, so the memory grows with the number of
ranks, not with time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import Posted
from recycle_plugin.core.messages.from_workers import ALWAYS, Post, ReadBoard
from recycle_plugin.core.vocabulary.roster import WorkerId

SHARE = 12 << 20  # bytes kept of one rank: one message can carry them
PIECE = 4 << 20  # bytes after which an answer continues in another message
EACH = 256  # bytes that a value counts for beside its own, and that a wish counts for
EACH_RANK = 16  # bytes that a wish counts for in addition, for each rank


@dataclass
class Wish:
    """A rank's request for the values of ``ranks`` on one board. ``missing``: the ranks whose value has not arrived."""

    ranks: tuple[int, ...]
    missing: set[int]


@dataclass
class OfRank:
    """The values that ``worker`` has posted in ``generation``, and its wishes there, each by board."""

    worker: WorkerId
    generation: int
    values: dict[str, bytes] = field(default_factory=dict)
    wishes: dict[str, Wish] = field(default_factory=dict)


class Boards:
    """All boards of a job. The first value that a rank posts on a board stays."""

    def __init__(self) -> None:
        self._always: dict[int, OfRank] = {}
        self._present: dict[int, OfRank] = {}
        self._readers: dict[str, set[int]] = {}  # by board, the ranks with a wish there

    def has_room(self, message: Post | ReadBoard) -> bool:
        """Return whether ``message`` fits into its rank's share."""
        size = _size(message.value) if isinstance(message, Post) else _wish_size(message.ranks)
        return self._used(self._always.get(message.rank)) + self._used(self._of(message)) + size <= SHARE

    def post(self, post: Post, is_gone: Callable[[WorkerId], bool], out: CoordinatorOutput) -> None:
        """Keep a value, and send it to those of the board's readers that wait for it and are not gone. O(readers)."""
        of_rank = self._of(post)
        if of_rank is None or post.board in of_rank.values or not self.has_room(post):
            return
        self._keep(post, of_rank)
        of_rank.values[post.board] = post.value
        for rank in sorted(self._readers.get(post.board, ())):
            reader = self._present[rank]
            wish = reader.wishes.get(post.board)
            if wish is not None and post.rank in wish.missing and not is_gone(reader.worker):
                wish.missing.remove(post.rank)
                out.tell(reader.worker, Posted(post.board, {str(post.rank): post.value}))
                self._clear_if_read(post.board, wish)

    def read(self, asked: ReadBoard, out: CoordinatorOutput) -> None:
        """Answer at once with the values that are there, even if there are none. The rest follows as it is posted."""
        kept = self._always if asked.generation == ALWAYS else self._present
        there = [rank for rank in asked.ranks if rank in kept and asked.board in kept[rank].values]
        found: dict[str, bytes] = {}
        for rank in there:
            if sum(map(_size, found.values())) > PIECE:
                out.tell(asked.worker, Posted(asked.board, found))
                found = {}
            found[str(rank)] = kept[rank].values[asked.board]
        out.tell(asked.worker, Posted(asked.board, found))
        of_rank = self._of(asked)
        if asked.generation != ALWAYS and of_rank is not None and self.has_room(asked):
            self._keep(asked, of_rank)
            self._readers.setdefault(asked.board, set()).add(asked.rank)
            of_rank.wishes[asked.board] = wish = Wish(asked.ranks, {*asked.ranks}.difference(there))
            self._clear_if_read(asked.board, wish)

    def _keep(self, message: Post | ReadBoard, of_rank: OfRank) -> None:
        """Make ``of_rank`` the rank's record. The wishes of its earlier record are dropped."""
        kept = self._always if message.generation == ALWAYS else self._present
        before = kept.get(message.rank)
        kept[message.rank] = of_rank
        if before is not None and before is not of_rank:
            for board in before.wishes:
                self._reads_no_more(message.rank, board)

    def _reads_no_more(self, rank: int, board: str) -> None:
        self._readers[board].remove(rank)
        if not self._readers[board]:
            del self._readers[board]

    def _of(self, message: Post | ReadBoard) -> OfRank | None:
        """Return the rank's record of the message's generation, perhaps a new one; None if the message is too late."""
        kept = self._always if message.generation == ALWAYS else self._present
        new = OfRank(message.worker, message.generation)
        present = kept.get(message.rank, new)
        age = present.generation, present.worker.incarnation
        if age == (new.generation, new.worker.incarnation):
            return present
        return new if age < (new.generation, new.worker.incarnation) and message.generation != ALWAYS else None

    @staticmethod
    def _used(of_rank: OfRank | None) -> int:
        if of_rank is None:
            return 0
        wishes = sum(_wish_size(wish.ranks) for wish in of_rank.wishes.values())
        return wishes + sum(map(_size, of_rank.values.values()))

    def _clear_if_read(self, board: str, wish: Wish) -> None:
        """Drop the values on ``board`` if every rank on it has read all of them."""
        readers = [self._present.get(rank) for rank in sorted({*wish.ranks})] if not wish.missing else [None]
        if all(reader is not None and _has_read(reader, board) for reader in readers):
            for reader in filter(None, readers):
                reader.values.pop(board, None)
                del reader.wishes[board]
                self._reads_no_more(reader.worker.rank, board)


def _has_read(reader: OfRank, board: str) -> bool:
    return board in reader.wishes and not reader.wishes[board].missing


def _size(value: bytes) -> int:
    return EACH + len(value)


def _wish_size(ranks: tuple[int, ...]) -> int:
    return EACH + EACH_RANK * len(ranks)
