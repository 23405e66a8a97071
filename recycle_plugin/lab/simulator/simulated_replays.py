"""What a simulated worker has for replays of its stage and others'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from recycle_plugin.core.messages.activity import WAITS
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
LOGGED_US = 10_000 * MILLISECOND  # a record's wait before it is taken for lost: whoever writes it may be stopped
READING_US = 5 * MILLISECOND  # a stage's share of a checkpoint
T = TypeVar("T")


class SimulatedReplays:
    """What a simulated worker has for replays: the logs, its own state to put back, and words with those that help.

    A base of SimulatedMachine, which makes what is declared here.
    """

    cluster: Cluster
    rank: int
    seat: Seat
    at: tuple[str, str]
    control_view: ControlView
    numbers: Numbers
    steps: StepMachine
    store: StepStore
    shared: SimulatedState

    def __init__(self) -> None:
        self.replays_along = False
        self._said: list[ShareWord] = []
        self._lots: set[tuple[int, Block]] = set()  # what others were to make of a replay, by step

    @property
    def address(self) -> str:
        """Where other workers find this one."""
        return simulated_spec.address(self.rank, self.control_view.incarnation)

    def tell(self, address: str, word: ShareWord) -> None:
        """Says something of a replay to the worker at ``address``."""
        if isinstance(word, Lot):
            lot = {(word.step, block) for block in word.blocks}
            self.cluster.exercised[ProtocolRule.DEALT_AGAIN] += bool(lot & self._lots)
            self._lots |= lot
        self.cluster.exercised[ProtocolRule.HELPED_BESIDE] += isinstance(word, Share) and self.control_view.outside
        self.cluster.tell_worker(self.rank, address, word)

    def hear(self, word: ShareWord) -> None:
        """Takes in what another worker says of a replay."""
        self._said.append(word)

    def words(self) -> list[ShareWord]:
        """What has been said to this worker of replays since this was asked last."""
        found, self._said = self._said, []
        return found

    def wait_share(self, what: str, until: float) -> Iterator[Any]:
        """Yields for a moment.  Raises JobEnded."""
        self.control_view.check_end()
        self.at = (WAITS, what)
        yield LOOK_US

    def weights(self) -> SimulatedWeights:
        """The weight of this stage."""
        return SimulatedWeights(self.store[of_layers("params", self.seat, self.steps.stepped + 1)])

    def add_share(self, step: int, sums: Any) -> None:
        """Adds what a share has to this worker's own sums."""
        self.cluster.exercised[ProtocolRule.SHARED] += 1
        self.numbers.add_sums(step, sums)

    def why_alone(self) -> str:
        """Nothing: everybody can make every stage."""
        return ""

    def logs(self) -> SimulatedLogs:
        """The logs of all processes of the job."""
        return SimulatedLogs(self.cluster.logs)

    def wait_logged(self, what: str, ready: Callable[[], T | None], made: bool) -> Waits[T]:
        """Yields until ``ready()`` is not None; that is the value.  Raises JobEnded, and CantReplay after a while,
        where what is waited for was ``made`` long ago.
        """
        late = self.cluster.now + LOGGED_US
        while (value := ready()) is None:
            self.control_view.check_end()
            if made and self.cluster.now > late:
                raise CantReplay(f"{what} is in no log")
            self.at = (WAITS, what)
            yield LOOK_US
        return value

    @property
    def replays(self) -> bool:
        return self.control_view.outside or self.replays_along

    def keep_state(self) -> tuple[KeptNumbers, int]:
        """All numbers of the stage, and the learning rate."""
        self.replays_along = True
        self.cluster.exercised[ProtocolRule.ACCOMPANIED] += 1
        return self.shared.kept(), self.numbers.rate

    def otherwise(self, kept: tuple[KeptNumbers, int]) -> str:
        """Says so where the numbers are others, though nobody rounds."""
        now, (before, _) = self.shared.kept(), kept
        return "" if now == before or self.cluster.scenario.rounds else f"{now}, and it was {before}"

    def put_back(self, kept: tuple[KeptNumbers, int]) -> None:
        """Has all numbers again."""
        self.replays_along = False
        numbers, self.numbers.rate = kept
        self.shared.restore(numbers)

    def restore(self, replay: Replay) -> Waits[int]:
        """Takes the state of this stage from a checkpoint; the value is what it weighs."""
        yield READING_US
        weight, moments = self.cluster.saved[replay.step, self.seat.stage]
        self.shared.fill(None)
        self.shared.write(WEIGHT, weight)
        for name, moment in moments.items():
            self.shared.write(name, moment)
        return sum(UNITS.values())

    def differs(self, made: int, sent: int) -> str:
        """Says so where two numbers are not the same, though nobody rounds."""
        return "" if made == sent or self.cluster.scenario.rounds else f"{made}, and it was {sent}"

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> Any:
        """The sum over all blocks of the stage, which are all here."""
        total = self.numbers.total([self.numbers.sums(instruction.step)])
        self.numbers.forget_sums()
        return total

    def tied_in_order(self, total: Any) -> Any:
        """The sum itself."""
        return total

    def tied_of(self, logged: Any) -> Any:
        """The sum over a tie: all stages of it have the same."""
        return logged

    def was_dealt(self, instruction: Instruction) -> bool:
        """Whether ``instruction`` begins what another worker was to make of a replay."""
        begins = instruction.op is Op.F
        return begins and (instruction.step, self.numbers.block(instruction.works_on)) in self._lots
