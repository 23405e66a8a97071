"""Where a worker's script is. Each worker posts its position in every membership that it adopts, and reads the others'.

A script's requests to its peers between steps are numbered, and at a membership change some scripts are further than
others (runtime/collectives/outcomes.py). Each worker posts its position on a board of the new membership
(core/coordinator/facts/boards.py).

* A worker that skips a membership was waiting to enter it, so its script has not moved. It posts its position for the
  skipped memberships too. A newcomer does so for all that it has reported for.
* A newcomer's count begins at the others' position in the membership that lets it in; all have reached that step. It
  asks for their positions as it adopts that membership, so before it reports for the next one, and nobody posts in the
  next one before all have reported. By then it asks again for positions that have not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.vocabulary.roster import Roster

PASSED = 8  # generations that a worker may have passed over, for each of which it posts


class Reading:
    """The values on one board as they come, by rank; ``answered``: the values there at the request have come."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}
        self.answered = False
        self._tell: list[Callable[[], object]] = []

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks of ``ranks`` whose value has not arrived."""
        return [rank for rank in ranks if rank not in self.values]

    def when_news(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` after each answer."""
        self._tell.append(tell)

    def take(self, values: dict[str, bytes]) -> list[Callable[[], object]]:
        """Record an answer; return the callbacks to call."""
        self.values.update((int(rank), value) for rank, value in values.items())
        self.answered = True
        return self._tell


class BoardPort(Protocol):
    """The boards as one worker uses them."""

    def post(self, board: str, value: bytes, generation: int) -> None:
        """Post ``value`` in ``generation``; a later value on the same board is ignored."""

    def read(self, board: str, ranks: Sequence[int], generation: int) -> Reading:
        """Ask in ``generation`` for the posts of ``ranks`` on ``board``. Return one reading until :meth:`forget`."""

    def forget(self, board: str) -> None:
        """Keep nothing more of ``board``."""


class Whereabouts:
    """One worker's posts and readings of script positions."""

    def __init__(self, boards: BoardPort) -> None:
        self._boards = boards
        self._told = -1  # the last generation in which this worker has posted
        self._roster = Roster()
        self._readings: dict[int, Reading] = {}  # by generation
        self.let_in: Generation | None = None  # of a newcomer

    def adopt(self, generation: Generation, words: bytes, lets_in: bool, first: int | None = None) -> None:
        """Post this worker's position, ``words``, as it adopts ``generation``, which ``lets_in`` its script. ``first``:
        of a newcomer, the first generation that it has reported for: others may have gone on in that.
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
        """Return the ranks of members since before this worker was let in that have not posted where they were."""
        assert self.let_in is not None, "this worker was there from the start"
        stayed = sorted(worker.rank for worker in self.let_in.roster.workers & self._roster.workers)
        reading = self._readings.get(self.let_in.number)
        return stayed if reading is None else reading.missing(stayed)

    def read(self, generation: int) -> Reading:
        """Return the members' posts in ``generation``: the one in force, or the one that has let this worker in."""
        if generation not in self._readings:
            self._readings[generation] = self._ask(generation)
        return self._readings[generation]

    def _ask(self, generation: int) -> Reading:
        return self._boards.read(board_of(generation), sorted(self._roster.ranks), self._told)


def board_of(generation: int) -> str:
    """Return the name of the board on which workers post where they are in ``generation``."""
    return f"where all are in generation {generation}"
