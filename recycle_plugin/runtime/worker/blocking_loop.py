"""A real worker's training loop: ``core.worker.training_loop`` on waits that block, so that nothing is ever yielded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

from recycle_plugin.core.messages.from_coordinator import BarrierPassed
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker import pushed
from recycle_plugin.core.worker.checkpoint_saving import CheckpointFiles, save
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.evaluation import Evaluations
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.runtime.devices.port import Tensors
from recycle_plugin.runtime.worker.plan_prefetcher import WorkerPlanner

T = TypeVar("T")


class BlockingLoop:
    """A worker's training loop with its ``evaluations`` and ``newcomer``, the way in for a worker that comes back.
    Every method returns when it is done. ``recover()`` is called after a membership change between steps.
    """

    def __init__(
        self,
        view: ControlView,
        training: TrainingLoop,
        evaluations: Evaluations,
        newcomer: Newcomer,
        planner: WorkerPlanner,
        recover: Callable[[], Iterator[Any]],
    ) -> None:
        self._view, self._loop, self._evaluations = view, training, evaluations
        self._newcomer, self._planner, self._recover = newcomer, planner, recover
        self.machine = training.machine

    def start(self) -> None:
        """Wait for all workers, and take the first membership and plan."""
        drain(self._loop.start())

    @property
    def followed(self) -> int | None:
        """The step after which this newcomer has its stage's whole state; None before."""
        return self._newcomer.clock

    @property
    def asked(self) -> bool:
        """Whether this newcomer has asked for its stage's state."""
        return self._newcomer.asked > 0

    @property
    def enters(self) -> bool:
        """Whether, as far as is known, this newcomer trains its script's next step itself."""
        return self._newcomer.enters

    def follow(self, step: int) -> bool:
        """Wait, as a newcomer, until the others have committed ``step``, and it is applied here if need be: return
        True. Return False if the worker is a member from this step on.
        """
        drain(self._newcomer.start())
        return drain(self._newcomer.train(step))

    def come_in(self) -> None:
        """Wait until this newcomer is a member with its stage's state. Its script begins at the others' step."""
        drain(pushed.follow(self._newcomer, self._view))

    def meets(self, place: str) -> bool:
        """Whether the others may wait for this newcomer at the barrier ``place``. If so, it is a member now."""
        return drain(self._newcomer.meets(place))

    @property
    def handed(self) -> bytes:
        """What a peer's script has handed over to this newcomer's."""
        return self._newcomer.handed

    def train(self, step: int) -> float:
        """Train ``step``. Returns its mean loss."""
        return drain(self._loop.train(step))

    def steps(self) -> Iterator[Any]:
        """Train step after step for a script that pushes micro-batches (core.worker.pushed.steps)."""
        return pushed.steps(self._loop)

    @property
    def settled(self) -> bool:
        """Whether all steps applied here are known to be committed."""
        return max(self.machine.committed, self._view.committed) >= self.machine.stepped

    def settle(self) -> None:
        """Wait until all steps applied here are committed."""
        if self.settled:
            self.machine.commit(self.machine.stepped)
        else:
            drain(self._loop.settle())

    def finish(self) -> None:
        """Wait, after the end of the script, until nobody needs this worker any more."""
        drain(self._loop.finish())

    def catch_up(self) -> None:
        """Recover from a membership change between steps."""
        drain(self._loop.catch_up())

    def evaluate(self, batches: Sequence[Tensors], count: int) -> dict[str, Loss]:
        """Run ``count`` micro-batches of each replica forwards. Returns their losses (core.worker.evaluation)."""
        return drain(self._evaluations.run(batches, count))

    def count_on(self, evaluations: int) -> None:
        """Set the number of evaluations before this worker came."""
        self._evaluations.count_on(evaluations)

    def save(self, place: str, files: CheckpointFiles) -> str:
        """Save a checkpoint on all workers. Returns why it failed, or "" (core.worker.checkpoint_saving)."""
        return drain(save(self._loop, self._view, place, files, self._recover))

    @property
    def plan(self) -> Plan:
        return self._loop.plan

    def barrier(self, place: str, values: dict[str, Any]) -> BarrierPassed:
        """Wait until all live workers have come to ``place``. Returns what they have brought. Raises Interrupted."""
        return drain(self._loop.barrier(place, values))

    def loaded(self, step: int) -> None:
        """Go on from the checkpoint of ``step``, which all workers have loaded."""
        drain(self._loop.loaded(step))

    def plan_for(self, topology: Topology) -> None:
        """Change the number of micro-batches before this worker takes part, as the others have done by now."""
        self._loop.plan_for(topology)

    def resize(self, topology: Topology, batch: int) -> None:
        """Change the number of micro-batches, and so the plan, from the next step on; ``batch``: samples of a step."""
        drain(self._loop.resize(topology, batch, self._planner.full_us(topology)))


@overload
def drain(execution: Waits[T]) -> T: ...
@overload
def drain(execution: Iterator[Any]) -> Any: ...
def drain(execution: Iterator[Any]) -> Any:
    """Return the value of a generator whose waits block."""
    try:
        next(execution)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a wait of a real worker has yielded instead of blocking")
