"""A worker's loop of which nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from recycle_plugin.core.messages.from_coordinator import Committed, Generation, Resume
from recycle_plugin.core.messages.from_workers import SurvivorReport
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.packed_data import among_all
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.lab.simulator.shared_planner import SharedPlanner

SHAPE, COSTS = Topology(2, 2, 2), CostModel.uniform(2)
MEMBERS = tuple(Member(rank, seat, str(rank), "here") for rank, seat in enumerate(sorted(SHAPE.seats)))


class Worker:
    """Rank 0's port and replica: whatever it reports holds at once, and each step that it executes is committed.

    No wait may be needed.
    """

    valid_from = 0

    def __init__(self) -> None:
        self.control_view, self.ran = ControlView(0), []
        self.loop = TrainingLoop(self, self, SharedPlanner(COSTS, Policy()), SHAPE, MEMBERS[0].seat, StepMachine(0))
        self.control_view.take(Generation(1, MEMBERS, 0, "start", 0.0))
        list(self.loop.start())

    def send(self, message: object) -> None:
        if isinstance(message, SurvivorReport):
            self.control_view.take(
                Resume(message.generation, message.stepped, among_all({str(MEMBERS[0].seat): message.held}))
            )

    def wait(self, what: Any, ready: Callable[[], Any], interruptible: bool = True) -> Iterator[Any]:
        yield from ()
        value = ready()
        assert value is not None, f"it would wait for {what}"
        return value

    def execute(self, program: StepProgram) -> Iterator[Any]:
        yield from ()
        self.ran.append(program)
        self.loop.applied(program.step)
        self.control_view.take(Committed(program.step, {}))
        self.loop.machine.commit(program.step)

    def stop_helping(self) -> None:
        pass

    def held(self) -> set:
        return set()

    def held_draws(self) -> dict:
        return {}

    @property
    def places(self) -> dict:
        return {}

    @property
    def ended(self) -> int:
        return 0

    @property
    def lacks(self) -> int:
        return 0

    def place_behind(self, step: int) -> None:
        return None

    def time_of(self, step: int) -> None:
        return None

    def clock(self) -> float:
        return 0.0

    def reach(self, point: str) -> None:
        pass

    def take_state(self, iterator_state: Any) -> None:
        self.iterator_state = iterator_state

    def record_norm(self, step: int, norm: float) -> None:
        pass

    def discard_after(self, after: int, valid_from: int) -> None:
        pass

    def listen_to(self, members: Any) -> None:
        pass

    def keep_only(self, members: Any) -> None:
        pass

    def train(self, steps: int) -> list[int]:
        list(self.loop.advance(steps))
        return [program.step for program in self.ran]
