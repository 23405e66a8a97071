"""Contributions: numbers of a step that all workers add to and all need: losses by micro-batch, squared norms by stage.

All workers are told a complete set *once*, and it stays the step's. A stage whose sum is made again after a failure may
find another last digit of its share, and a worker may have stepped with the norm told before: a second norm would clip
replicas by two factors. Every worker hears of the first norm before any later change of the membership (one connection,
in order), and keeps it (core/worker/control_view.py).

Contributions belong to no membership: a share or a loss is of the step's micro-batches, whoever computed it. So an
incomplete set stays good over failures, whenever its parts were sent. Only *discarded* parts
(core/coordinator/facts/step_validation.py) no longer count, and losses that are computed again (:meth:`lose`).

Every shard of a seat contributes, and a set is complete when all have. Losses are equal from all shards that compute
the same; shards with samples of their own have their mean taken. A norm's shares are added: parameters differ by shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from recycle_plugin.core.messages.from_workers import Contribution
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.losses import Loss, number
from recycle_plugin.core.vocabulary.step_batches import StepBatches

LOSS = "loss"  # by micro-batch; all are told the mean alone, since a number of each to each worker would be too much
EACH = "losses"  # by micro-batch, as the last stage is told them if a framework logs more than the loss of each
MEAN = "mean"  # the key of the mean
NORM = "norm"  # squared, by stage; workers wait for it
SHARE = "share"  # the same of a step that is validated after it was applied; nobody waits for it


class Contributions:
    """The numbers received of each (step, name), from seats of ``shards`` shards."""

    def __init__(self, shards: int = 1) -> None:
        self._shards = shards
        self._values: dict[tuple[int, str], dict[int, dict[str, Loss]]] = {}  # by shard
        self._told: dict[tuple[int, str], dict[str, Loss]] = {}  # what all were told of uncommitted steps

    def add(self, message: Contribution) -> dict[str, Loss] | None:
        """Add ``message``. Return all numbers of its step and name, by sorted key, if it completes them, else None."""
        key = message.step, message.name
        if key in self._told:
            return None  # sent once more after a failure
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
        """All complete numbers of uncommitted steps, by (step, name); a worker that comes later is told them too."""
        return self._told

    def discard_after(self, after: int) -> None:
        """Drop contributions to the steps after ``after``: they were computed with rejected weights."""
        self._values = {key: values for key, values in self._values.items() if key[0] <= after}
        self._told = {key: values for key, values in self._told.items() if key[0] <= after}

    def lose(self, step: int, kept: Collection[str]) -> None:
        """Drop incomplete losses of ``step`` but those of the micro-batches ``kept``: the others are computed again, by
        others with plain iterators of their own from other data.
        """
        for shard, losses in self._values.get((step, LOSS), {}).items():
            self._values[step, LOSS][shard] = {name: loss for name, loss in losses.items() if name in kept}

    def without(self, batches: StepBatches, micro_batches: int) -> Iterator[tuple[int, dict[str, Loss]]]:
        """Drop contributions to void steps (core/vocabulary/step_batches.py), and of all steps the losses of
        micro-batches that no longer count. Yield (step, losses) for each step whose losses are complete by that, or
        were told for a void step. ``micro_batches``: of a replica.
        """
        for key in sorted({*self._values, *self._told}):
            (step, name), void = key, 0 < batches.void <= key[0]
            if not void and (name != LOSS or key in self._told):
                continue
            values, told = self._values.pop(key, {}), self._told.pop(key, None)
            if name != LOSS:
                continue
            given = values if told is None else dict.fromkeys(range(self._shards), told)
            kept = {shard: _of(each, batches.of(step)) for shard, each in given.items()}
            if self._complete(kept, micro_batches * len(batches.of(step))):
                self._told[key] = _over_shards(LOSS, kept)
                yield step, self._told[key]
            else:
                self._values[key] = kept

    def committed(self, step: int) -> Iterator[tuple[int, dict[str, Loss]]]:
        """Drop the contributions to ``step`` and all before it, which are committed. Yield (step, losses) for those
        with incomplete losses, because the missing ones died with a worker.
        """
        for key in sorted(key for key in self._values if key[0] <= step):
            values = self._values.pop(key)
            if key[1] == LOSS and (losses := _over_shards(LOSS, values)):
                yield key[0], losses
        self._told = {key: values for key, values in self._told.items() if key[0] > step}


def _of(losses: dict[str, Loss], replicas: Collection[int]) -> dict[str, Loss]:
    return {name: loss for name, loss in losses.items() if MicroBatch.parse(name).replica in replicas}


def _over_shards(name: str, values: dict[int, dict[str, Loss]]) -> dict[str, Loss]:
    """Return the numbers of all shards by key, in order: the mean of losses, the sum of squared norms."""
    if len(values) == 1:
        return dict(sorted(*(each.items() for each in values.values())))
    found: dict[str, list[Loss]] = {}
    for _, each in sorted(values.items()):
        for key, value in each.items():
            found.setdefault(key, []).append(value)
    return {key: _mean(each) if name == LOSS else sum(map(number, each)) for key, each in sorted(found.items())}


def _mean(losses: list[Loss]) -> Loss:
    """Return the mean; of equal losses exactly that loss, whatever the mean's last digit would be."""
    alike = all(loss == losses[0] for loss in losses)
    return losses[0] if alike else sum(map(number, losses)) / len(losses)
