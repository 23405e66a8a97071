"""Numbers of a step that all workers contribute to and all need: losses by micro-batch, squared norms by stage.

What is complete is told to all *once*, and is the step's for good.  A stage whose sum is made again after a failure may find another last
digit of its share, and somebody may have stepped with the norm that was told before: a second one would clip replicas by two factors.
Everybody has heard of the first before it hears of any later change of the membership (one connection, in order), and keeps it (core/line.py).

Nothing here belongs to a membership: a share, or a loss, is of the step's micro-batches, whoever computed it.  So what is incomplete stays
good over failures too, and it does not matter when it was sent; only what is *void* (core/verdict.py) counts no more.
"""

from __future__ import annotations

from typing import Iterator

from recycle_plugin.core.protocol import Contribution

LOSS = "loss"  # by micro-batch
NORM = "norm"  # squared, by stage; workers wait for it


class Contributions:
    """What has come of each (step, name)."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], dict] = {}
        self._told: set[tuple[int, str]] = set()

    def add(self, message: Contribution) -> dict | None:
        """All numbers of that name, sorted by key, if this makes them complete."""
        key = message.step, message.name
        if key in self._told:
            return None  # after a failure it is said once more
        values = self._values.setdefault(key, {})
        values.update(message.values)
        if len(values) < message.expected:
            return None
        self._told.add(key)
        return dict(sorted(self._values.pop(key).items()))

    def void(self, after: int) -> None:
        """What was said of the steps after ``after`` counts no more."""
        self._values = {key: values for key, values in self._values.items() if key[0] <= after}
        self._told = {key for key in self._told if key[0] <= after}

    def committed(self, step: int) -> Iterator[tuple[int, dict]]:
        """``step`` is, and what is not here by now has gone down with somebody: (step, the losses that are)."""
        for key in sorted(key for key in self._values if key[0] <= step):
            values = self._values.pop(key)
            if key[1] == LOSS:
                yield key[0], dict(sorted(values.items()))
        self._told = {key for key in self._told if key[0] > step}
