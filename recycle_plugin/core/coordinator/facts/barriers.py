"""Barriers: what all live workers do together outside a step, agreed on through the coordinator.

Saving or loading a checkpoint and an evaluation must be done by all or by nobody, also if a worker dies meanwhile. A
collective can't tell: it may be complete on some workers and broken on others. The coordinator's messages can, because
they reach all in the same order. Either all had arrived at the named barrier before the membership changed, and all
hear of that first. Or nobody hears of it, and all hear of the change.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.roster import WorkerId


class Barriers:
    """The barriers of the membership in force, and who has arrived at each."""

    def __init__(self) -> None:
        self._generation = -1
        self._arrived: dict[Barrier, dict[WorkerId, dict[str, Any]]] = {}

    def arrive(
        self,
        worker: WorkerId,
        generation: int,
        barrier: Barrier,
        values: dict[str, Any],
        members: AbstractSet[WorkerId],
        enough: bool = True,
    ) -> dict[str, Any] | None:
        """Record that ``worker`` has arrived at ``barrier``. If all ``members`` are there now and ``enough``
        holds, return the merged values that all have brought; else None.

        ``generation`` is in force: arrivals in an earlier one are dropped. A worker waits at one barrier at a time, and
        has WRITTEN one checkpoint beside its training: arriving at another of that kind removes it from the first.
        Costs time in proportion to the barriers with somebody waiting; the last arrival also to the members.
        """
        if generation != self._generation:
            self._generation = generation
            self._arrived.clear()
        beside = barrier.meets is Meets.WRITTEN
        others = [one for one in self._arrived if one != barrier and (one.meets is Meets.WRITTEN) == beside]
        for other in [one for one in others if worker in self._arrived[one]]:
            del self._arrived[other][worker]
            if not self._arrived[other]:
                del self._arrived[other]
        here = self._arrived.setdefault(barrier, {})
        here[worker] = values
        if not enough or len(here) < len(members) or members - here.keys():
            return None
        del self._arrived[barrier]
        return {key: value for worker in sorted(here) for key, value in here[worker].items()}

    def waiting(self, generation: int) -> bool:
        """Return whether some, but not all, have arrived at a barrier in ``generation``."""
        return generation == self._generation and bool(self._arrived)
