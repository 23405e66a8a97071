"""Results of the script's last collectives, kept for members that a loss has cut off from them.

A loss may find some members through with a collective, and others in it or before it. The first do not come back: they
go on to the next collective, or to a step. If the others simply tried again, they would meet them there, and take one
sum for another. So collectives are numbered. In each membership every worker posts which ones of each group are behind
it, and which results it has (core/coordinator/facts/boards.py); most results are the same for all members. A worker
that was cut off asks another for its result. All of it goes over the connections to the coordinator: a forged result
would be a wrong number.

A worker posts at most 4 MiB of results in one membership, and about 30 bytes for each sequence, for at most MOST_LINES
of those used last. If a collective of all was under way, each member reads all posts: that grows with the square of
their number.

There is one sequence of collectives per group, and one per channel between two members; ``line`` is its name here. A
newcomer continues the numbers that the others have when they let it in. They all do so at the same place of the script,
before the same step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from recycle_plugin.core.messages.encoding import HEAD, Language
from recycle_plugin.core.messages.from_workers import WantResult
from recycle_plugin.core.worker.whereabouts import Reading, Whereabouts
from recycle_plugin.errors import DeviceStuck, RecycleError, WaitTimeout
from recycle_plugin.runtime.collectives.link import Handle
from recycle_plugin.runtime.collectives.startup import Startup
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import COPY_S, Copy
from recycle_plugin.runtime.state.packing import packed, unpacked

LARGEST = 1 << 20  # bytes kept of one collective
KEPT, KEPT_BYTES = 64, 4 * LARGEST  # per sequence: with operations in flight some members may be many ahead
ALL_BYTES = 16 * KEPT_BYTES  # of all sequences: scripts may use a new group, or a new tag, in every step
MOST_LINES = 10_000  # sequences that a worker posts
Values = list[torch.Tensor]


@dataclass(frozen=True)
class LineWords:
    """A worker's word on one sequence, see :class:`Said`. ``kept``: (first, end) ranges of the results that it has."""

    count: int
    after: tuple[int, ...]
    begun: int
    kept: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Words:
    """A worker's word on its sequences, by name."""

    lines: dict[str, LineWords]


ABORT_S = 60.0  # for a stuck device; each link names its own wait earlier
LANGUAGE = Language((Words,))


class Follower(Protocol):
    """A group that is told of membership changes."""

    def give_up_links(self) -> None:
        """End operations on accelerators: another membership is about to come. Does not block."""

    def cut(self) -> list[Handle]:
        """Leave unfinished operations, and add finished ones to the outcomes: the membership has changed. Until the
        returned handles are over, devices may be stuck.
        """

    def go_on(self) -> None:
        """Resume the calls that survive the change: this worker has posted which calls it has finished."""


@dataclass
class Said:
    """One worker's progress in one sequence of collectives: it has finished the first ``count``, and those in
    ``after``.

    ``begun``: how many it has started, according to its post. ``values``: this worker's last results, on their way to
    host memory. None if the result differs by member, or is too large. Another worker's entry has ``kept`` instead: the
    (first, end) ranges of its results.
    """

    count: int = 0
    after: set[int] = field(default_factory=set)
    values: dict[int, Copy | None] = field(default_factory=dict)
    begun: int = 0
    kept: tuple[tuple[int, int], ...] = ()
    nbytes: int = 0

    @property
    def end(self) -> int:
        """The number after the last collective that is over."""
        return max(self.after, default=self.count - 1) + 1

    @property
    def under_way(self) -> int:
        """How many it had started that were not over when it posted."""
        return self.begun - self.count - len(self.after)

    def is_over(self, number: int) -> bool:
        """Whether the collective with this number is behind the worker."""
        return number < self.count or number in self.after

    def has(self, number: int) -> bool:
        """Whether the worker that posted this has the result of the collective with this number."""
        return any(first <= number < end for first, end in self.kept)

    def words(self, begun: int) -> LineWords:
        """Return the post for other workers; ``begun``: how many collectives this worker has started."""
        kept: list[tuple[int, int]] = []
        for number in sorted(number for number, values in self.values.items() if values is not None):
            if kept and kept[-1][1] == number:
                kept[-1] = kept[-1][0], number + 1
            else:
                kept.append((number, number + 1))
        return LineWords(self.count, tuple(sorted(self.after)), begun, tuple(kept))

    def add(self, number: int, values: Values | None) -> None:
        """Count collective ``number`` as over, and keep small ``values`` (1 MiB each, 4 MiB in all). They are read in
        the calling thread's order on their device; nobody may change them.
        """
        self.values[number] = _kept(values)
        self.nbytes += _bytes(self.values[number])
        self.after.add(number)
        while self.count in self.after:
            self.after.remove(self.count)
            self.count += 1
        while len(self.values) > KEPT or self.nbytes > KEPT_BYTES:
            self.nbytes -= _bytes(self.values.pop(next(iter(self.values))))  # the first that was over

    def drop_values(self) -> None:
        self.values, self.nbytes = {}, 0


class Outcomes:
    """The outcomes of one worker's collectives, in all its groups and channels."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._numbers: dict[str, int] = {}
        self._own: dict[str, Said] = {}
        self._weights: dict[str, int] = {}  # bytes kept of the sequences that have any, the most recently used last
        self._kept_bytes = 0  # their sum
        self._lock = threading.Lock()
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self.whereabouts = Whereabouts(session.boards)
        self._offered: dict[str, dict[int, Copy | None]] = {}  # per sequence, the results at the last post
        self._room = KEPT_BYTES  # bytes left for results that others ask for, in this generation
        self._asked: list[str] = []  # boards of awaited results
        self._counted_on: set[str] = set()  # groups
        self.startup = session.hooks.startup = Startup(session)
        session.when_adopted, session.when_regrouping = self._tell, self._give_up_links
        session.wanted, session.follow = self._give, self.follow

    def follow(self, group: Follower) -> None:
        """Tell ``group`` of membership changes from now on, for as long as it exists."""
        self._followers.add(group)

    def next_number(self, line: str) -> int:
        """Return the number that :meth:`take_number` will give the next collective of ``line``."""
        return self._numbers.get(line, 0)

    def take_number(self, line: str) -> int:
        """Number the next collective of ``line``, from 0 on."""
        number = self._numbers.pop(line, 0)
        self._numbers[line] = number + 1  # moves it to the end: the most recently used
        return number

    def add(self, line: str, number: int, values: Values | None) -> None:
        """Record that a collective is behind this worker. ``values``: its result if all members have the same."""
        with self._lock:
            said = self._own.setdefault(line, Said())
            said.add(number, values)
            self._weigh(line, said.nbytes)
            while self._kept_bytes > ALL_BYTES:
                oldest = next(iter(self._weights))
                self._own[oldest].drop_values()
                self._weigh(oldest, 0)

    def _weigh(self, line: str, nbytes: int) -> None:
        self._kept_bytes += nbytes - self._weights.pop(line, 0)
        if nbytes:
            self._weights[line] = nbytes

    def of_others(self, generation: int, ranks: Sequence[int], group: str) -> dict[int, dict[str, Said]]:
        """Return {rank: {name: word}} of what ``ranks`` have posted in ``generation`` about the sequences of ``group``.
        Blocks until all have posted. Raises WaitTimeout past the deadline, RecycleError for an unreadable post.
        """
        session, reading = self._session, self.whereabouts.read(generation)
        what = f"the other members' positions in the collectives of {group}"
        in_force = session.view.number
        session.boards.wait(what, reading, ranks, session.waiting.timeout_s, lambda: session.view.number == in_force)
        return {
            rank: {
                line: Said(words.count, set(words.after), begun=words.begun, kept=words.kept)
                for line, words in _read(rank, reading.values[rank]).lines.items()
                if f"{line}\n".startswith(lines_of(group))
            }
            for rank in ranks
        }

    def ask(self, holder: int, line: str, number: int) -> Reading:
        """Ask the worker of rank ``holder``, which has it, for the result of a collective."""
        session, board = self._session, _board(line, number, self._session.view.number)
        self._asked.append(board)
        reading = session.boards.read(board, (holder,), session.view.number)
        session.send(WantResult(session.rank, session.view.number, holder, line, number))
        return reading

    @staticmethod
    def result(holder: int, reading: Reading) -> Values | None:
        """Return the result that was asked for, once it has come; None if it is no longer available."""
        return unpacked(reading.values[holder]) if reading.values[holder] else None

    def _give(self, wanted: WantResult) -> None:
        """Post a result that another worker asks for, if there is room for it."""
        with self._lock:
            offered = self._offered.get(wanted.line, {})
            if wanted.generation != self._session.view.number or wanted.number not in offered:
                return  # no longer available, or posted already
            values = offered.pop(wanted.number)
            fits = values is not None and values.nbytes <= self._room
            self._room -= _bytes(values) if fits else 0
            given = values if fits else None
        if given is None or given.poll():
            self._post(wanted, given)
        else:  # do not block this thread, which hears the coordinator
            name = "recycle: a result on its way to the host"
            threading.Thread(target=self._post, args=(wanted, given), name=name, daemon=True).start()

    def _post(self, wanted: WantResult, given: Copy | None) -> None:
        """Post the result; an empty text if there is none, or its copy to the host has failed."""
        text = b""
        try:
            text = packed([*given.wait(COPY_S)]) if given is not None else b""
        except Exception as error:  # of the device; the asking worker is told that there is no result
            self._session.note("warning", f"a result of {wanted.line}, which others need, can't be read: {error}")
        self._session.boards.post(_board(wanted.line, wanted.number, wanted.generation), text, wanted.generation)

    # --- of a newcomer -----------------------------------------------------------------------------

    def count_on(self, group: str, ranks: Sequence[int]) -> Callable[[], None] | None:
        """Return what a newcomer has to run before it numbers collectives of ``group``, with live members ``ranks``;
        None if nothing.

        The returned function blocks until the others have posted their positions, and raises as :meth:`of_others`.
        """
        let_in = self.whereabouts.let_in
        if let_in is None or group in self._counted_on:
            return None
        stayed = (let_in.roster.workers & self._session.view.roster.workers) - {self._session.view.worker}
        others = sorted({worker.rank for worker in stayed} & {*ranks})
        number = let_in.number
        return lambda: self._count_from(group, self.of_others(number, others, group) if others else {})

    @property
    def lets_in(self) -> bool:
        """Whether the membership in force is the one that let this worker in as a newcomer."""
        let_in = self.whereabouts.let_in
        return let_in is not None and let_in is self._session.view.generation

    def _count_from(self, group: str, said: dict[int, dict[str, Said]]) -> None:
        with self._lock:
            for line, each in (one for lines in said.values() for one in lines.items()):
                begun = max(each.begun, self._numbers.get(line, 0))
                self._numbers[line], self._own[line] = begun, Said(begun)
                self._weigh(line, 0)
            self._counted_on.add(group)

    def _give_up_links(self) -> None:
        for group in list(self._followers):
            group.give_up_links()

    def _tell(self) -> None:
        session, generation = self._session, self._session.view.generation
        assert generation is not None, "it was adopted just now"
        if lets_in := self.startup.outside:
            self.startup.join()
        followers = list(self._followers)
        _await_ends([end for group in followers for end in group.cut()])
        while self._asked:
            session.boards.forget(self._asked.pop())
        self.whereabouts.adopt(generation, self._words(), lets_in, session.view.reported_first)
        for group in followers:
            group.go_on()

    def _words(self) -> bytes:
        """Return this worker's post. From now on it gives the results that it has by now to those that ask."""
        with self._lock:
            said = {line: self._own.get(line, Said()) for line in [*self._numbers][-MOST_LINES:]}
            self._offered, self._room = {line: dict(each.values) for line, each in said.items()}, KEPT_BYTES
            return LANGUAGE.encode(Words({line: each.words(self._numbers.get(line, 0)) for line, each in said.items()}))


def _await_ends(ends: Sequence[Handle]) -> None:
    """Return once no device is stuck; raises DeviceStuck past the deadline."""
    for end in ends:
        try:
            end.wait(ABORT_S)
        except WaitTimeout as error:
            raise DeviceStuck(f"{error}: this worker gives itself up") from None


def lines_of(group: str) -> str:
    """Return the prefix of the names of a group's channels."""
    return f"{group}\n"


def _kept(values: Values | None) -> Copy | None:
    """Start copying ``values`` to host memory if they are dense, and small enough to keep."""
    if values is None or any(value.layout is not torch.strided for value in values):
        return None
    if sum(value.nbytes for value in values) > LARGEST:
        return None
    where = values[0].device if values else HOST
    return device_of(where).to_host(values, "a collective's result", shared=True)


def _bytes(kept: Copy | None) -> int:
    return 0 if kept is None else kept.nbytes


def _board(line: str, number: int, generation: int) -> str:
    return f"the result of number {number} of {line}, in generation {generation}"


def _read(rank: int, text: bytes) -> Words:
    words = LANGUAGE.message(text[HEAD.size :])
    if not isinstance(words, Words):
        raise RecycleError(f"what rank {rank} says of its collectives can't be read: {words}")
    return words
