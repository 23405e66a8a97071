"""Evaluations between steps, by whoever is left: every worker has the mean loss, or all do it once more after a loss.

They run through the one executor, as steps of their own with negative numbers: ``1F0.2@-3`` is a forward of the third evaluation.
Who runs a micro-batch of a lost worker gets its data from the replica's other end (planner/forwards.py), which has kept what it has read.
"""

from __future__ import annotations

from typing import Any, Callable

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.instruction import Op
from recycle_plugin.core.loop import Program
from recycle_plugin.core.plan import Plan
from recycle_plugin.core.worker import Worker
from recycle_plugin.planner.forwards import forwards, readers, runner
from recycle_plugin.runtime.batches import Tensors, packed, unpacked
from recycle_plugin.runtime.loop import Loop
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.transport import Transport


class Evaluations:
    """Of ``worker``.  ``recover()``: after a membership change between steps."""

    def __init__(self, session: Session, loop: Loop, transport: Transport, worker: Worker, recover: Callable[[], None]) -> None:
        self._session, self._loop, self._transport = session, loop, transport
        self._worker, self._seat, self._recover = worker, worker.seat, recover
        self._number = 0
        self._read: list[Tensors] = []  # batches of this worker's own iterator

    def run(self, batches: list[Any], count: int) -> dict[str, float]:
        """The loss of each micro-batch.  ``batches``: the ``count`` that this worker has read, if it is an end of its replica."""
        self._number += 1
        self._read = [packed(batch) for batch in batches]
        while True:
            self._loop.settle()
            try:
                return self._run(self._loop.plan, count)
            except Interrupted:
                pass
            finally:  # before this worker meets the others: after that somebody may have sent what is to be evaluated once more
                self._worker.forget_evaluation(-self._number)
            self._recover()

    def _run(self, plan: Plan, count: int) -> dict[str, float]:
        readable = readers(plan.view)
        self._say(plan, readable)
        self._hand_out(plan, readable, count)
        program = tuple(forwards(plan, self._seat, -self._number, count))
        self._loop.execute(Program(-self._number, program, frozenset(one for one in program if one.op is Op.F)))
        return self._loop.meet(f"the end of evaluation {self._number}", self._worker.losses(-self._number)).values

    def batch(self, micro_batch: MicroBatch) -> Any:
        """What is evaluated (inputs and labels): of this worker's own reading, or from who has read it."""
        stage = self._seat.stage
        reader = readers(self._loop.plan.view)[micro_batch.replica][stage > 0]
        if reader == self._seat:
            return unpacked(self._read[micro_batch.index])
        return unpacked(self._loop.fetch(Datum("data", stage, micro_batch, -self._number), reader))

    def _hand_out(self, plan: Plan, readable: dict[int, tuple[Seat, Seat]], count: int) -> None:
        """What this worker has read and others run, which is only so where somebody is lost."""
        roster = self._session.roster
        for replica, ends in readable.items():
            for stage, reader in zip((0, plan.stages - 1), ends):
                for one in (MicroBatch(replica, index) for index in range(count)) if reader == self._seat else ():
                    taker = runner(plan, stage, one)
                    if taker != self._seat:
                        self._transport.send(roster.holder(taker).address, Datum("data", stage, one, -self._number), self._read[one.index], self._worker.store.era)

    def _say(self, plan: Plan, readable: dict[int, tuple[Seat, Seat]]) -> None:
        missing = sorted(set(range(plan.view.topology.replicas)) - readable.keys())
        if missing and self._session.is_first:
            text = f"evaluation {self._number} is without the data of replicas {', '.join(map(str, missing))}, whose ends are lost"
            self._session.note("warning", text, replicas=missing)
