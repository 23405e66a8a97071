"""How a worker's stage is replayed where nobody has it, and how it helps to replay others: made of what its trainer
has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.helper import Helper
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.gradients import Contributions
from recycle_plugin.runtime.stage.ports import Framework
from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.state.surroundings import SetByScript
from recycle_plugin.runtime.worker.feed import Feed
from recycle_plugin.runtime.worker.helping import Helping, HowToMake
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.operations import Operations
from recycle_plugin.runtime.worker.stage_log import ReplayMachine, Sharing, StageLog
from recycle_plugin.runtime.worker.stepping import Stepping
from recycle_plugin.settings.schema import Settings

Kind = TypeVar("Kind", bound=ReplayMachine)
Randomness = Callable[..., AbstractContextManager]


@dataclass(frozen=True)
class Replays:
    """A worker's replays, its own and those that it helps with, in a job that keeps ``log``.

    ``address``: at which its peers reach it; ``scripted``: what its script has set for its steps; ``randomness``: as
    Stage has it, after the stage and its ``forward``; ``apart()``: a context for what a newcomer's script does not do
    over again; ``loss_scale()``: what losses are multiplied by.
    """

    session: Session
    settings: Settings
    framework: Framework
    log: StageLog
    world: TorchMachine
    address: str
    state: StageState
    store: StepStore
    stepping: Stepping
    operations: Operations
    contributions: Contributions
    scripted: SetByScript
    feed: Feed
    randomness: Randomness
    apart: Callable[[], AbstractContextManager]
    loss_scale: Callable[[], float]

    def machine(self, kind: type[Kind]) -> Kind:
        """The machine by which the worker's stage is replayed from the logs."""
        return kind(
            self.session,
            self.framework,
            self.state,
            self.stepping,
            self.operations,
            self.log.folder,
            self.apart,
            self.scripted,
            bool(self.settings.exact),
            Sharing(self.world, self.address, self.contributions, self.loss_scale, self._why_alone()),
        )

    def replay(self, world: ReplayMachine, machine: StepMachine, topology: Topology) -> StageReplay:
        """How the worker's stage is replayed on ``world``."""
        splits, steps = self.settings.split_backward, self.log.steps
        helpers = Helpers(world, self.store, topology, self._blocks(topology), self.log.limit)
        return StageReplay(world, self.store, machine, topology, splits, steps, helpers)

    def helper(self, topology: Topology) -> Helper:
        """The worker's part in the replays of other stages."""
        settings, blocks = self.settings, self._blocks(topology)
        how = HowToMake(
            topology,
            self.framework.seat,
            self.framework.make if settings.rng == "keyed" else None,
            lambda made, stage: partial(self.randomness, stage, made.forward),
            settings.split_backward,
            blocks if settings.exact else None,
            lambda: self.feed.source,
        )
        return Helper(
            Helping(self.session, self.world, how, self.log.folder), topology, blocks, settings.split_backward
        )

    def _blocks(self, topology: Topology) -> Blocks:
        return self.settings.policy(False, topology.stages).blocks(topology)

    def _why_alone(self) -> str:
        """Why nobody can help to replay this worker's stage, in words; empty where others can."""
        if self.settings.rng == "stream":
            return 'recycle.rng is "stream": random numbers are those of whoever draws'
        return "" if self.framework.make is not None else "the script runs the model itself"
