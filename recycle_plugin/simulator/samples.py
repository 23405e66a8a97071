"""A checker of plain iterators' data in a simulated job, whoever is lost; a part of
:mod:`recycle_plugin.simulator.checkers`.

Both ends of the pipeline compute with one batch for each micro-batch, each batch is used once in the whole job, and as
long as both ends of a replica live its own iterator gives its micro-batches, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.simulator.arithmetic import Batch
from recycle_plugin.simulator.reference import Data

UNFINISHED = 2  # steps at most


class Samples:
    """The batches that micro-batches were computed with.  ``say`` is told each violation, in words."""

    def __init__(self, shape: Topology, say: Callable[[str], None]) -> None:
        self._shape, self._say = shape, say
        self._loaded: dict[
            int, dict[MicroBatch, dict[int, Batch]]
        ] = {}  # by step, micro-batch and stage: the last one counts, which takes a discarded one's place
        self._used: dict[tuple[int, int], tuple[int, MicroBatch]] = {}
        self._begun_without: dict[int, int] = {}  # the last step that may have been begun without it, by replica
        self._committed = 0
        self._returned: set[int] = (
            set()
        )  # replicas that have not always been whole, so that their iterators have rested

    def restored(self, replica: int, committed: int) -> None:
        """Takes in that somebody of ``replica`` replays its stage up to step ``committed``, and comes into the middle
        of what follows, which others may have given batches for.
        """
        self._begun_without[replica] = committed + UNFINISHED
        self._returned.add(replica)

    def loaded(self, step: int, micro_batch: MicroBatch, stage: int, batch: Batch) -> None:
        """Takes in that ``stage``, an end of the pipeline, has loaded ``batch`` for a micro-batch."""
        self._loaded.setdefault(step, {}).setdefault(micro_batch, {})[stage] = batch

    def loaded_so_far(self, step: int) -> dict[MicroBatch, set[tuple[int, int]]]:
        """The batches that each micro-batch was computed with, at its ends: replica and number in its iterator."""
        return {
            micro_batch: {(batch.drawn.source, batch.number) for batch in ends.values()}
            for micro_batch, ends in self._loaded.get(step, {}).items()
        }

    def of(self, step: int) -> Data:
        """The inputs and labels of ``step``, as the two ends have had them."""
        loaded = self._loaded[step]
        return lambda micro_batch: (loaded[micro_batch][0].data[0], loaded[micro_batch][self._shape.stages - 1].data[1])

    def committed(self, last: int, whole: AbstractSet[int], homeless: AbstractSet[int]) -> None:
        """Checks all steps up to ``last``, which are committed.  ``whole``: replicas of which nobody is lost;
        ``homeless``: those of them that are no sources, since nobody knows where their iterators stood.
        """
        self._returned |= set(range(self._shape.replicas)) - whole
        for step in range(self._committed + 1, last + 1):
            for micro_batch in self._shape.batch:
                replica = micro_batch.replica
                own = replica in whole - homeless and step > self._begun_without.get(replica, 0)
                self._check(step, micro_batch, own)
        self._committed = max(self._committed, last)

    def _check(self, step: int, micro_batch: MicroBatch, own: bool) -> None:
        named = self.loaded_so_far(step).get(micro_batch, set())
        if len(named) != 1:
            self._say(f"micro-batch {micro_batch} of step {step} was computed with {len(named)} batches")
            return
        (name,) = named
        before = self._used.setdefault(name, (step, micro_batch))
        if before != (step, micro_batch):
            self._say(f"batch {name[1]} of replica {name[0]}'s iterator is used in steps {before[0]} and {step}")
        usual = (step - 1) * self._shape.micro_batches + micro_batch.index + 1
        rested = micro_batch.replica in self._returned or self._extra(micro_batch.replica, step)
        if own and (name[0] != micro_batch.replica or (name[1] != usual and not rested)):
            self._say(
                f"micro-batch {micro_batch} of step {step} is batch {name[1]} of replica {name[0]}, both of whose ends "
                "live"
            )

    def _extra(self, replica: int, step: int) -> bool:
        """Whether its iterator has given anything for others before ``step``, which moves its own batches back."""
        return any(
            batch.drawn.source == replica != micro_batch.replica
            for earlier in range(1, step)
            for micro_batch, ends in self._loaded[earlier].items()
            for batch in ends.values()
        )
