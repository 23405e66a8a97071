"""What the script's last collectives have come to, for members whom a loss has cut off from the result.

A loss may find some members through with a collective, and others in it, or before it.  Those that are through don't
come back: they go on to the next one, or to a training step.  If the others simply tried again, they would meet them
there, and take one sum for another.  So collectives are counted, and with each membership everybody says which of each
group are behind it, and what the last ones gave, which for most is the same for all members; who was cut off takes it
from there.
"""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from recycle_plugin.runtime.collectives.gloo import clone
from recycle_plugin.runtime.control.session import Session

LARGEST = 1 << 20  # bytes of what is kept of one collective
KEPT, KEPT_BYTES = 64, 4 * LARGEST  # of each line: with operations in flight some members may be ahead by many
Values = list[torch.Tensor]


class Follower(Protocol):
    """A group."""

    def cut(self) -> None:
        """There is another membership: what is not over is left behind, and what is over is added to the outcomes."""

    def go_on(self) -> None:
        """This worker has told the others."""


@dataclass
class Said:
    """Of one line, which is a group or a way from one member to another, by one worker: the first ``count`` collectives
    are behind it, and those of ``after``.

    ``values``: of the last ones what they gave to all; None: to each something else, or too much to keep.
    """

    count: int = 0
    after: set[int] = field(default_factory=set)
    values: dict[int, Values | None] = field(default_factory=dict)
    _bytes: int = 0

    @property
    def end(self) -> int:
        """After the last one that is over."""
        return max(self.after, default=self.count - 1) + 1

    def is_over(self, number: int) -> bool:
        return number < self.count or number in self.after

    def add(self, number: int, values: Values | None) -> None:
        self.values[number] = values if _bytes(values) <= LARGEST else None
        self._bytes += _bytes(self.values[number])
        self.after.add(number)
        while self.count in self.after:
            self.after.remove(self.count)
            self.count += 1
        while len(self.values) > KEPT or self._bytes > KEPT_BYTES:
            self._bytes -= _bytes(self.values.pop(next(iter(self.values))))  # the first that was over


class Outcomes:
    """Of the worker of ``session``, of all its groups' lines by name."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._store: dist.Store | None = None
        self._numbers: dict[str, int] = {}
        self._own: dict[str, Said] = {}
        self._lock = threading.Lock()
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        session.when_adopted = self._tell

    def meet_at(self, store: dist.Store) -> None:
        """Of the first group, which everybody is in."""
        self._store = self._store or dist.PrefixStore("outcomes", store)

    def follow(self, group: Follower) -> None:
        self._followers.add(group)

    def next_number(self, line: str) -> int:
        """Of the collective that is asked for next on ``line``, which :meth:`take_number` gives it."""
        return self._numbers.get(line, 0)

    def take_number(self, line: str) -> int:
        number = self.next_number(line)
        self._numbers[line] = number + 1
        return number

    def add(self, line: str, number: int, values: Values | None) -> None:
        """That collective is behind this worker, and gave ``values`` to all; None: to each something else."""
        with self._lock:
            self._own.setdefault(line, Said()).add(number, values)

    def of_others(self, generation: int, ranks: Sequence[int], group: str) -> dict[int, dict[str, Said]]:
        """What those of ``ranks`` have said with that membership of the lines of ``group``; blocks until all have."""
        assert self._store is not None, "no group has been made"
        store = clone(self._store)  # who is left waiting keeps the connection
        told = store.multi_get([_key(generation, rank) for rank in ranks])
        lines = {rank: torch.load(io.BytesIO(bytes(text)), weights_only=True) for rank, text in zip(ranks, told)}
        return {
            rank: {
                line: Said(count, set(after), values)
                for line, (count, after, values) in of_rank.items()
                if f"{line}\n".startswith(lines_of(group))
            }
            for rank, of_rank in lines.items()
        }

    def _tell(self) -> None:
        followers = list(self._followers)
        for group in followers:
            group.cut()
        if self._store is not None:
            with self._lock:
                text = io.BytesIO()
                torch.save(
                    {line: (said.count, sorted(said.after), said.values) for line, said in self._own.items()}, text
                )
            bindings: Any = self._store  # which take bytes, whatever torch's stubs say
            bindings.set(_key(self._session.number, self._session.rank), text.getvalue())
        for group in followers:
            group.go_on()


def lines_of(group: str) -> str:
    """What the names of its ways begin with."""
    return f"{group}\n"


def _bytes(values: Values | None) -> int:
    return sum(value.numel() * value.element_size() for value in values or ())


def _key(generation: int, rank: int) -> str:
    return f"{generation} {rank}"
