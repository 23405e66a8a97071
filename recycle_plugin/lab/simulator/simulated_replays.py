"""What a simulated worker has for replays of its stage and others'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.from_coordinator import Replay
from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import of_layers
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.shares import Lot, Share
from recycle_plugin.core.worker.shares import Word as ShareWord
from recycle_plugin.core.worker.stage_work import CantReplay
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.lab.simulator import simulated_spec
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.helped_stage import SimulatedWeights
from recycle_plugin.lab.simulator.numbers import Numbers
from recycle_plugin.lab.simulator.scenario import MILLISECOND
from recycle_plugin.lab.simulator.simulated_log import SimulatedLogs
from recycle_plugin.lab.simulator.simulated_state import UNITS, WEIGHT, KeptNumbers, SimulatedState

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.cluster import Cluster

LOOK_US = 1 * MILLISECOND  # between two looks at the logs
LOGGED_US = 10_000 * MILLISECOND  # after this wait a record is taken for lost: its writer may be stopped
READING_US = 5 * MILLISECOND  # of a stage's share of a checkpoint
T = TypeVar("T")


class SimulatedReplays:
    """What a simulated worker has for replays: logs, its own state to put back, messages to helpers. SimulatedMachine's
    base.
    """

    cluster: Cluster
    rank: int
    seat: Seat
    at: Activity
    control_view: ControlView
    numbers: Numbers
    steps: StepMachine
    store: StepStore
    shared: SimulatedState

    def __init__(self) -> None:
        self.replays_along = False
        self._said: list[ShareWord] = []
        self._lots: set[tuple[int, Block]] = set()  # (step, block) that others were to make in a replay

    @property
    def address(self) -> str:
        """Where other workers find this one."""
        return simulated_spec.address(self.rank, self.control_view.incarnation)

    def tell(self, address: str, word: ShareWord) -> None:
        """Send a message of a replay to the worker at ``address``."""
        if isinstance(word, Lot):
            lot = {(word.step, block) for block in word.blocks}
            self.cluster.exercised[ProtocolRule.DEALT_AGAIN] += bool(lot & self._lots)
            self._lots |= lot
        self.cluster.exercised[ProtocolRule.HELPED_BESIDE] += isinstance(word, Share) and self.control_view.outside
        self.cluster.tell_worker(self.rank, address, word)

    def hear(self, word: ShareWord) -> None:
        """Record another worker's message of a replay."""
        self._said.append(word)

    def words(self) -> list[ShareWord]:
        """Return the messages of replays since the last call."""
        found, self._said = self._said, []
        return found

    def wait_share(self, what: str, until: float) -> Iterator[Any]:
        """Wait for a moment. Raises JobEnded."""
        self.control_view.check_end()
        self.at = Activity(WAITS, what)
        yield LOOK_US

    def weights(self) -> SimulatedWeights:
        """Return the weight of this stage."""
        return SimulatedWeights(self.store[of_layers("params", self.seat, self.steps.stepped + 1)])

    def add_share(self, step: int, sums: Any) -> None:
        """Add a share's sums to this worker's own."""
        self.cluster.exercised[ProtocolRule.SHARED] += 1
        self.numbers.add_sums(step, sums)

    def why_alone(self) -> str:
        """Return "": every worker can make every stage."""
        return ""

    def logs(self) -> SimulatedLogs:
        """Return the logs of all processes of the job."""
        return SimulatedLogs(self.cluster.logs)

    def wait_logged(self, what: str, ready: Callable[[], T | None], made: bool) -> Waits[T]:
        """Wait for ``ready()``, return its value. JobEnded; CantReplay after LOGGED_US if it was ``made`` long ago."""
        late = self.cluster.now + LOGGED_US
        while (value := ready()) is None:
            self.control_view.check_end()
            if made and self.cluster.now > late:
                raise CantReplay(f"{what} is in no log")
            self.at = Activity(WAITS, what)
            yield LOOK_US
        return value

    @property
    def replays(self) -> bool:
        return self.control_view.outside or self.replays_along

    def keep_state(self) -> tuple[KeptNumbers, int]:
        """Return all numbers of the stage, and the learning rate; the worker begins to replay along."""
        self.replays_along = True
        self.cluster.exercised[ProtocolRule.ACCOMPANIED] += 1
        return self.shared.kept(), self.numbers.rate

    def otherwise(self, kept: tuple[KeptNumbers, int]) -> str:
        """Return how the numbers differ from ``kept``, or "" if they don't or may, since sums round."""
        now, (before, _) = self.shared.kept(), kept
        return "" if now == before or self.cluster.scenario.rounds else f"{now}, and it was {before}"

    def put_back(self, kept: tuple[KeptNumbers, int]) -> None:
        """Restore all numbers; the worker replays no more."""
        self.replays_along = False
        numbers, self.numbers.rate = kept
        self.shared.restore(numbers)

    def restore(self, replay: Replay) -> Waits[int]:
        """Load the state of this stage from a checkpoint. Return its size."""
        yield READING_US
        weight, moments = self.cluster.saved[replay.step, self.seat.stage]
        self.shared.fill(None)
        self.shared.write(WEIGHT, weight)
        for name, moment in moments.items():
            self.shared.write(name, moment)
        return sum(UNITS.values())

    def differs(self, made: int, sent: int) -> str:
        """Return how two numbers differ, or "" if they don't or may, since sums round."""
        return "" if made == sent or self.cluster.scenario.rounds else f"{made}, and it was {sent}"

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> Any:
        """Return the sum over all blocks of the stage, which are all here."""
        total = self.numbers.total([self.numbers.sums(instruction.step)])
        self.numbers.forget_sums()
        return total

    def tied_in_order(self, total: Any) -> Any:
        """Return the sum itself."""
        return total

    def tied_of(self, logged: Any) -> Any:
        """Return the sum over a tie: all its stages have the same."""
        return logged

    def was_dealt(self, instruction: Instruction) -> bool:
        """Return whether ``instruction`` begins a block that another worker was to make in a replay."""
        begins = instruction.op is Op.F
        return begins and (instruction.step, self.numbers.block(instruction.works_on)) in self._lots
