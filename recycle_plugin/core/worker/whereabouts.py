"""Where a worker's script is, as it says in each membership that it adopts, and as it reads of others.

What a script asks of its peers between steps is counted, and a change of the membership finds some further than others
(runtime/collectives/outcomes.py).  Each says where it is on a board of that membership
(core/coordinator/facts/boards.py).

* A worker that has passed a membership over was waiting to enter it, and has not moved: what it says in the next one
  it says for those that it has passed over too; a newcomer for those that it has reported for.
* A newcomer counts on where the others are in the membership that lets it in, from a step that they all are at.  It
  asks as it adopts that membership, so before it reports for the next one, and nobody speaks in the next one before
  all have reported.  What has not come by then it asks for once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.vocabulary.roster import Roster

PASSED = 8  # generations that a worker may have passed over, for each of which it says where it is


class Reading:
    """The values on one board as they come, by rank; ``answered``: what was there has come."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}
        self.answered = False
        self._tell: list[Callable[[], object]] = []

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` whose value has not come."""
        return [rank for rank in ranks if rank not in self.values]

    def when_news(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` after each answer."""
        self._tell.append(tell)

    def take(self, values: dict[str, bytes]) -> list[Callable[[], object]]:
        """Take an answer; returns whom to tell."""
        self.values.update((int(rank), value) for rank, value in values.items())
        self.answered = True
        return self._tell


class BoardPort(Protocol):
    """The boards as one worker uses them."""

    def post(self, board: str, value: bytes, generation: int) -> None:
        """Post ``value`` in ``generation``; a later value on the same board is ignored."""

    def read(self, board: str, ranks: Sequence[int], generation: int) -> Reading:
        """Ask in ``generation`` for what ``ranks`` post on ``board``; the same reading until :meth:`forget`."""

    def forget(self, board: str) -> None:
        """Keep nothing more of ``board``."""


class Whereabouts:
    """What one worker says, and reads, of where scripts are."""

    def __init__(self, boards: BoardPort) -> None:
        self._boards = boards
        self._told = -1  # the last generation in which this worker has said where it is
        self._roster = Roster()
        self._readings: dict[int, Reading] = {}  # by generation
        self.let_in: Generation | None = None  # of a newcomer

    def adopt(self, generation: Generation, words: bytes, lets_in: bool, first: int | None = None) -> None:
        """Say where this worker is, by ``words``, as it adopts ``generation``, which ``lets_in`` its script.

        ``first``: of a newcomer, the first one that it has reported for: others may have gone on in that.
        """
        number, self._roster = generation.number, generation.roster
        since = self._told + 1 if self._told >= 0 else number if first is None else first
        passed_over = range(max(since, number - PASSED), number)
        self._told = number
        for each in (number, *passed_over):
            self._boards.post(board_of(each), words, number)
        self.let_in = generation if lets_in else self.let_in
        for each in [*self._readings]:
            if self.let_in is None or each != self.let_in.number:
                self._boards.forget(board_of(each))
                del self._readings[each]
        if self.let_in is not None and self.missing():
            self._readings[self.let_in.number] = self._ask(self.let_in.number)

    def missing(self) -> list[int]:
        """The ranks of those who were there as this worker was let in, still are, and have not said where they were."""
        assert self.let_in is not None, "this worker was there from the start"
        stayed = sorted(worker.rank for worker in self.let_in.roster.workers & self._roster.workers)
        reading = self._readings.get(self.let_in.number)
        return stayed if reading is None else reading.missing(stayed)

    def read(self, generation: int) -> Reading:
        """What the members say in ``generation``: that in force, or that which has let this worker in."""
        if generation not in self._readings:
            self._readings[generation] = self._ask(generation)
        return self._readings[generation]

    def _ask(self, generation: int) -> Reading:
        return self._boards.read(board_of(generation), sorted(self._roster.ranks), self._told)


def board_of(generation: int) -> str:
    """The name of the board on which workers say where they are in ``generation``."""
    return f"where all are in generation {generation}"
