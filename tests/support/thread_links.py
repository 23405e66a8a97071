"""Links of two ends in one process (recycle_plugin/runtime/collectives/link.py), ruled by the test: it says when
what is begun at both ends is over, and what fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from recycle_plugin.runtime.collectives.link import Broken, Handle, Operation, done, unheard
from recycle_plugin.runtime.control.session import Session


class Links:
    """All links of a test.  ``held``: nothing that is begun is over before :meth:`let`.

    ``fails``: of a link, by its ranks, and of the rank that begins there the numbers of operations that can't be
    launched.
    """

    def __init__(self) -> None:
        self.held, self.fails = False, set[tuple[tuple[int, ...], int, int]]()
        self.lock = threading.RLock()
        self.made: dict[tuple[int, tuple[int, ...]], dict[int, ThreadLink]] = {}

    def open(
        self,
        session: Session,
        generation: int,
        called: str,
        ranks: Sequence[int],
        timeout: timedelta,
        where: torch.device,
    ) -> ThreadLink:
        ends = self.made.setdefault((generation, tuple(ranks)), {})
        ends[session.rank] = ThreadLink(self, ends, session.rank, tuple(ranks), generation)
        return ends[session.rank]

    def end(self, ranks: tuple[int, ...], rank: int, generation: int = 1) -> ThreadLink:
        return self.made[generation, ranks][rank]

    def let(self) -> None:
        self.held = False
        for ends in list(self.made.values()):
            match(self, ends)


class ThreadLink:
    """The end of ``rank``; what it ``begun`` is over once the other has begun it too."""

    def __init__(self, links: Links, ends: dict[int, ThreadLink], rank: int, ranks: tuple[int, ...], generation: int):
        self._links, self._ends, self._rank, self._ranks, self.generation = links, ends, rank, ranks, generation
        self._connecting: Handle | None = None
        self.begun: list[tuple[Operation, Handle]] = []
        self.end: Broken | None = None
        self.deaf = False  # what it begins is over elsewhere, and not here

    @property
    def connected(self) -> bool:
        return self.end is None and len(self._ends) == 2 and all(each._connecting for each in self._ends.values())

    def connect(self) -> Handle:
        with self._links.lock:
            self._connecting = self._connecting or Handle(f"the connections among {self._ranks}")
            if self.end is not None:
                self._connecting.end(self.end)
            if self.connected:
                for each in self._ends.values():
                    each._connecting.end()
        return self._connecting

    def start(self, operation: Operation, launched: Callable[[], object] = unheard) -> Handle:
        handle = Handle(f"{type(operation).__name__} among {self._ranks}")
        with self._links.lock:
            if (self._ranks, self._rank, len(self.begun)) in self._links.fails:
                self.abort()
            if self.end is not None:
                handle.end(self.end)
                return handle
            self.begun.append((operation, handle))
        launched()
        match(self._links, self._ends)
        return handle

    def abort(self) -> Handle:
        """End it here; the other end is stuck in what is not over."""
        with self._links.lock:
            self.end = self.end or Broken(f"the connections among {self._ranks} were given up")
            for _, handle in self.begun:
                handle.end(self.end)
            if self._connecting is not None:
                self._connecting.end(self.end)
        return done()


def match(links: Links, ends: dict[int, ThreadLink]) -> None:
    with links.lock:
        both = list(ends.values())
        if links.held or len(both) < 2 or any(each.end is not None for each in both):
            return
        (sender, *_), ranks = both, both[0]._ranks
        by_rank = {each._rank: each for each in both}
        for number in range(min(len(sender.begun), len(both[1].begun))):
            (give, given), (take, taken) = (by_rank[rank].begun[number] for rank in ranks)
            if given.poll():
                continue
            for target, source in zip(take.tensors, give.tensors, strict=True):
                target.copy_(source)
            given.end()
            if not by_rank[ranks[1]].deaf:
                taken.end()
