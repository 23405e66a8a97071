"""The machine of a simulated worker whose script runs its own loop (core/worker/pushed.py), in a job without stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.pushed import PushedWorker
from recycle_plugin.core.worker.pushed import Script as PushedScript
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.lab.simulator import simulated_sums
from recycle_plugin.lab.simulator.arithmetic import Sample
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.cluster import Cluster


class SimulatedPushedMachine(SimulatedMachine):
    """The machine of a worker that trains what its script pushes. ``given``: the sample that the script has at hand.
    ``met``: the step after which it last met the others. ``change``: what the script has made of a sum, None if
    nothing.
    """

    worker: PushedWorker
    worker_class = PushedWorker

    def __init__(self, cluster: Cluster, rank: int, weight: int, incarnation: int = 0) -> None:
        super().__init__(cluster, rank, weight, incarnation)
        self.pushed = self.worker.script = PushedScript()
        self.worker.agreement = self
        self.change: str | None = None
        self.taken: tuple[int, str | None] = (0, None)  # (step, change)
        self.given = Sample(self.seat.replica, 0)
        self._loaded = self.given
        self.met = 0

    def draw(self) -> None:
        """Draw the script's next sample, after those that its rank has given to steps, in this process or before."""
        self.given = Sample(self.seat.replica, self.pushed.given + 1)
        self.cluster.watcher.drew(self, self.given)

    def spend(self, instruction: Instruction) -> Waits[None]:
        """Spend the time that ``instruction`` takes, and for F wait until the script has run it too."""
        yield from super().spend(instruction)
        if instruction.op is Op.F:
            yield from self.pushed.passing()

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        """Return what ``instruction`` provides: F uses the script's sample, and STEP judges for itself."""
        data = Datum("data", self.seat.chunk, instruction.micro_batch, instruction.step)
        if instruction.op is Op.LOAD:
            self.cluster.exercised[ProtocolRule.GIVEN_AGAIN] += self.given is self._loaded
            self._loaded = self.given
        elif instruction.op is Op.F:
            have.put(data, self.given.data)
            self.cluster.watcher.ran(self, instruction, self.given)
        elif instruction.op is Op.STEP and self.shared.applies is None and self.cluster.scenario.clip:
            each = self.share(instruction.step, have)
            norm = self.norm(dict.fromkeys(map(str, range(self.cluster.scenario.shards)), each))
            have.put(of_layers("norm", self.seat, instruction.step), norm)
        made = super().compute(instruction, have, boundary_only)
        return {data: None} if instruction.op is Op.LOAD else made

    def exchange(self, step: int) -> Waits[bool]:
        """See core.worker.pushed.Agreement."""
        brought = yield from simulated_sums.changed(self, step, self.change)
        made = [change for _, change in sorted(brought.items()) if change is not None]
        self.taken = step, made[0] if made else None
        return bool(made)

    def confirm(self, step: int) -> Iterator[Any]:
        """See core.worker.pushed.Agreement."""
        yield from simulated_sums.confirmed(self, step)

    def adopt(self, step: int) -> None:
        """See core.worker.pushed.Agreement."""
        self.cluster.exercised[ProtocolRule.CHANGE_APPLIED] += self.worker.running.applied
        self.cluster.watcher.adopted(self, step, self.taken[1] if self.taken[0] == step else None)
        self.change = None

    def undo(self, step: int) -> None:
        """Raise AssertionError: what a script has run can't run again."""
        raise AssertionError(f"step {step} of a script's own loop is to be taken back")
