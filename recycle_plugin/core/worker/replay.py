"""The replay of an empty stage: from a checkpoint, by logs, to the last committed step (SWIFT, PPoPP'23, section 5).

It is the stage's own work once more, micro-batch by micro-batch, with the same instructions and the same optimizer.
Inputs from neighbours come from their logs, outputs go to its own log only, and the sum over its workers is all here.
If several stages are replayed at once, each reads what the others write meanwhile.

Every step costs the stage's computing of all its micro-batches, whoever had run them; or a part of that, if others help
(core/worker/shared_replay.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from recycle_plugin.core.messages.from_coordinator import Replay
from recycle_plugin.core.messages.from_workers import Replaying
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.stage_work import OTHERWISE, CantReplay, PartTimes, ReplayingMachine, StageWork, StepEnd
from recycle_plugin.core.worker.step_log import CommittedStep, StepLog
from recycle_plugin.core.worker.step_store import StepStore


class Replayed(NamedTuple):
    """The cost of a replay: ``bytes`` of a checkpoint, and how many ``helpers`` stayed to the end."""

    bytes: int
    helpers: int


class StageReplay:
    """The replay of the stage of ``store``, whose steps are counted in ``steps``, in a pipeline of ``shape``.
    ``splits``: backwards are split; ``log``: where its outputs are logged; ``helpers``: may make its gradients too.
    """

    def __init__(
        self,
        machine: ReplayingMachine,
        store: StepStore,
        steps: StepMachine,
        shape: Topology,
        splits: bool,
        log: StepLog,
        helpers: Helpers,
    ) -> None:
        self._machine, self._store, self._steps, self._shape, self._log = machine, store, steps, shape, log
        self._splits, self._helpers, self._stage = splits, helpers, store.seat.stage
        self.clock: int | None = None

    def run(self, replay: Replay) -> Waits[Replayed]:
        """Carry out ``replay``; the value is its cost. Raises JobEnded and CantReplay."""
        self.clock = None
        self._steps.stepped = self._steps.committed = replay.step
        self._store.rewind(replay.step, self._store.valid_from)
        self._machine.forget_sums(replay.step)  # of a replay that was given up, too
        times = PartTimes(self._machine.clock)
        self._helpers.call(replay)
        with times.of("load"):
            size = yield from self._machine.restore(replay)
        with times.of("spawn"):
            yield from self._helpers.gather()
        with self._log.replaying(replay.step):
            yield from self._run(replay, times)
        self._store.valid_from = max(self._store.valid_from, replay.valid_from)
        helped = self._helpers.report(replay, times)
        self.clock = replay.committed
        return Replayed(size, helped)

    def _run(self, replay: Replay, times: PartTimes) -> Iterator[Any]:
        work = StageWork(
            self._machine, self._store, self._shape, self._splits, lambda datum, value: self._keep(work, datum, value)
        )
        work.others, work.refused = frozenset(replay.stages) - {self._stage}, self._log.refuses
        try:
            for step in range(replay.step + 1, replay.committed + 1):
                yield from self._step(work, (yield from work.step_record(step)), times)
                self._machine.send(Replaying(self._machine.control_view.rank, step))
        finally:
            work.logs.close()
        self._log.parks()

    def _step(self, work: StageWork, record: CommittedStep, times: PartTimes) -> Iterator[Any]:
        store, step = self._store, record.step
        store.valid_from = record.valid_from
        self._machine.set_for(step)
        yield from self._helpers.run(work, step, times)
        yield from StepEnd(self._machine, store, work, record, times).run(self._shape.tie(store.seat.chunk))
        self._steps.applied(step)
        self._steps.commit(step)
        self._log.applied(step, record.norm)
        self._log.commit(step, record.valid_from, record.counts_from)
        store.commit(step)

    def _keep(self, work: StageWork, datum: Datum, value: Any) -> None:
        """Log the recomputed data. In each step one micro-batch is compared with the data that the stage had sent, if
        that was logged: the script may have changed layers in ways that a replay can't see. Raises CantReplay.
        """
        batch = self._shape.batch
        if datum.kind in TRAVELS and datum.micro_batch == batch[datum.step % len(batch)]:
            sent = work.logs.get(datum)
            if sent is not None and (how := self._machine.differs(value, sent)):
                raise CantReplay(f"{datum} differs from what was sent: {how}; {OTHERWISE}")
        self._log.kept(datum, value, self._store.valid_from)
