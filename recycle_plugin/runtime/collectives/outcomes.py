"""Results of the script's last collectives, kept for members whom a loss has cut off from them.

A loss may find some members through with a collective, and others in it, or before it.  Those that are through don't
come back: they go on to the next one, or to a training step.  If the others simply tried again, they would meet them
there, and take one sum for another.  So collectives are counted, and with each membership everybody says which of each
group are behind it, and what the last ones gave, which for most is the same for all members; who was cut off takes it
from there.

Collectives are counted in sequences: one for each group, and one for each channel from one member to another.  A
sequence goes by its name, here ``line``.  Who comes into a job that trains counts on where the others are when they let
it in, which all do at the same place of the script, before the same step.
"""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.runtime.collectives.gloo import clone
from recycle_plugin.runtime.collectives.startup import Startup
from recycle_plugin.runtime.control.session import Session

LARGEST = 1 << 20  # bytes of what is kept of one collective
KEPT, KEPT_BYTES = 64, 4 * LARGEST  # of each line: with operations in flight some members may be ahead by many
Values = list[torch.Tensor]


class Follower(Protocol):
    """A group that is told of membership changes."""

    def cut(self) -> None:
        """There is another membership: leave behind what is not over, and add what is over to the outcomes."""

    def go_on(self) -> None:
        """This worker has told the others what is behind it: resume what survives the change."""


@dataclass
class Said:
    """What one worker has behind it of one sequence of collectives: the first ``count``, and those numbered in
    ``after``.

    ``values`` has what the last ones gave to all; None where each member got something else, or it is too much to keep.
    ``begun``: how many it has begun, as far as it has said so.
    """

    count: int = 0
    after: set[int] = field(default_factory=set)
    values: dict[int, Values | None] = field(default_factory=dict)
    begun: int = 0
    _bytes: int = 0

    @property
    def end(self) -> int:
        """The number after the last collective that is over."""
        return max(self.after, default=self.count - 1) + 1

    @property
    def under_way(self) -> int:
        """How many it has begun that were not over when it said so."""
        return self.begun - self.count - len(self.after)

    def is_over(self, number: int) -> bool:
        """Whether the collective with this number is behind the worker."""
        return number < self.count or number in self.after

    def add(self, number: int, values: Values | None) -> None:
        """Count the collective ``number`` as over, and keep ``values`` while they are small (1 MiB each, 4 MiB in
        all).
        """
        self.values[number] = values if _bytes(values) <= LARGEST else None
        self._bytes += _bytes(self.values[number])
        self.after.add(number)
        while self.count in self.after:
            self.after.remove(self.count)
            self.count += 1
        while len(self.values) > KEPT or self._bytes > KEPT_BYTES:
            self._bytes -= _bytes(self.values.pop(next(iter(self.values))))  # the first that was over


class Outcomes:
    """The outcomes of one worker's collectives, in all its groups and channels."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._store: dist.Store | None = None
        self._numbers: dict[str, int] = {}
        self._own: dict[str, Said] = {}
        self._lock = threading.Lock()
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._let_in: Generation | None = None  # as a newcomer
        self._late = False  # a member whose script has not come to the others' step yet
        self._counted_on: set[str] = set()  # groups
        self.startup = session.startup = Startup(session)
        session.when_adopted = self._tell

    def barrier_at(self, store: dist.Store) -> None:
        """Exchange outcomes at ``store``, that of the first group, which every worker is in; later calls change
        nothing.
        """
        self._store = self._store or dist.PrefixStore("outcomes", store)
        self.startup.meet(store)

    def follow(self, group: Follower) -> None:
        """Tell ``group`` of membership changes from now on, as long as it exists."""
        self._followers.add(group)

    def next_number(self, line: str) -> int:
        """The number that the next collective of ``line`` will get from :meth:`take_number`."""
        return self._numbers.get(line, 0)

    def take_number(self, line: str) -> int:
        """Number the next collective of ``line``, from 0 on."""
        number = self.next_number(line)
        self._numbers[line] = number + 1
        return number

    def add(self, line: str, number: int, values: Values | None) -> None:
        """Record that a collective is behind this worker, and gave ``values`` to all; None: something else to each."""
        with self._lock:
            self._own.setdefault(line, Said()).add(number, values)

    def of_others(self, generation: int, ranks: Sequence[int], group: str) -> dict[int, dict[str, Said]]:
        """What the workers ``ranks`` have said, in membership ``generation``, about the sequences of ``group``: by
        rank, by name.

        Blocks until all have said so; RuntimeError where the store is gone.  One message a rank is read.
        """
        assert self._store is not None, "no group has been made"
        store = clone(self._store)  # who is left waiting keeps the connection
        told = store.multi_get([_key(generation, rank) for rank in ranks])
        lines = {rank: torch.load(io.BytesIO(bytes(text)), weights_only=True) for rank, text in zip(ranks, told)}
        return {
            rank: {
                line: Said(count, set(after), values, begun)
                for line, (count, after, values, begun) in of_rank.items()
                if f"{line}\n".startswith(lines_of(group))
            }
            for rank, of_rank in lines.items()
        }

    # --- of a newcomer -----------------------------------------------------------------------------

    def count_on(self, group: str, ranks: Sequence[int]) -> Callable[[], None] | None:
        """What a newcomer has to do before it counts collectives of ``group``, whose live members are ``ranks``; None
        where it is done, or nobody has to.

        It blocks until the others have said where they are, and raises as :meth:`of_others` does.
        """
        if self._let_in is None or group in self._counted_on:
            return None
        stayed = (self._let_in.roster.workers & self._session.roster.workers) - {self._session.worker}
        others = sorted({worker.rank for worker in stayed} & {*ranks})
        number = self._let_in.number
        return lambda: self._count_from(group, self.of_others(number, others, group) if others else {})

    @property
    def lets_in(self) -> bool:
        """Whether the membership in force is that which has let this worker in, as a newcomer."""
        return self._let_in is not None and self._let_in is self._session.generation

    def _count_from(self, group: str, said: dict[int, dict[str, Said]]) -> None:
        with self._lock:
            for line, each in (one for lines in said.values() for one in lines.items()):
                begun = max(each.begun, self._numbers.get(line, 0))
                self._numbers[line], self._own[line] = begun, Said(begun)
            self._counted_on.add(group)

    def _tell(self) -> None:
        session = self._session
        if self.startup.outside or (session.pushed and self._late):
            if self.startup.outside:
                self.startup.join()
            self._let_in = session.generation
            own = session.roster.member(session.worker)
            self._late = own is not None and own.seat not in session.roster.working
        followers = list(self._followers)
        for group in followers:
            group.cut()
        if self._store is not None:
            with self._lock:
                text = io.BytesIO()
                torch.save(
                    {
                        line: (said.count, sorted(said.after), said.values, self._numbers.get(line, 0))
                        for line, said in self._all()
                    },
                    text,
                )
            bindings: Any = self._store  # which take bytes, whatever torch's stubs say
            bindings.set(_key(self._session.number, self._session.rank), text.getvalue())
        for group in followers:
            group.go_on()

    def _all(self) -> Iterator[tuple[str, Said]]:
        """What there is to say of each sequence, also where nothing of it is over."""
        for line in self._own.keys() | self._numbers.keys():
            yield line, self._own.get(line, Said())


def lines_of(group: str) -> str:
    """The prefix of the names of a group's channels."""
    return f"{group}\n"


def _bytes(values: Values | None) -> int:
    return sum(value.numel() * value.element_size() for value in values or ())


def _key(generation: int, rank: int) -> str:
    return f"{generation} {rank}"
