"""What a worker waits for between steps: for the commit of what it has applied, and for nothing where that is known."""

from __future__ import annotations

import pytest

from recycle_plugin.core.messages.from_coordinator import Committed
from recycle_plugin.core.messages.from_workers import SurvivorReport
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import FaultScript
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.core.worker.worker import Judging, Worker
from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.worker.blocking_loop import BlockingLoop
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.plan_prefetcher import WorkerPlanner
from tests.support.coordinator import NO_STATE, generation


class Nothing:
    """A transport, and a framework, that are not asked anything."""

    def __getattr__(self, name: str) -> None:
        return None


def loop_of(session) -> BlockingLoop:
    steps, shape = StepMachine(0), Topology(2, 1, 1)
    steps.applied(1)
    machine = TorchMachine(session, Nothing(), Nothing(), FaultScript((), Seat(0, 0)), *NO_STATE)
    worker = Worker(machine, shape, StepStore(Seat(0, 0), 1), steps, Judging())
    planner = WorkerPlanner(CostModel((1000,), (1000,), (1000,)), Policy(), whole=False)
    training = TrainingLoop(machine, worker, planner, shape, worker.seat, steps)
    return BlockingLoop(session.view, training, Nothing(), Nothing(), planner, lambda: iter(()))


def test_settling_has_a_deadline_that_names_the_step(coordinator):
    loop = loop_of(coordinator.session(0, wait_timeout_s=0.05))
    assert not loop.settled
    with pytest.raises(WaitTimeout, match="for the commit of step 1, before its script"):
        loop.settle()


def test_what_is_committed_stays_whoever_is_lost_since(coordinator):
    """Its reader need not wait for the others' scripts to come and recover."""
    session = coordinator.session(0, wait_timeout_s=0.05)
    loop = loop_of(session)
    coordinator.tell(Committed(1))
    coordinator.tell(generation(1, [0, 1]))
    session.waiting.until("the change", session.view.interruption, interruptible=False)
    assert loop.settled
    loop.settle()
    assert loop.machine.committed == 1 and not any(isinstance(message, SurvivorReport) for message in coordinator.heard)
