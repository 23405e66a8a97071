"""The boards as a simulated worker uses them: it posts the step that its script is at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recycle_plugin.core.messages.from_coordinator import Generation, Posted
from recycle_plugin.core.messages.from_workers import Post, ReadBoard
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.whereabouts import Reading, Whereabouts


class SimulatedBoards:
    """The boards, as core.worker.whereabouts.BoardPort; messages go by ``send``."""

    def __init__(self, rank: int, send: Callable[[Any], object]) -> None:
        self._rank, self._send = rank, send
        self._readings: dict[str, Reading] = {}

    def post(self, board: str, value: bytes, generation: int) -> None:
        """Post ``value`` in ``generation``."""
        self._send(Post(self._rank, generation, board, value))

    def read(self, board: str, ranks: Sequence[int], generation: int) -> Reading:
        """Ask for what ``ranks`` post on ``board``."""
        reading = self._readings.setdefault(board, Reading())  # before asking: the answer may come at once
        self._send(ReadBoard(self._rank, generation, board, tuple(ranks)))
        return reading

    def forget(self, board: str) -> None:
        """Drop what was read of ``board``."""
        self._readings.pop(board, None)

    def take(self, posted: Posted) -> None:
        """Record an answer of the coordinator."""
        if posted.board in self._readings:
            self._readings[posted.board].take(posted.values)


class SimulatedView(ControlView):
    """The view of a worker that posts its script's step at each membership, and reads the others' when it is let in."""

    def __init__(self, rank: int, incarnation: int, send: Callable[[Any], object]) -> None:
        super().__init__(rank, incarnation)
        self.script_at = 0
        self.boards = SimulatedBoards(rank, send)
        self.whereabouts = Whereabouts(self.boards)

    def adopt(self, generation: Generation) -> None:
        """Make ``generation`` the membership in force."""
        lets_in = self.outside
        super().adopt(generation)
        self.whereabouts.adopt(generation, str(self.script_at).encode(), lets_in, self.reported_first)

    def take(self, message: Any) -> None:
        """Record one message of the coordinator."""
        self.boards.take(message) if isinstance(message, Posted) else super().take(message)

    @property
    def let_in_at(self) -> int | None:
        """The step at which a planned generation has let this worker in; None for any other worker."""
        let_in = self.whereabouts.let_in
        return let_in.from_step or None if let_in is not None else None

    def said(self) -> dict[int, int]:
        """Return by rank the others' steps in the generation that has let this worker in."""
        let_in = self.whereabouts.let_in
        assert let_in is not None, "this worker was there from the start"
        return {rank: int(step) for rank, step in self.whereabouts.read(let_in.number).values.items()}
