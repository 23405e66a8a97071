"""A stage that a simulated worker makes beside its own, to help a worker that replays it (core/worker/helper.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from recycle_plugin.core.messages.activity import ELSEWHERE, Activity
from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.helper import CantHelp
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.numbers import Numbers
from recycle_plugin.lab.simulator.scenario import MILLISECOND
from recycle_plugin.lab.simulator.simulated_log import SimulatedLogs

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine

T = TypeVar("T")
MAKING_US = 10 * MILLISECOND  # to make a stage from its layer specs


class SimulatedWeights(NamedTuple):
    """A stage's weight, as a lot has it."""

    weight: int
    nbytes: int = 3


def made(machine: SimulatedMachine, stage: int) -> Waits[SimulatedHelpedStage]:
    """Make ``stage`` on the worker of ``machine``, and return it. CantHelp if the scenario says that it can't."""
    machine.at = Activity(ELSEWHERE, f"the making of stage {stage}, to help")
    yield MAKING_US
    if machine.cluster.refusals.random() < machine.cluster.scenario.helps_not:
        machine.cluster.exercised[ProtocolRule.REFUSED] += 1
        raise CantHelp("it has no room for another stage")
    return SimulatedHelpedStage(machine, stage)


class SimulatedHelpedStage:
    """Another worker's ``stage``, with exact numbers, as the worker on ``machine`` computes it."""

    def __init__(self, machine: SimulatedMachine, stage: int) -> None:
        self._machine, scenario = machine, machine.cluster.scenario
        seat = Seat(machine.seat.replica, stage)
        self._numbers = Numbers(scenario, seat)
        self.store = StepStore(seat, scenario.shape.stages)

    def begin(self, step: int, weights: SimulatedWeights) -> None:
        """Take the weight before ``step``, and drop all sums."""
        self._numbers.forget_sums()
        self.store.rewind(step - 1, 0)
        self.store.put(of_layers("params", self.store.seat, step), weights.weight)

    def sums(self, step: int, blocks: Sequence[Block]) -> Any:
        """Return the sums of the weight gradients, by block."""
        return self._numbers.sums(step)

    def logs(self) -> SimulatedLogs:
        """Return the logs of all processes of the job."""
        return self._machine.logs()

    def wait_logged(self, what: str, ready: Callable[[], T | None], made: bool) -> Waits[T]:
        """Wait until ``ready()`` is not None, and return its value. Raises JobEnded and CantReplay."""
        return (yield from self._machine.wait_logged(what, ready, made))

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Spend the microseconds that ``instruction`` takes; never return on a stuck worker."""
        machine = self._machine
        machine.at = Activity(ELSEWHERE, f"{instruction} of a replay")
        machine.cluster.replayed.append((machine.seat, instruction))
        machine.reach("before", machine.seat, instruction)
        spent = machine.cluster.scenario.costs.of(instruction.op, instruction.stage) * machine.percent // 100
        if spent:
            yield spent
        yield from machine.hang()

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Return what ``instruction`` provides, in exact numbers."""
        return self._numbers.compute(instruction, have, boundary_only)
