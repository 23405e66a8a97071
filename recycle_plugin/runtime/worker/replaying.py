"""Replays of this worker's stage if no live worker has it, and its help in replays of other stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.worker.helper import Helper
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.runtime.state.surroundings import SetByScript
from recycle_plugin.runtime.worker.helping import Helping, HowToMake
from recycle_plugin.runtime.worker.parts import Parts
from recycle_plugin.runtime.worker.replay_machine import ReplayMachine

Kind = TypeVar("Kind", bound=ReplayMachine)


class Replays:
    """The replays of the worker that has ``parts``, its own and those that it helps with, in a job that logs.
    ``scripted``: what its script has set for its steps. ``apart()``: a context for what a newcomer's script does not do
    over again.
    """

    def __init__(
        self, parts: Parts, scripted: SetByScript, apart: Callable[[], AbstractContextManager[object]]
    ) -> None:
        assert parts.log is not None, "a job that does not log replays nothing"
        self._parts, self._log, self._scripted, self._apart = parts, parts.log, scripted, apart

    def machine(self, kind: type[Kind]) -> Kind:
        """Return the machine by which the worker's stage is replayed from the logs."""
        return kind(self._parts, self._apart, self._scripted, self._why_alone())

    def replay(self, world: ReplayMachine, steps: StepMachine) -> StageReplay:
        """Return the replay on ``world`` of the worker's stage, whose steps are ``steps``."""
        parts = self._parts
        helpers = Helpers(world, parts.store, parts.topology, parts.blocks(), self._log.limit)
        splits = parts.settings.split_backward
        return StageReplay(world, parts.store, steps, parts.topology, splits, self._log.steps, helpers)

    def helper(self) -> Helper:
        """Return the worker's part in the replays of other stages."""
        parts, settings, blocks = self._parts, self._parts.settings, self._parts.blocks()
        how = HowToMake(
            parts.topology,
            parts.seat,
            parts.framework.make if settings.rng == "keyed" else None,
            lambda made, stage: partial(parts.randomness, stage, made.forward),
            settings.split_backward,
            blocks if settings.exact else None,
            lambda: parts.feed.source,
        )
        helping = Helping(parts.session, parts.world, how, self._log.folder)
        return Helper(helping, parts.topology, blocks, settings.split_backward)

    def _why_alone(self) -> str:
        if self._parts.settings.rng == "stream":
            return 'recycle.rng is "stream": random numbers depend on the worker that draws them'
        return "" if self._parts.framework.make is not None else "the script runs the model itself"
