"""Contributions: numbers of a step that all workers add to and all need, losses by micro-batch and squared norms by
stage.

What is complete is told to all *once*, and is the step's for good.  A stage whose sum is made again after a failure may
find another last digit of its share, and somebody may have stepped with the norm that was told before: a second one
would clip replicas by two factors.  Everybody has heard of the first before it hears of any later change of the
membership (one connection, in order), and keeps it (core/worker/control_view.py).

Nothing here belongs to a membership: a share, or a loss, is of the step's micro-batches, whoever computed it.  So what
is incomplete stays good over failures too, and it does not matter when it was sent; only what is *discarded*
(core/coordinator/facts/step_validation.py) counts no more.

Every shard of a seat says its own, and a set is complete when all have.  Losses are the same from all that compute the
same; of shards that have samples of their own it is the mean.  A norm's shares are added, since each shard has other
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from recycle_plugin.core.messages.from_workers import Contribution
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.losses import Loss, number
from recycle_plugin.core.vocabulary.step_batches import StepBatches

LOSS = "loss"  # by micro-batch
NORM = "norm"  # squared, by stage; workers wait for it
SHARE = "share"  # the same of a step that is validated after it was applied; nobody waits for it


class Contributions:
    """The numbers that have come of each (step, name), from seats of so many ``shards``."""

    def __init__(self, shards: int = 1) -> None:
        self._shards = shards
        self._values: dict[tuple[int, str], dict[int, dict[str, Loss]]] = {}  # by shard
        self._told: dict[tuple[int, str], dict[str, Loss]] = {}  # what all were told of steps that are not committed

    def add(self, message: Contribution) -> dict[str, Loss] | None:
        """Takes ``message`` in; returns all numbers of its step and name, sorted by key, if that makes them complete,
        else None.
        """
        key = message.step, message.name
        if key in self._told:
            return None  # after a failure it is said once more
        values = self._values.setdefault(key, {})
        values.setdefault(message.shard, {}).update(message.values)
        if not self._complete(values, message.expected):
            return None
        self._told[key] = _over_shards(message.name, self._values.pop(key))
        return self._told[key]

    def _complete(self, values: dict[int, dict[str, Loss]], expected: int) -> bool:
        return len(values) >= self._shards and all(len(each) >= expected for each in values.values())

    @property
    def told(self) -> dict[tuple[int, str], dict[str, Loss]]:
        """All complete numbers of steps that are not committed, by (step, name): who comes to such a step later has
        to be told as well.
        """
        return self._told

    def discard_after(self, after: int) -> None:
        """Forgets what was said of the steps after ``after``: it was computed with rejected weights."""
        self._values = {key: values for key, values in self._values.items() if key[0] <= after}
        self._told = {key: values for key, values in self._told.items() if key[0] <= after}

    def without(self, batches: StepBatches, micro_batches: int) -> Iterator[tuple[int, dict[str, Loss]]]:
        """Forgets what was said of void steps (core/vocabulary/step_batches.py), but losses of what they still have;
        gives (step, losses) of those of which all have been said by that.  ``micro_batches``: of a replica.
        """
        void = [key for key in {*self._values, *self._told} if key[0] >= batches.void]
        for key in sorted(void):
            values, told = self._values.pop(key, {}), self._told.pop(key, None)
            if key[1] != LOSS:
                continue
            kept = {shard: _of(each, batches.of(key[0])) for shard, each in ({0: told} if told else values).items()}
            if told is not None or self._complete(kept, micro_batches * len(batches.of(key[0]))):
                self._told[key] = _over_shards(LOSS, kept)
                yield key[0], self._told[key]
            else:
                self._values[key] = kept

    def committed(self, step: int) -> Iterator[tuple[int, dict[str, Loss]]]:
        """Forgets ``step`` and all before it, which are committed; gives (step, losses) of those whose losses are
        incomplete, since the missing ones have gone down with a worker.
        """
        for key in sorted(key for key in self._values if key[0] <= step):
            values = self._values.pop(key)
            if key[1] == LOSS and (losses := _over_shards(LOSS, values)):
                yield key[0], losses
        self._told = {key: values for key, values in self._told.items() if key[0] > step}


def _of(losses: dict[str, Loss], replicas: Collection[int]) -> dict[str, Loss]:
    """The losses of the micro-batches of ``replicas``."""
    return {name: loss for name, loss in losses.items() if MicroBatch.parse(name).replica in replicas}


def _over_shards(name: str, values: dict[int, dict[str, Loss]]) -> dict[str, Loss]:
    """The numbers of all shards by key, in order: the mean of losses, squared norms added up."""
    found: dict[str, list[Loss]] = {}
    for _, each in sorted(values.items()):
        for key, value in each.items():
            found.setdefault(key, []).append(value)
    return {key: _mean(each) if name == LOSS else sum(map(number, each)) for key, each in sorted(found.items())}


def _mean(losses: list[Loss]) -> Loss:
    """The mean, and of equal losses just that, whatever its last digit would be."""
    alike = all(loss == losses[0] for loss in losses)
    return losses[0] if alike else sum(map(number, losses)) / len(losses)
