"""A checker of plain iterators' data in a simulated job, whoever is lost; a part of lab/simulator/checkers.py.

Both ends of the pipeline compute a micro-batch with the same batch. Each batch of an iterator is used once in the whole
job, and none is passed over. As long as both ends of a replica live, its own iterator gives its micro-batches, in
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from recycle_plugin.core.messages.from_coordinator import Resume
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import unpack
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.arithmetic import Batch
from recycle_plugin.lab.simulator.reference import Data


class Name(NamedTuple):
    """A batch: ``number``, from 1, in the ``iterator``-th that the script of ``replica`` gives."""

    replica: int
    iterator: int
    number: int

    def __str__(self) -> str:
        return f"batch {self.number} of iterator {self.iterator} of replica {self.replica}"


class Samples:
    """The batches that micro-batches were computed with. ``say`` is told each violation, in words. ``epoch``: each
    iterator serves so many steps; 0: there is one. ``lengths``: how many batches each replica's iterators give, if they
    end; scripts give others when all have ended.
    """

    def __init__(self, shape: Topology, epoch: int, lengths: tuple[int, ...], say: Callable[[str], None]) -> None:
        self._shape, self._epoch, self._lengths, self._say = shape, epoch, lengths, say
        self._begun = [1]  # the first steps of iterators that follow ended ones
        # by step, micro-batch and stage: the last one counts, which replaces a discarded one
        self._loaded: dict[int, dict[MicroBatch, dict[int, Batch]]] = {}
        self._used: dict[Name, tuple[int, MicroBatch]] = {}
        self._passed_over: set[Name] = set()
        # replicas that have not always been whole, so their iterators have rested
        self._returned: set[int] = set()
        self._sources: set[int] = set()
        self._dealt: set[tuple[int, MicroBatch]] = set()  # with other replicas' data, before their own gave any again

    def loaded(self, step: int, micro_batch: MicroBatch, stage: int, batch: Batch) -> None:
        """Record that ``stage``, an end of the pipeline, has loaded ``batch`` for a micro-batch."""
        self._loaded.setdefault(step, {}).setdefault(micro_batch, {})[stage] = batch

    def resumed(self, message: Resume) -> None:
        """Record where all go on: what was drawn for a replica before it gives data again stays drawn."""
        ends = 0, self._shape.stages - 1
        placed = set(message.placed)
        sources = {one for one in range(self._shape.replicas) if placed.issuperset(Seat(one, end) for end in ends)}
        for packed in message.held_draws.values():
            for step, batches in unpack(packed).items():
                self._dealt |= {(step, one) for one in batches if one.replica in sources - self._sources}
        self._sources = sources

    def loaded_so_far(self, step: int) -> dict[MicroBatch, set[Name]]:
        """Return the batches that each micro-batch was computed with, at its ends."""
        return {
            micro_batch: {Name(batch.drawn.source, batch.iterator, batch.number) for batch in ends.values()}
            for micro_batch, ends in self._loaded.get(step, {}).items()
        }

    def of(self, step: int) -> Data:
        """Return the inputs and labels of ``step`` as the two ends have had them."""
        loaded = self._loaded[step]
        return lambda micro_batch: (loaded[micro_batch][0].data[0], loaded[micro_batch][self._shape.stages - 1].data[1])

    def committed(
        self, batches: Mapping[int, AbstractSet[int]], whole: AbstractSet[int], homeless: AbstractSet[int]
    ) -> None:
        """Check committed steps, given the replicas that each has micro-batches of (``batches``). ``whole``: replicas
        without a lost worker. ``homeless``: those of them that are no sources, since nobody knows where their iterators
        stood.
        """
        self._returned |= set(range(self._shape.replicas)) - whole
        for step, replicas in batches.items():
            batch = [one for one in self._shape.batch if one.replica in replicas]
            for micro_batch in batch:
                for name in self.loaded_so_far(step).get(micro_batch, set()):
                    self._used.setdefault(name, (step, micro_batch))
            for micro_batch in batch:
                self._check(step, micro_batch, micro_batch.replica in whole - homeless)
            self._check_gaps(step)

    def _check(self, step: int, micro_batch: MicroBatch, own: bool) -> None:
        named = self.loaded_so_far(step).get(micro_batch, set())
        if len(named) != 1:
            self._say(f"micro-batch {micro_batch} of step {step} was computed with {len(named)} batches")
            return
        (name,) = named
        before = self._used[name]
        if before != (step, micro_batch):
            self._say(f"{name} is used in steps {before[0]} and {step}")
        usual = self._usual(step, micro_batch)
        if name.iterator != usual.iterator:
            self._say(f"micro-batch {micro_batch} of step {step} is {name}, and it is epoch {usual.iterator}")
        rested = micro_batch.replica in self._returned or self._extra(micro_batch.replica, step)
        if self._empty(micro_batch.replica, usual.iterator):
            return
        own = own and (step, micro_batch) not in self._dealt
        if own and (name.replica != micro_batch.replica or (name != usual and not rested)):
            self._say(f"micro-batch {micro_batch} of step {step} is {name}, and both ends of its replica live")

    def ended(self, step: int, sources: AbstractSet[int], contributing: int) -> None:
        """Check that iterators had ended before ``step``: ``sources`` have too little left for ``contributing``
        replicas.
        """
        iterator, left = len(self._begun), 0
        if self._lengths:
            left = sum(self._lengths[replica] - self._used_of(replica, iterator) for replica in sources)
        if not self._lengths or left >= contributing * self._shape.micro_batches:
            self._say(f"the data is said to have ended before step {step}, and {left} batches are left")
        self._begun.append(step)

    def _usual(self, step: int, micro_batch: MicroBatch) -> Name:
        """Return the batch of a micro-batch if nobody is ever lost."""
        if self._epoch:
            epoch, begun = divmod(step - 1, self._epoch)
        else:
            epoch = sum(first <= step for first in self._begun) - 1
            begun = step - self._begun[epoch]
        return Name(micro_batch.replica, epoch + 1, begun * self._shape.micro_batches + micro_batch.index + 1)

    def _empty(self, replica: int, iterator: int) -> bool:
        """Return whether all batches of the iterator are used."""
        return bool(self._lengths) and self._used_of(replica, iterator) == self._lengths[replica]

    def _used_of(self, replica: int, iterator: int) -> int:
        return sum(name[:2] == (replica, iterator) for name in self._used)

    def _check_gaps(self, step: int) -> None:
        """Check that each iterator's batches up to the last used one are used. Costs a look at all batches."""
        last: dict[tuple[int, int], int] = {}
        for replica, iterator, number in self._used:
            last[replica, iterator] = max(number, last.get((replica, iterator), 0))
        for one, until in last.items():
            left = {Name(*one, number) for number in range(1, until)} - self._used.keys() - self._passed_over
            if left:
                self._passed_over |= left
                self._say(f"{min(left)} is passed over by step {step}")

    def _extra(self, replica: int, step: int) -> bool:
        """Return whether the replica's iterator gave data for others before ``step``, which delays its own batches."""
        return any(
            batch.drawn.source == replica != micro_batch.replica
            for earlier in range(1, step)
            for micro_batch, ends in self._loaded[earlier].items()
            for batch in ends.values()
        )
