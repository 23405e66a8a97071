"""Barriers: what all live workers do together outside a step, agreed on through the coordinator.

Saving and loading a checkpoint and an evaluation must be done by all or by nobody, also where somebody dies in them.  A
collective can't tell: it may be through on some workers and broken on others.  The coordinator's word can, because it
reaches all in the same order: either everybody had arrived at a barrier, which has a *name*, before the membership
changed, and all hear of that first, or nobody hears of it and all hear of the change.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from recycle_plugin.core.vocabulary.roster import WorkerId


class Barriers:
    """The barriers of the membership in force, and who has arrived at each."""

    def __init__(self) -> None:
        self._generation = -1
        self._arrived: dict[str, dict[WorkerId, dict[str, Any]]] = {}

    def arrive(
        self,
        worker: WorkerId,
        generation: int,
        place: str,
        values: dict[str, Any],
        members: AbstractSet[WorkerId],
        enough: bool = True,
    ) -> dict[str, Any] | None:
        """Notes that ``worker`` has arrived at the barrier named ``place``.  Returns what all have brought along, if
        with this one every one of ``members`` is there, and they are ``enough`` to do anything; else None.

        ``generation`` is in force: whoever has arrived anywhere in an earlier one arrives once more.  Nobody is at two
        places: who arrives at another one is at that.  Costs time in proportion to the members, and to the places at
        which some wait.
        """
        if generation != self._generation:
            self._generation = generation
            self._arrived.clear()
        for other in [other for other, there in self._arrived.items() if other != place and worker in there]:
            del self._arrived[other][worker]
            if not self._arrived[other]:
                del self._arrived[other]
        here = self._arrived.setdefault(place, {})
        here[worker] = values
        if not enough or members - here.keys():
            return None
        del self._arrived[place]
        return {key: value for worker in sorted(here) for key, value in here[worker].items()}

    def waiting(self, generation: int) -> bool:
        """Whether some are at a barrier in ``generation``, and not all yet."""
        return generation == self._generation and bool(self._arrived)
