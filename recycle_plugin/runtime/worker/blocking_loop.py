"""A real worker's training loop: ``core.worker.training_loop`` on waits that block, so that nothing is ever yielded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.checkpoint_saving import CheckpointFiles, save
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.evaluation import Evaluations
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.runtime.worker.plan_prefetcher import WorkerPlanner

T = TypeVar("T")


class BlockingLoop:
    """A worker's ``training`` loop with its ``evaluations`` and ``newcomer``, the way in for a worker that comes back;
    :func:`drain` makes their calls. ``recover()`` is called after a membership change between steps.
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
        self.training, self.evaluations, self.newcomer = training, evaluations, newcomer
        self._view, self._planner, self._recover = view, planner, recover
        self.machine = training.machine

    @property
    def settled(self) -> bool:
        """Whether all steps applied here are known to be committed."""
        return max(self.machine.committed, self._view.committed) >= self.machine.stepped

    def settle(self) -> None:
        """Wait until all steps applied here are committed."""
        if self.settled:
            self.machine.commit(self.machine.stepped)
        else:
            drain(self.training.settle())

    def save(self, call: str, files: CheckpointFiles) -> str:
        """Save a checkpoint on all workers. Returns why it failed, or "" (core.worker.checkpoint_saving)."""
        return drain(save(self.training, self._view, call, files, self._recover))

    def resize(self, topology: Topology, batch: int) -> None:
        """Change the number of micro-batches, and so the plan, from the next step on; ``batch``: samples of a step."""
        drain(self.training.resize(topology, batch, self._planner.full_us(topology)))


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
