"""Contributions: numbers of a step that all workers add to and all need, losses by micro-batch and squared norms by
stage.

What is complete is told to all *once*, and is the step's for good.  A stage whose sum is made again after a failure may
find another last digit of its share, and somebody may have stepped with the norm that was told before: a second one
would clip replicas by two factors.  Everybody has heard of the first before it hears of any later change of the
membership (one connection, in order), and keeps it (core/worker/control_view.py).

Nothing here belongs to a membership: a share, or a loss, is of the step's micro-batches, whoever computed it.  So what
is incomplete stays good over failures too, and it does not matter when it was sent; only what is *discarded*
(core/coordinator/step_validation.py) counts no more.

Every shard of a seat says its own, and a set is complete when all have.  Losses are the same from all that compute the
same; of shards that have samples of their own it is the mean.  A norm's shares are added, since each shard has other
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from recycle_plugin.core.messages.protocol import Contribution

LOSS = "loss"  # by micro-batch
NORM = "norm"  # squared, by stage; workers wait for it
SHARE = "share"  # the same of a step that is validated after it was applied; nobody waits for it


class Contributions:
    """The numbers that have come of each (step, name), from seats of so many ``shards``."""

    def __init__(self, shards: int = 1) -> None:
        self._shards = shards
        self._values: dict[tuple[int, str], dict[int, dict]] = {}  # by shard
        self._told: dict[tuple[int, str], dict] = {}  # what all were told of steps that are not committed

    def add(self, message: Contribution) -> dict | None:
        """Takes ``message`` in; returns all numbers of its step and name, sorted by key, if that makes them complete,
        else None.
        """
        key = message.step, message.name
        if key in self._told:
            return None  # after a failure it is said once more
        values = self._values.setdefault(key, {})
        values.setdefault(message.shard, {}).update(message.values)
        if len(values) < self._shards or any(len(each) < message.expected for each in values.values()):
            return None
        self._told[key] = _over_shards(message.name, self._values.pop(key))
        return self._told[key]

    @property
    def told(self) -> dict[tuple[int, str], dict]:
        """All complete numbers of steps that are not committed, by (step, name): who comes to such a step later has
        to be told as well.
        """
        return self._told

    def discard_after(self, after: int) -> None:
        """Forgets what was said of the steps after ``after``: it was computed with rejected weights."""
        self._values = {key: values for key, values in self._values.items() if key[0] <= after}
        self._told = {key: values for key, values in self._told.items() if key[0] <= after}

    def committed(self, step: int) -> Iterator[tuple[int, dict]]:
        """Forgets ``step`` and all before it, which are committed; gives (step, losses) of those whose losses are
        incomplete, since the missing ones have gone down with a worker.
        """
        for key in sorted(key for key in self._values if key[0] <= step):
            values = self._values.pop(key)
            if key[1] == LOSS:
                yield key[0], _over_shards(LOSS, values)
        self._told = {key: values for key, values in self._told.items() if key[0] > step}


def _over_shards(name: str, values: dict[int, dict]) -> dict:
    """The numbers of all shards by key, in order: the mean of losses, squared norms added up."""
    found: dict[str, list[float]] = {}
    for _, each in sorted(values.items()):
        for key, value in each.items():
            found.setdefault(key, []).append(value)
    return {key: _mean(each) if name == LOSS else sum(each) for key, each in sorted(found.items())}


def _mean(values: list[float]) -> float:
    """The mean, and of equal numbers just that, whatever its last digit would be."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)
