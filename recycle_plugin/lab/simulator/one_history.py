"""The checker of jobs in which others take the coordinator's place: there are never two histories. Whatever anybody has
heard, the coordinator knows, and would say the same. It takes in what was said, once and in order. Of a membership, and
of the end, all hear the same, whoever says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator.switchboard import Switchboard
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_coordinator import Committed, Generation
from recycle_plugin.core.messages.typed import Unreadable
from recycle_plugin.core.vocabulary.roster import WorkerId

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.simulated_lines import SimulatedEnd


class OneHistory:
    """What all ends of connections have heard. ``say`` records what is wrong."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._heard: dict[str, list[bytes]] = {}  # by connection
        self._told: dict[int, Generation] = {}  # without addresses
        self._where: dict[WorkerId, str] = {}
        self._committed = 0
        self.board: Switchboard | None = None  # the present coordinator's state

    def heard(self, end: SimulatedEnd, number: int, message: object, whole: object) -> None:
        """Check ``message``, ``whole`` for the end, which hears it as the ``number``-th that counts."""
        frame, heard = encode(message), self._heard.setdefault(end.token, [])
        if number != len(heard) + 1:
            self._say(f"{self._who(end)} hears its message {number} behind {len(heard)}")
        heard.append(frame)
        if isinstance(message, Committed):
            self._committed = max(self._committed, message.step)
        if isinstance(whole, Generation):
            self._compare_members(end, whole)
        if isinstance(whole, Unreadable):
            self._say(f"{self._who(end)} can't read {whole}")
        if self.board is not None:
            self._compare(end, self.board, len(heard) - 1)

    def _compare_members(self, end: SimulatedEnd, whole: Generation) -> None:
        """Check that all hear of the same members, and of one place for each, if they hear of its place."""
        told = replace(whole, members=tuple(replace(member, address="") for member in whole.members))
        if self._told.setdefault(whole.number, told) != told:
            self._say(f"{self._who(end)} hears of another generation {whole.number} than others")
        for member in whole.members:
            if member.address and self._where.setdefault(member.worker, member.address) != member.address:
                self._say(f"{self._who(end)} hears that {member} is at {member.address}, unlike others")

    def leads(self, board: Switchboard, ends: Mapping[tuple[str, int], SimulatedEnd]) -> None:
        """Check that the new coordinator, which knows what ``board`` does, knows all that was heard."""
        self.board = board
        if board.membership.committed < self._committed:
            self._say(
                f"step {self._committed} is committed for some, and who coordinates knows of none behind "
                f"{board.membership.committed}"
            )
        for end in ends.values():
            if not end.dead:
                for index in range(len(self._heard.get(end.token, ()))):
                    self._compare(end, board, index)

    def _compare(self, end: SimulatedEnd, board: Switchboard, index: int) -> None:
        line = board.lines.get(end.line)
        if line is None or line.hello.token != end.token:
            return
        kept, frame = line.kept, self._heard[end.token][index]
        if index >= kept.count:
            self._say(f"{self._who(end)} hears what who coordinates has not said: {frame[10:60]!r}")
        elif (said := kept.since(index)[:1]) and index >= kept.dropped and said[0] != frame:
            self._say(f"{self._who(end)} hears other than who coordinates says: {frame[10:60]!r}")

    def took(self, end: SimulatedEnd | None, number: int, message: object) -> None:
        """Check that the coordinator takes in, as message ``number`` of a connection, what its end has said then."""
        if end is None:
            return
        frame = encode(message)
        if number > len(end.said) or end.said[number - 1] != frame:
            self._say(f"message {number} of {self._who(end)} is taken for another: {frame[10:60]!r}")

    @staticmethod
    def _who(end: SimulatedEnd) -> str:
        return f"the {end.hello.role} of rank {end.hello.rank}"
