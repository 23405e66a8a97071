"""A worker on its way into a job, and in it: how it comes to train with the others, from the start or coming back.

Until then a newcomer's script is given what is over, and its state may be further than its script.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from recycle_plugin import planner
from recycle_plugin.core.messages.from_workers import Ready
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.deadlines import lease_s
from recycle_plugin.core.vocabulary.evaluation_route import end_of
from recycle_plugin.core.vocabulary.log_boundaries import ALL
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.companion import Companion
from recycle_plugin.core.worker.lockstep import Lockstep
from recycle_plugin.core.worker.pushed import PushedWorker
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.stopwatch import Stopwatch
from recycle_plugin.core.worker.worker import Judging, Worker
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.ports import Framework, described, trained
from recycle_plugin.runtime.state.surroundings import SetByScript, Surroundings
from recycle_plugin.runtime.state.touch import FirstTouch
from recycle_plugin.runtime.worker.blocking_loop import BlockingLoop
from recycle_plugin.runtime.worker.changed_state import Counts
from recycle_plugin.runtime.worker.checkpoints import JobCheckpoints
from recycle_plugin.runtime.worker.companion import CompanionMachine
from recycle_plugin.runtime.worker.iterator_places import IteratorPlace
from recycle_plugin.runtime.worker.job_record import job_spec, planning
from recycle_plugin.runtime.worker.log_choice import LogChoice
from recycle_plugin.runtime.worker.newcomer import Newcomer
from recycle_plugin.runtime.worker.on_join import Callback, Give
from recycle_plugin.runtime.worker.parts import Parts
from recycle_plugin.runtime.worker.replay_machine import ReplayMachine
from recycle_plugin.runtime.worker.replaying import Replays
from recycle_plugin.runtime.worker.script_changes import ScriptChanges
from recycle_plugin.settings.schema import Settings


class Participant:
    """A worker that holds a seat of a job, which it has from the start or comes back to.

    ``feed``: where micro-batches come from; ``state``: all that a step changes.
    """

    def __init__(self, session: Session, settings: Settings, framework: Framework) -> None:
        self._session, self._settings, self._framework = session, settings, framework
        self._parts = parts = Parts(session, settings, framework)
        self.seat, self.feed, self.state = parts.seat, parts.feed, parts.state
        self._touch = FirstTouch(
            self._changed,
            lambda: self.settled and self._in_step and not self.state.watches,
            self._show,
            lambda: self._follows,
        )
        os.register_at_fork(before=self._forks)
        model = framework.model
        self._surroundings = Surroundings(
            model.module, model.device.kind, lambda: framework.optimizer.wrapped.param_groups
        )
        self._waiting_loop: BlockingLoop | None = None  # made, and not begun
        self._loop: BlockingLoop | None = None
        self._worker: Worker  # with the loop
        self._checkpoints: JobCheckpoints
        self._from_checkpoint = False  # from a checkpoint, before training
        self._asked = self._trains = False
        self._evaluated = 0
        self._newcomer = None
        self._scripted: SetByScript | None = None  # where a replay may have to set it again
        if session.newcomer:
            counts = Counts(self.state)
            self._newcomer = Newcomer(session, framework.optimizer, counts, self._ask, self._follow)
        if session.newcomer or parts.log is not None:
            self._scripted = SetByScript(self._surroundings, model.module)

    @property
    def topology(self) -> Topology:
        """The job's replicas, stages and micro-batches."""
        return self._parts.topology

    def lifted(self) -> AbstractContextManager:
        """A context in which something of the framework's is at work, which may touch parameters; it may be nested."""
        return self._touch.lifted()

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return self._framework.optimizer.steps if self._loop is None else self._loop.machine.stepped

    @property
    def settled(self) -> bool:
        """Whether all trained steps are committed."""
        return self._loop is None or self._loop.settled

    def settle(self) -> None:
        """Return when every step that :meth:`train` has returned for is committed, whoever dies meanwhile."""
        if self._loop is not None:
            with self.lifted(), self._surroundings.restored():
                self._loop.settle()
                self.state.touched()
            self._parts.store.drop_sums(self.step)

    def _forks(self) -> None:
        """Settle before a fork, which copies parameters; a newcomer's are on their way, and no fork may fail."""
        if self._newcomer is None:
            self._touch.now()

    # --- starting ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Before the first step: enrol, wait for everybody, make the plan.

        Checkpoints are loaded before; later calls do nothing.
        """
        if self._loop is not None:
            return
        loop = self._prepared()
        self._ask()
        loop.start()
        if self._from_checkpoint:
            self._parts.say_fingerprint(loop.machine.stepped)
        self._begin(loop)

    def _prepared(self) -> BlockingLoop:
        """The loop by which this worker trains; made once, before anybody is asked or waited for."""
        if self._waiting_loop is not None:
            return self._waiting_loop
        planner.warm()  # so that no failure has to wait for a compiler
        session, settings, shape = self._session, self._settings, self.topology
        machine = StepMachine(self.step)
        self._parts.store.rewind(machine.stepped, valid_from=0)
        waits, costs, policy = planning(settings, self._framework, shape)
        judging, lockstep = Judging(waits, settings.clip == "validate"), self._lockstep()
        log = None if self._parts.log is None else self._parts.log.steps
        self._worker = (Worker if self._framework.pushed is None else PushedWorker)(
            self._parts.world,
            shape,
            self._parts.store,
            machine,
            judging,
            self.feed.iterator_data,
            Stopwatch(costs),
            log,
            lockstep,
        )
        if self._framework.pushed is not None:
            assert isinstance(self._worker, PushedWorker), "of a script that pushes"
            self._worker.script, group = self._framework.pushed.script, self._framework.buckets.group
            self._worker.agreement = ScriptChanges(session, group, self._parts.gradients, self._framework.pushed.shown)
        replay = self._help_to_replay(machine)
        session.idle = self._worker.serve_now
        self._waiting_loop = BlockingLoop(
            session,
            self._worker,
            self._parts.world,
            shape,
            costs,
            policy,
            machine,
            self._between_steps,
            lambda: self._parts.on_join.wants_state,
            replay,
            lockstep,
            settings.unit == "replica",
        )
        return self._waiting_loop

    def _help_to_replay(self, machine: StepMachine) -> StageReplay | None:
        """Let the worker help where stages are replayed, and replay its own along; returns how a newcomer replays its
        own alone, None at any other, or where nothing is logged.
        """
        replays = self._replays()
        if replays is None:
            return None
        self._worker.helper = replays.helper()
        companion = replays.machine(CompanionMachine)
        self._parts.replays_along = lambda: companion.at_work
        along = replays.replay(companion, machine)
        self._worker.companion = Companion(companion, self._parts.store, machine, along, self._worker.undo)
        return None if self._newcomer is None else replays.replay(replays.machine(ReplayMachine), machine)

    def _replays(self) -> Replays | None:
        """How stages are replayed here; None where nothing is logged."""
        if self._parts.log is None:
            return None
        assert self._scripted is not None, "in a job that logs it is kept what scripts set"
        return Replays(self._parts, self._scripted, self.apart)

    def _lockstep(self) -> Lockstep | None:
        """The lockstep with the others that hold this worker's seat; None where it does so alone."""
        framework = self._framework
        if framework.shards == 1:
            return None
        lockstep = Lockstep(self._parts.world, self.seat, framework.shard, framework.shards)
        self._parts.world.keep_in_step(lockstep)
        return lockstep

    def _begin(self, loop: BlockingLoop) -> None:
        """Train by ``loop`` from now on."""
        session, self._loop = self._session, loop
        loop.count_on(self._evaluated)
        # one of each stage: nobody else knows what it trains
        if self.seat.replica == self._framework.shard == session.incarnation == 0:
            session.note("stage", f"stage {self.seat.stage} is built", **described(self._framework))
        self._checkpoints = JobCheckpoints(
            self._parts, loop, self._between_steps, self._place, lambda: self._worker.valid_from, self._log_choice()
        )
        session.between_steps = self._between_steps

    def _log_choice(self) -> LogChoice | None:
        """The choice of what is logged, where anything is."""
        if self._parts.log is None:
            return None
        size = self._framework.micro_batch_size
        return self._parts.log.choice(self._session, self._settings, lambda: self.topology, size, self.state)

    def _place(self) -> IteratorPlace | None:
        return self.feed.place(self.topology.replicas, self._framework.micro_batch_size)

    def _begin_training(self) -> None:
        """Note that the first step begins, once."""
        startup, begun, self._trains = self._session.startup, self._trains, True
        if startup is not None and not begun:
            startup.begin_training(trained(self._framework.model.module))

    def _ask(self) -> None:
        """Ask to take part, once."""
        if self._asked:
            return
        self._asked, session, log = True, self._session, self._parts.log
        if self._newcomer is None:  # of whom the others are told, and it of them
            session.rewind(self.step)
        address, shard = self._parts.transport.address, self._framework.shard
        member = Member(session.rank, self.seat, address, session.host, session.incarnation, shard)
        session.heartbeats.start(lease_s(self._settings.deadlines))
        where = None if log is None else log.where(session, self._settings.transfer_interface)
        boundaries = ALL if log is None else log.boundaries
        job = job_spec(self._settings, self._framework, self.topology, self._parts.run_dir, boundaries)
        session.send(Ready(member, self.step, job, where))

    @property
    def _running(self) -> BlockingLoop:
        assert self._loop is not None, "training has not begun"
        return self._loop

    def _between_steps(self) -> None:
        """Recover from a membership change that something which the script does outside a step has met; then that is
        tried again.
        """
        with self.lifted(), self._surroundings.restored():
            self._running.catch_up()

    def _changed(self) -> Iterator[torch.Tensor]:
        """The tensors that a step changes, and buffers, which what is left of a step reads; those of a newcomer are its
        script's own.
        """
        yield from self.state.tensors().values()
        if self._newcomer is None:
            yield from self._framework.model.module.buffers()

    # --- coming back -------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether this worker has come into a job that trains, and its script is not at one with the others' yet."""
        return self._newcomer is not None

    def join(self) -> None:
        """Return when this newcomer, whose script begins where the others are, is a member with its stage's state."""
        with self.lifted():
            self.feed.begin()
            self._ask()
            loop = self._prepared()
            loop.come_in()
            self._take_part(loop)

    def recorded_evaluation(self) -> float | None:
        """The mean loss of an evaluation that was over before this worker came back; None where it takes part.

        Called in the place of :meth:`evaluate`, before any data is read for that.
        """
        if self._newcomer is None or self._meets(end_of(self._newcomer.evaluated + 1)):
            return None
        return self._newcomer.evaluation()

    def _past_loss(self, newcomer: Newcomer) -> float | None:
        """The loss of the script's next step, where that is over; None where it is to be trained here, with what the
        script has set for it.
        """
        step, scripted = newcomer.position + 1, self._scripted
        assert scripted is not None, "a newcomer's steps may be replayed"
        scripted.begin(step)
        loss = newcomer.loss()
        if loss is None:
            scripted.apply(step)  # what has come of others meanwhile was from before that
        else:
            scripted.end()
        return loss

    def _note_scripts(self) -> None:
        """Note what a member's script has set for its next step; of what a checkpoint has nothing is replayed."""
        if self._scripted is not None:
            self._scripted.forget(self._session.durable)
            self._scripted.begin(self.step + 1)

    def _follow(self, step: int) -> bool:
        """Whether ``step`` is over with the others, once that is known; where it is not, this worker is a member now,
        and goes on with its stage's state.
        """
        loop = self._prepared()
        self.feed.begin()
        if loop.follow(step):
            return True
        self._take_part(loop)
        return False

    def _meets(self, place: str) -> bool:
        """Whether the others may wait for this newcomer, whose stage nobody had, at what ends with the barrier
        ``place``; then it is a member now.
        """
        if self._waiting_loop is None or not self._waiting_loop.meets(place):
            return False
        self._take_part(self._waiting_loop)
        return True

    def _take_part(self, loop: BlockingLoop) -> None:
        assert self._newcomer is not None, "only a newcomer comes to take part"
        self._evaluated, self._newcomer = self._newcomer.evaluated, None
        self._begin(loop)
        self._parts.on_join.joined(loop.machine.stepped, loop.handed)

    @property
    def _in_step(self) -> bool:
        """Whether the state is that of the script's step; a newcomer's is not before it has caught up."""
        if self._newcomer is None:
            return True
        return self._waiting_loop is not None and self._waiting_loop.followed == self._newcomer.position

    @property
    def _follows(self) -> bool:
        """Whether what the script makes of the state is dropped, since it comes as the others' scripts have made it.
        Where a stage may be replayed nobody gives it.
        """
        if self._newcomer is None or self._parts.log is not None:
            return False
        return self._waiting_loop is None or not self._waiting_loop.enters

    def _show(self) -> None:
        """Let the script touch parameters.  Raises RecycleError where they are not those of its step."""
        if not self._in_step:
            assert self._newcomer is not None, "a member's are"
            raise RecycleError(
                f"the script of a worker that comes back touches parameters after step {self._newcomer.position}, "
                "which are not here yet: leave that out while engine.behind, and let engine.on_join bring what it "
                'needs, or set recycle.rejoin to "never"'
            )
        self.settle()

    def apart(self) -> AbstractContextManager:
        """A context for something that a newcomer's script does not do over again."""
        return nullcontext() if self._session.startup is None else self._session.startup.apart()

    def on_join(self, callback: Callback, state: Give | None) -> None:
        """Have ``callback(step, state)`` called in a newcomer before its first step, with what ``state()`` gives at a
        live worker of its stage.
        """
        self._parts.on_join.add(callback, state)
