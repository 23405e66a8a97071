"""What the script's last collectives have come to, for members whom a loss has cut off from the result.

A loss may find some members through with a collective, and others in it.  Those that are through don't come back: they go on to the
next one, or to a training step.  If the others simply tried again, they would meet them there, and take one sum for another.  So with
each membership everybody says how many collectives of each group are behind it, and what the last ones gave, which for most is the same for
all members; who was interrupted takes it from there.
"""

from __future__ import annotations

import io
from collections import deque
from typing import Sequence

import torch
import torch.distributed as dist

from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.session import Session

KEPT = 4  # of each group: in a broadcast the first may be ahead by more than one
LARGEST = 1 << 20  # bytes of what is kept
Values = list[torch.Tensor]


class Outcomes:
    """Of the worker of ``session``: of each group, by name, and of each way from one member to another."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._store: dist.Store | None = None
        self._counts: dict[str, int] = {}
        self._last: dict[str, deque[Values | None]] = {}
        session.when_adopted = self._tell

    def meet_at(self, store: dist.Store) -> None:
        """Of the first group, which everybody is in."""
        self._store = self._store or dist.PrefixStore("outcomes", store)

    def add(self, group: str, values: Values | None) -> None:
        """One more collective of ``group`` is behind this worker, and gave ``values`` to all; None: to each something else."""
        self._counts[group] = self._counts.get(group, 0) + 1
        small = values is not None and sum(value.numel() * value.element_size() for value in values) <= LARGEST
        self._last.setdefault(group, deque(maxlen=KEPT)).append(values if small else None)

    def of_next(self, group: str, what: str, ranks: Sequence[int]) -> Values | None:
        """What the collective ``what`` that is next here gave to those of ``ranks``, all live, who are through with it; None where nobody is.

        Interruptible.  Raises RecycleError where they are, and can't give it.
        """
        keys, count = [self._key(rank) for rank in ranks], self._counts.get(group, 0)
        store = self._store.clone()  # who is left waiting keeps the connection
        told = self._session.run_interruptibly(f"what {what} has come to elsewhere", lambda: store.multi_get(keys))
        said = {rank: torch.load(io.BytesIO(bytes(text)), weights_only=True).get(group, (0, [])) for rank, text in zip(ranks, told)}
        ahead = {rank: (theirs - count, last) for rank, (theirs, last) in said.items() if theirs > count}
        for by, last in ahead.values():
            if by <= len(last) and last[-by] is not None:
                return last[-by]
        if ahead:
            raise RecycleError(f"{what} was over on rank {min(ahead)} and not on rank {self._session.rank} when a worker was lost, and its result, of each member's own or of more "
                               f"than {LARGEST >> 20} MiB, can't be had again: go on from the last checkpoint")  # fmt: skip
        return None

    def _key(self, rank: int) -> str:
        return f"{self._session.number} {rank}"

    def _tell(self) -> None:
        if self._store is not None:
            text = io.BytesIO()
            torch.save({group: (count, list(self._last[group])) for group, count in self._counts.items()}, text)
            self._store.set(self._key(self._session.rank), text.getvalue())
