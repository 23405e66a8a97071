"""A real worker's training loop: ``core.worker.training_loop`` on waits that block, so nothing is ever yielded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from recycle_plugin import planner
from recycle_plugin.core.messages.from_coordinator import BarrierPassed, Generation
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.recovery_plan import Held, RecoveryPlan
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.core.worker import pushed
from recycle_plugin.core.worker import training_loop as core
from recycle_plugin.core.worker.checkpoint_saving import CheckpointFiles, save
from recycle_plugin.core.worker.evaluation import Evaluations
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.lockstep import Lockstep
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.planner.forwards import forwards
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.movers.batches import Tensors
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.plan_prefetcher import PlanPrefetcher


class BlockingLoop:
    """The training loop of ``worker`` on the machine ``world``; every method returns when it is done."""

    def __init__(
        self,
        session: Session,
        worker: Worker,
        world: TorchMachine,
        topology: Topology,
        costs: CostModel,
        policy: Policy,
        machine: StepMachine,
        recover: Callable[[], None],
        wants_script: Callable[[], bool] = lambda: False,
        replay: StageReplay | None = None,
        lockstep: Lockstep | None = None,
        whole: bool = False,
    ) -> None:
        """Make the loop; ``recover()`` is called after a membership change between steps, where the script's own
        changes have to be put aside; ``wants_script()``: a newcomer's script asks its peers' for what is theirs alone;
        ``replay``: how its stage is replayed where nobody has it; ``lockstep``: as for
        core.worker.training_loop.TrainingLoop; ``whole``: replicas are lost whole.
        """
        self._session, self._recover = session, recover
        self._planner = _Planner(costs, policy, whole)
        self._loop = core.TrainingLoop(world, worker, self._planner, topology, worker.seat, machine, lockstep)
        worker.applied = self._loop.applied
        self._evaluations = Evaluations(world, worker, self._loop, forwards, self._recover_between)
        filled = FilledStage(world, worker.store, machine)
        self._newcomer = Newcomer(
            world, self._loop, filled, world.open_inlet, worker.skip_to, wants_script, replay, worker.called
        )
        self.machine = machine

    def start(self) -> None:
        """Wait for all workers, and take the first membership and plan."""
        drain(self._loop.start())

    @property
    def followed(self) -> int | None:
        """The step after which this newcomer has its stage's state; None as long as it has not all of it."""
        return self._newcomer.clock

    @property
    def enters(self) -> bool:
        """Whether this newcomer trains its script's next step itself, as far as is known."""
        return self._newcomer.enters

    def follow(self, step: int) -> bool:
        """Wait, as a newcomer does, until ``step`` is over with the others, and followed here if need be: True.  False
        where from this step on the worker is a member.
        """
        drain(self._newcomer.start())
        return drain(self._newcomer.train(step))

    def come_in(self) -> None:
        """Wait, as a newcomer whose script begins where the others are, until it is a member with its stage's state."""
        drain(pushed.follow(self._newcomer, self._session))

    def meets(self, place: str) -> bool:
        """Whether the others may wait for this newcomer at what ends with the barrier ``place``; it is a member now."""
        return drain(self._newcomer.meets(place))

    @property
    def handed(self) -> bytes:
        """What a peer's script has handed over to this newcomer's."""
        return self._newcomer.handed

    def train(self, step: int) -> dict:
        """Train ``step``; returns the loss of each micro-batch of the step."""
        return drain(self._loop.train(step))

    def steps(self) -> Iterator[Any]:
        """Train step after step for a script that pushes its micro-batches; yields what is needed of it
        (core.worker.pushed.steps).
        """
        return pushed.steps(self._loop)

    @property
    def settled(self) -> bool:
        """Whether all steps applied here are known to be committed."""
        return max(self.machine.committed, self._session.committed) >= self.machine.stepped

    def settle(self) -> None:
        """Wait until all steps applied here are committed; returns at once where they are."""
        if self.settled:
            self.machine.commit(self.machine.stepped)
        else:
            drain(self._loop.settle())

    def finish(self) -> None:
        """Wait, as a worker whose script is through, until nobody needs this one any more."""
        drain(self._loop.finish())

    def catch_up(self) -> None:
        """Recover from a membership change between steps."""
        drain(self._loop.catch_up())

    def evaluate(self, batches: Sequence[Tensors], count: int) -> dict[str, float]:
        """Run ``count`` micro-batches of each replica forwards; returns the losses, as
        core.worker.evaluation.Evaluations.run does.
        """
        return drain(self._evaluations.run(batches, count))

    def count_on(self, evaluations: int) -> None:
        """Go on behind the evaluation of this number, the last one before this worker came."""
        self._evaluations.count_on(evaluations)

    def save(self, place: str, files: CheckpointFiles) -> str:
        """Save a checkpoint on all workers; returns why it has failed, or "", as core.worker.checkpoint_saving.save
        does.
        """
        return drain(save(self._loop, self._session, place, files, self._recover_between))

    @property
    def plan(self) -> Plan:
        return self._loop.plan

    def barrier(self, place: str, values: dict) -> BarrierPassed:
        """Wait until all live workers have come to ``place``, and return what they have brought.  Raises
        Interrupted.
        """
        return drain(self._loop.barrier(place, values))

    def loaded(self, step: int) -> None:
        """Go on from the checkpoint of ``step``, which all workers have loaded."""
        drain(self._loop.loaded(step))

    def resize(self, topology: Topology, batch: int) -> None:
        """Take another number of micro-batches, and so another plan, from the next step on; ``batch``: samples of a
        step.
        """
        drain(self._loop.resize(topology, batch, self._planner.full_us(topology)))

    def _recover_between(self) -> Iterator[Any]:
        self._recover()
        return iter(())


class _Planner:
    def __init__(self, costs: CostModel, policy: Policy, whole: bool) -> None:
        self._costs, self._policy = costs, policy
        self._whole, self._prefetcher = whole, PlanPrefetcher(costs, policy, whole)

    def full_us(self, topology: Topology) -> int:
        return planner.plan(topology.full(), self._costs, self._policy).period_us

    def plan(self, view: ClusterView, generation: Generation) -> Plan:
        """The plan for ``view``, at the slowness that ``generation`` names beside what was known before.

        Also begins to plan for what may come next to its members.  Meanwhile it may have been called off.
        """
        costs = self._costs.slowed(generation.slowness)
        if costs != self._prefetcher.costs:
            self._prefetcher.stop()
            self._prefetcher = PlanPrefetcher(costs, self._policy, self._whole)
        planned = self._prefetcher.plan(view)
        self._prefetcher.prepare(view, generation.roster)
        return planned

    def lowered(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        return planner.lowered(plan, seat, step)

    def arrange(self, recovery: RecoveryPlan, plan: Plan, held: Held) -> planner.recovery_order.Programs:
        return planner.arrange(recovery, plan, self._costs, held)


def drain(execution: Iterator[Any]) -> Any:
    """The value of a generator whose waits block."""
    try:
        next(execution)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a wait of a real worker has yielded instead of blocking")
