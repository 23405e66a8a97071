"""Assembles a worker's loop from its parts, once, before the worker asks or waits for others."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.worker.companion import Companion
from recycle_plugin.core.worker.evaluation import Evaluations
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.lockstep import Lockstep
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.pushed import PushedWorker
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.stopwatch import Stopwatch
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.core.worker.worker import Judging, Worker
from recycle_plugin.planner.forwards import forwards
from recycle_plugin.runtime.state.surroundings import SetByScript
from recycle_plugin.runtime.worker.blocking_loop import BlockingLoop
from recycle_plugin.runtime.worker.companion import TorchCompanion
from recycle_plugin.runtime.worker.job_record import planning
from recycle_plugin.runtime.worker.parts import Parts
from recycle_plugin.runtime.worker.plan_prefetcher import WorkerPlanner
from recycle_plugin.runtime.worker.replay_machine import ReplayMachine
from recycle_plugin.runtime.worker.replaying import Replays
from recycle_plugin.runtime.worker.script_changes import ScriptChanges


@dataclass(frozen=True)
class Assembled:
    """A worker's ``loop``, its ``worker`` in core, and its stage's ``replays``, None if nothing is logged."""

    worker: Worker
    loop: BlockingLoop
    replays: Replays | None


def assembled(
    parts: Parts,
    step: int,
    recover: Callable[[], None],
    scripted: SetByScript | None,
    apart: Callable[[], AbstractContextManager[object]],
) -> Assembled:
    """Return the loop of the worker that has ``parts``, after its last step ``step``. ``recover()`` is called after a
    membership change between steps, for which the script's own changes have to be put aside. ``scripted``, ``apart``:
    see Replays.
    """
    planner.warm()  # so that no recovery waits for a compiler
    gc.collect()  # due after all imports: it takes 0.3 s, and would come in some step, or while all wait for a recovery
    session, settings, shape, world = parts.session, parts.settings, parts.topology, parts.world
    machine = StepMachine(step)
    parts.store.rewind(machine.stepped, valid_from=0)
    waits, costs, policy = planning(parts)
    lockstep = _lockstep(parts)
    worker = _worker(parts, machine, Judging(waits, settings.clip == "validate"), costs, lockstep)
    replays = replay = None
    if parts.log is not None:
        assert scripted is not None, "in a job that logs it is kept what scripts set"
        replays = Replays(parts, scripted, apart)
        replay = _help_to_replay(parts, worker, machine, replays)
    session.thread.idle = worker.serve_now
    own_planner = WorkerPlanner(costs, policy, settings.unit == "replica")
    training = TrainingLoop(world, worker, own_planner, shape, worker.seat, machine, lockstep)
    worker.applied = training.applied

    def recovered() -> Any:
        recover()
        return iter(())

    evaluations = Evaluations(world, worker, training, forwards, recovered)
    filled, wants_script = FilledStage(world, worker.store, machine), lambda: parts.on_join.wants_state
    newcomer = Newcomer(world, training, filled, world.open_inlet, worker.skip_to, wants_script, replay, worker.called)
    return Assembled(
        worker, BlockingLoop(session.view, training, evaluations, newcomer, own_planner, recovered), replays
    )


def _worker(
    parts: Parts, machine: StepMachine, judging: Judging, costs: CostModel, lockstep: Lockstep | None
) -> Worker:
    pushed, stopwatch = parts.framework.pushed, Stopwatch(costs, parts.world)
    log = None if parts.log is None else parts.log.steps
    observers = [each for each in (log, stopwatch, parts.trace) if each is not None]  # the log first
    worker = (Worker if pushed is None else PushedWorker)(
        parts.world, parts.topology, parts.store, machine, judging, parts.feed.iterator_data, observers, lockstep
    )
    if pushed is not None:
        assert isinstance(worker, PushedWorker), "of a script that pushes"
        worker.script, group = pushed.script, parts.framework.buckets.group
        worker.agreement = ScriptChanges(parts.session, group, parts.gradients, pushed.shown)
    return worker


def _help_to_replay(parts: Parts, worker: Worker, machine: StepMachine, replays: Replays) -> StageReplay | None:
    """Let the worker help to replay, also as a companion. Returns a newcomer's replay of its stage, else None."""
    worker.helper = replays.helper()
    companion = replays.machine(TorchCompanion)
    parts.replays_along = lambda: companion.at_work
    along = replays.replay(companion, machine)
    worker.companion = Companion(companion, parts.store, machine, along, worker.undo)
    return replays.replay(replays.machine(ReplayMachine), machine) if parts.session.view.newcomer else None


def _lockstep(parts: Parts) -> Lockstep | None:
    framework = parts.framework
    if framework.shards == 1:
        return None
    lockstep = Lockstep(parts.world, parts.seat, framework.shard, framework.shards)
    parts.world.keep_in_step(lockstep)
    return lockstep
