"""A checker of the samples that scripts with their own loop draw, whoever is lost; a part of lab/simulator/checkers.py.

Each step has the same number of samples, no sample is in two steps, and the processes of a replica train the same. What
a script trained is in a step as long as its process lives. So nothing is drawn in vain except the sample at hand, and
nothing is left out when a replica comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from recycle_plugin.core.vocabulary.dataflow import of_layers
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.simulator.arithmetic import Sample
from recycle_plugin.lab.simulator.reference import Data

Composition = Mapping[MicroBatch, tuple[Sample, WorkerId]]  # with the process whose script ran it


class Ledger:
    """The samples of one job. ``say`` is told violations. ``shrinks``: a step's samples of lost replicas are known."""

    def __init__(self, say: Callable[[str], None], shrinks: bool = False) -> None:
        self._say, self._shrinks = say, shrinks
        self._drawn: dict[WorkerId, int] = {}  # number of the last sample
        self._last_run: dict[WorkerId, int] = {}  # likewise
        self._ran: dict[WorkerId, dict[tuple[int, MicroBatch], Sample]] = defaultdict(dict)
        self._summed: dict[tuple[int, int], Composition] = {}  # by (step, shard): what is in the last sum
        self._used: dict[Sample, tuple[int, MicroBatch]] = {}
        self._uncounted: set[Sample] = set()  # in a step committed without the process that ran it

    def drew(self, worker: Any, sample: Sample) -> None:
        """Check ``sample``, which a script has drawn to train it next."""
        process = worker.control_view.worker
        last = self._drawn.get(process)
        if last is not None and (sample.number != last + 1 or self._last_run.get(process) != last):
            self._say(f"seat {worker.seat} draws {sample}, and has not trained the one before")
        if last is None and sample.number > 1 and sample._replace(number=sample.number - 1) not in self._used:
            self._say(f"seat {worker.seat} begins with {sample}, and nobody has trained the one before")
        self._drawn[process] = sample.number

    def ran(self, worker: Any, step: int, micro_batch: MicroBatch, sample: Sample) -> None:
        """Record that a script has run ``sample`` as a micro-batch of ``step``."""
        ran = self._ran[worker.control_view.worker]
        if (step, micro_batch) in ran:
            self._say(f"seat {worker.seat} has run micro-batch {micro_batch} of step {step} twice")
        ran[step, micro_batch] = sample
        self._last_run[worker.control_view.worker] = sample.number

    def summed(self, step: int, shard: int, parts: Iterable[tuple[Any, Iterable[MicroBatch]]]) -> None:
        """Record which worker has brought which micro-batches to the sum of its shard in ``step``."""
        self._summed[step, shard] = {
            one: (self._ran[process][step, one], process)
            for process, part in ((worker.control_view.worker, part) for worker, part in parts)
            for one in part
        }

    def applied(self, worker: Any, step: int) -> None:
        """Check that a replica is not torn: if one of its ranks applies ``step``, each has its part of the sum."""
        reduced = of_layers("reduced", worker.seat, step)
        torn = [other for other in worker.cluster.workers.values() if other.seat == worker.seat]
        if not all(reduced in other.store for other in torn):
            self._say(f"a rank of replica {worker.seat.replica} applies step {step}, whose sum another one lacks")

    def of(self, step: int) -> Data:
        """Return the inputs and labels of ``step`` as they were trained."""
        summed = self._summed.get((step, 0), {})
        return lambda micro_batch: summed[micro_batch][0].data if micro_batch in summed else (0, 0)

    def committed(self, cluster: Any, first: int, last: int) -> None:
        """Check the committed steps ``first`` to ``last``. O(all micro-batches that live workers have run)."""
        for step in range(first, last + 1):
            for shard in range(cluster.scenario.shards):
                self._check(step, shard, cluster.membership.roster.workers)
        for member in cluster.membership.roster:
            for (step, micro_batch), sample in self._ran[member.worker].items():
                if step <= last and self._used.get(sample) != (step, micro_batch):
                    self._say(f"{sample} is lost: seat {member.seat} has trained it in step {step}, which has another")

    def _check(self, step: int, shard: int, live: AbstractSet[WorkerId]) -> None:
        if (step, shard) not in self._summed:
            self._say(f"step {step} is committed, and shard {shard} has nothing summed for it")
            return
        first, here = self._summed.get((step, 0), {}), self._summed[step, shard]
        for micro_batch, (sample, process) in here.items():
            if micro_batch not in first or first[micro_batch][0] != sample:
                self._say(f"micro-batch {micro_batch} of step {step} is {sample} on one rank, and not on the other")
            if process not in live and not self._shrinks:
                # its successor may not know of that, and draw the sample again
                self._uncounted.add(sample)
            elif sample in self._uncounted:
                self._uncounted.remove(sample)
                del self._used[sample]
            before = self._used.setdefault(sample, (step, micro_batch))
            if before != (step, micro_batch) and process in live:
                self._say(f"{sample} is used in step {before[0]} as {before[1]} and in step {step} as {micro_batch}")
