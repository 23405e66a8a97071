"""The trainer of one worker, whatever framework built the model.

It runs the worker's steps, what its script does between them, and recovery from the loss of others. ``train`` returns
before its step is committed.  What it returned stays final: recovery finishes the step inside the next call.  Whatever
of torch's touches parameters or the optimizer's state first, in the thread that trains, waits for the commit
(runtime/state/touch.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recycle_plugin import planner
from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, BarrierPassed
from recycle_plugin.core.messages.from_workers import Fingerprint, Ready, StateHash
from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.deadlines import lease_s
from recycle_plugin.core.vocabulary.evaluation_route import end_of
from recycle_plugin.core.vocabulary.faults import FaultScript
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.log_boundaries import ALL
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.worker.checkpoint_saving import end_of_saving
from recycle_plugin.core.worker.companion import Companion
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.core.worker.lockstep import Lockstep
from recycle_plugin.core.worker.pushed import PushedWorker
from recycle_plugin.core.worker.step_store import Retention, StepStore
from recycle_plugin.core.worker.stopwatch import Stopwatch
from recycle_plugin.core.worker.training_loop import DataEnded, StepProgram
from recycle_plugin.core.worker.worker import Judging, Worker
from recycle_plugin.errors import RecycleError
from recycle_plugin.observability.trace import TraceFile
from recycle_plugin.runtime.authentication.secret import check_heeded
from recycle_plugin.runtime.catch_up.transfers import Transfers
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.movers.batches import Tensors
from recycle_plugin.runtime.movers.tcp import Transport
from recycle_plugin.runtime.stage.block_sums import BlockSums
from recycle_plugin.runtime.stage.clipping import Clipping, TrueNorm
from recycle_plugin.runtime.stage.gradients import Contributions, Gradients
from recycle_plugin.runtime.stage.operations import Operations
from recycle_plugin.runtime.stage.randomness import key, keyed_torch
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.state.background_hash import BackgroundHash
from recycle_plugin.runtime.state.fingerprint import fingerprint
from recycle_plugin.runtime.state.surroundings import AsStarted, SetByScript, Surroundings
from recycle_plugin.runtime.state.touch import FirstTouch
from recycle_plugin.runtime.state.undo import NoUndo
from recycle_plugin.runtime.worker.blocking_loop import BlockingLoop
from recycle_plugin.runtime.worker.changed_state import Counts, stage_state, stage_units
from recycle_plugin.runtime.worker.checkpoint_files import saving_place
from recycle_plugin.runtime.worker.checkpoints import JobCheckpoints
from recycle_plugin.runtime.worker.companion import CompanionMachine
from recycle_plugin.runtime.worker.feed import Feed
from recycle_plugin.runtime.worker.iterator_places import IteratorPlace
from recycle_plugin.runtime.worker.job_record import check_faults, job_spec, planning
from recycle_plugin.runtime.worker.log_choice import LogChoice
from recycle_plugin.runtime.worker.machine import PushedMachine, TorchMachine
from recycle_plugin.runtime.worker.newcomer import Newcomer
from recycle_plugin.runtime.worker.on_join import Callback, Give, OnJoin
from recycle_plugin.runtime.worker.ports import Checkpoints, Framework, described, trained
from recycle_plugin.runtime.worker.pushed_stage import PushedStage
from recycle_plugin.runtime.worker.replaying import Replays
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.scripted import ScriptedStage
from recycle_plugin.runtime.worker.stage_log import ReplayMachine, StageLog
from recycle_plugin.runtime.worker.stepping import Stepping, undo_record
from recycle_plugin.runtime.worker.tiers import AsMade, Host
from recycle_plugin.settings.schema import Settings


class Trainer:
    """Trains one worker's stage, which ``framework`` has built; all workers build theirs alike, before anybody trains.

    ``feed``: where micro-batches come from; ``state``: all that a step changes.  Raises RecycleError for a second
    trainer in a process.
    """

    def __init__(self, session: Session, settings: Settings, framework: Framework) -> None:
        if session.trains:
            raise RecycleError(
                "a second engine, pipeline or set of replicas in this process: one for each process is supported yet; "
                "make one, and give it all layers"
            )
        session.trains, session.through = True, self.await_others
        self._session, self._settings, self._framework = session, settings, framework
        self.topology, self.seat, session.shard = framework.topology, framework.seat, framework.shard
        check_faults(settings, self.topology)
        model = framework.model
        assert not isinstance(settings.pinned_bytes, str), "a checked size is a number"
        model.device.budget(settings.pinned_bytes, self._short_of_pinned)
        if settings.exact:
            model.device.repeatable()
        self._as_started = AsStarted(model.module)
        blocks = BlockSums(framework.parameters, self._blocks()) if settings.exact else None
        self._stage = self._make_stage(blocks)
        self._transport = Transport(session, model.device)
        assert not isinstance(settings.keep_bytes, str), "a checked size is a number"
        kept = Retention(budget=settings.keep_bytes), (AsMade(), Host(model.device))
        self._store = StepStore(self.seat, self.topology.stages, bool(self.topology.tie(self.seat.stage)), *kept)
        rests = settings.batch == "shrink"
        self.feed = Feed(session, self._store, model.first or model.last, framework.next_batch, self._hand_on, rests)
        scale = LossScale(framework.scaler)
        self.state = stage_state(framework, self._stage, scale, self.feed.iterator_data)
        self.hash = BackgroundHash(self.state, self._tell_hash)
        self._stepping = self._make_stepping(blocks, scale)
        self._operations = operations = Operations(
            session, self._stage, self._stepping, self.feed.batch, self._applied, framework.beside_sums
        )
        check_heeded(settings.secret_file, os.environ)
        self.run_dir = settings.run_dir or f"runs/{session.job_id}"
        self._log = StageLog(session, framework, settings.log, self.run_dir) if settings.log is not None else None
        first = framework.shard == 0  # which does what one does for a seat
        self._trace = (
            TraceFile(Path(self.run_dir) / "trace", self.seat, session.note) if settings.trace * first else None
        )
        self._on_join = OnJoin()
        self._world = (TorchMachine if framework.pushed is None else PushedMachine)(
            session,
            self._transport,
            operations,
            settings.fault_script(self.seat, session.incarnation) if first else FaultScript((), self.seat),
            self.transfers,
            self.hash,
            stage_units(framework, self.state, self._gradients),
            self._trace.add if self._trace is not None else lambda span: None,
            self._stepping.prepare,
            self.state_for_newcomer,
        )
        if framework.pushed is not None:
            assert isinstance(self._world, PushedMachine), "of a script that pushes"
            self._world.script, session.pushed = framework.pushed.script, True
        self._touch = FirstTouch(self._changed, lambda: self.settled and self._in_step, self._show)
        os.register_at_fork(before=self._touch.now)
        self._surroundings = Surroundings(
            model.module, model.device.kind, lambda: framework.optimizer.wrapped.param_groups
        )
        self._waiting_loop: BlockingLoop | None = None  # made, and not begun
        self._loop: BlockingLoop | None = None
        self._worker: Worker  # with the loop
        self._companion: CompanionMachine | None = None  # with the loop, where there is a log
        self._checkpoints: JobCheckpoints
        self._from_checkpoint = False  # from a checkpoint, before training
        self._asked = self._trains = False
        self._newcomer = None
        self._scripted: SetByScript | None = None  # where a replay may have to set it again
        if session.newcomer:
            counts = Counts(self.state)
            self._newcomer = Newcomer(session, framework.optimizer, counts, self._ask, self._follow)
        if session.newcomer or self._log is not None:
            self._scripted = SetByScript(self._surroundings, model.module)
        self._evaluated, self._loadings = 0, 0

    # --- what scripts call -------------------------------------------------------------------------

    def lifted(self) -> AbstractContextManager:
        """A context in which something of the framework's is at work, which may touch parameters; it may be nested."""
        return self._touch.lifted()

    def train(self) -> float:
        """Train one step; returns the mean loss over all micro-batches of all replicas, on every worker.

        A newcomer's script is given the losses of steps that are over, and nothing is computed.  Raises DataEnded where
        plain iterators have ended and don't fill the step.
        """
        try:
            return self._train()
        except DataEnded as ended:
            self.feed.data_ended(ended.step)
            raise

    def _train(self) -> float:
        with self.lifted():
            self._begin_training()
            if self._newcomer is not None and (past := self._past_loss(self._newcomer)) is not None:
                return past
            self._note_scripts()
            self._as_started.check()
            self.start()
            if not self._running.settled and (self._surroundings.other_modes or self._surroundings.changed()):
                self.settle()  # with what the script has changed for the next step as it was
            self.feed.begin()
            if self._framework.compute is None:  # a script that runs its forward itself says in which mode
                self._framework.model.module.train()
            self._surroundings.remember()
            try:
                self._checkpoints.make_if_due(self.step + 1)
                losses = self._running.train(self.step + 1)
            except JobEnded as end:
                if end.code == TRY_AGAIN:
                    self.save(self._checkpoints.folder)
                raise
            self._surroundings.leave() if self._scripted is None else self._scripted.end()
            return sum(losses.values()) / len(losses)

    def steps(self) -> Iterator[Any]:
        """Train step after step, all micro-batches of which the script pushes: a generator, which yields what it needs
        of the script (core/worker/pushed.py).
        """
        return self._running.steps()

    @contextmanager
    def pushing(self, hear: Callable[[], None], joins: bool = False) -> Iterator[None]:
        """A context in which :meth:`steps` go on; outside of it ``hear()`` recovers from a membership change that the
        script meets.  ``joins``: the script has not come to its first step yet.
        """
        with self.lifted():
            if not joins:
                self._begin_training()
            self._as_started.check()
            self.start()
            self.feed.begin()
            self._session.between_steps = None
            try:
                yield
            finally:
                self._session.between_steps = hear

    def join(self) -> None:
        """Return when this newcomer, whose script begins where the others are, is a member with its stage's state."""
        with self.lifted():
            self.feed.begin()
            self._ask()
            loop = self._prepared()
            loop.come_in()
            self._take_part(loop)

    def drop_step(self) -> None:
        """Note that the script ends in the middle of a step, without which the others' have to end too."""
        session = self._session
        session.heartbeats.step = self.step
        if session.is_first:
            session.note(
                "data",
                f"the script of {session} ends in the middle of step {self.step + 1}: what was drawn for that is "
                "dropped, and the scripts of all have to end there",
                step=self.step + 1,
            )

    def between_steps(self) -> None:
        """Recover from a membership change that the script meets between two steps."""
        self._between_steps()

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
            self._store.drop_sums(self.step)

    def evaluate(self, batches: Sequence[Tensors], count: int) -> float:
        """The mean loss of ``count`` micro-batches of each replica, on every worker, after all steps so far, whoever
        dies meanwhile.

        ``batches``: this worker's, packed (runtime/movers/batches.py), where it is of the first or the last stage.
        """
        with self.lifted(), self.apart():
            self.start()
            self.settle()
            self._framework.model.module.eval()
            losses = self._running.evaluate(batches, count)
            return sum(losses.values()) / len(losses)

    def await_others(self) -> None:
        """Wait, behind the end of the script, until nobody needs this worker: it may be, to replay a stage."""
        self.settle()
        if self._log is not None and self._waiting_loop is not None:
            with self.lifted(), self._surroundings.restored():
                self._waiting_loop.finish()

    def finish(self) -> None:
        """Wait until everybody's last step is committed, report, and close; then this worker may go."""
        self.settle()
        store = self._store
        let_go = (
            f"; recycle.keep_bytes let {store.let_go} of them go before their step was committed"
            if store.let_go
            else ""
        )
        self._session.note(
            "peak",
            f"seat {self.seat} held at most {store.peak} micro-batches, and {store.peak_weight} bytes of boundary "
            "tensors for its peers, "
            f"sent or still to be sent{let_go}",
            seat=str(self.seat),
            held=store.peak,
            kept_bytes=store.peak_weight,
            dropped=store.let_go,
        )
        for files in (self._trace, self._log):
            if files is not None:
                files.close()
        if self._waiting_loop is not None:
            self._worker.serve_now(waiting=True)
        self.transfers.close()
        self._transport.close()

    # --- a worker that comes back ----------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether this worker has come into a job that trains, and its script is not at one with the others' yet."""
        return self._newcomer is not None

    def recorded_evaluation(self) -> float | None:
        """The mean loss of an evaluation that was over before this worker came back; None where it takes part.

        Called in the place of :meth:`evaluate`, before any data is read for that.
        """
        if self._newcomer is None or self._meets(end_of(self._newcomer.evaluated + 1)):
            return None
        return self._newcomer.evaluation()

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
        self.joined(loop.machine.stepped, loop.handed)

    @property
    def _in_step(self) -> bool:
        """Whether the state is that of the script's step; a newcomer's is not before it has caught up."""
        if self._newcomer is None:
            return True
        return self._waiting_loop is not None and self._waiting_loop.followed == self._newcomer.position

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
        self._on_join.add(callback, state)

    def state_for_newcomer(self) -> bytes:
        """What the script hands over to a newcomer of this stage, by ``on_join``.

        Called between two steps that are committed, in the thread that trains, at the lowest live rank of the stage.
        """
        return self._on_join.state()

    def joined(self, step: int, state: bytes) -> None:
        """Go on as a member: the stage's state is here, that after ``step``, and a peer's script gives ``state``.

        Called in a newcomer, in the thread that trains, before its first step.  Raises RecycleError where ``state``
        does not suit the script.
        """
        self._on_join.joined(step, state)

    # --- for the framework's own step ----------------------------------------------------------------

    def clip(self) -> None:
        """Clip ``parameter.grad`` as the step that is being applied wants it."""
        self._stepping.clip()

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm with regard to which others have applied the step that is being applied; None where nobody has."""
        return self._stepping.norm()

    @property
    def _running(self) -> BlockingLoop:
        assert self._loop is not None, "training has not begun"
        return self._loop

    @property
    def program(self) -> StepProgram | None:
        """The program that this worker runs, or has run last; None before the first step."""
        return None if self._loop is None else self._worker.program

    @property
    def missing(self) -> tuple[Seat, ...]:
        """The seats whose worker is lost."""
        return (
            ()
            if self._loop is None
            else tuple(seat for seat in self.topology.seats if seat not in self._session.roster.seats)
        )

    @property
    def may_have_replayed(self) -> bool:
        """Whether somebody may have come back in the middle of what the others do between two steps."""
        return self._settings.log is not None and any(member.incarnation for member in self._session.roster)

    # --- starting ------------------------------------------------------------------------------------

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
            self._say_fingerprint(loop.machine.stepped)
        self._begin(loop)

    def _prepared(self) -> BlockingLoop:
        """The loop by which this worker trains; made once, before anybody is asked or waited for."""
        if self._waiting_loop is not None:
            return self._waiting_loop
        planner.warm()  # so that no failure has to wait for a compiler
        session, settings, shape = self._session, self._settings, self.topology
        machine = StepMachine(self.step)
        self._store.rewind(machine.stepped, valid_from=0)
        waits, costs, policy = planning(settings, self._framework, shape)
        judging, lockstep = Judging(waits, settings.clip == "validate"), self._lockstep()
        log = None if self._log is None else self._log.steps
        self._worker = (Worker if self._framework.pushed is None else PushedWorker)(
            self._world, shape, self._store, machine, judging, self.feed.iterator_data, Stopwatch(costs), log, lockstep
        )
        if self._framework.pushed is not None:
            assert isinstance(self._worker, PushedWorker), "of a script that pushes"
            self._worker.script = self._framework.pushed.script
        replay = None
        if (replays := self._replays()) is not None:
            self._worker.helper = replays.helper(shape)
            self._companion = replays.machine(CompanionMachine)
            along = replays.replay(self._companion, machine, shape)
            self._worker.companion = Companion(self._companion, self._store, machine, along, self._worker.undo)
            if self._newcomer is not None:
                replay = replays.replay(replays.machine(ReplayMachine), machine, shape)
        session.idle = self._worker.serve_now
        self._waiting_loop = BlockingLoop(
            session,
            self._worker,
            self._world,
            shape,
            costs,
            policy,
            machine,
            self._between_steps,
            settings.max_slowdown,
            lambda: self._on_join.wants_state,
            replay,
            lockstep,
            settings.unit == "replica",
        )
        return self._waiting_loop

    def _replays(self) -> Replays | None:
        """How stages are replayed here; None where nothing is logged."""
        if self._log is None:
            return None
        assert self._scripted is not None, "in a job that logs it is kept what scripts set"
        return Replays(
            self._session,
            self._settings,
            self._framework,
            self._log,
            self._world,
            self._transport.address,
            self.state,
            self._store,
            self._stepping,
            self._operations,
            self._contributions,
            self._scripted,
            self.feed,
            self._randomness,
            self.apart,
            lambda: self._stage.loss_scale,
        )

    def _lockstep(self) -> Lockstep | None:
        """The lockstep with the others that hold this worker's seat; None where it does so alone."""
        framework = self._framework
        if framework.shards == 1:
            return None
        lockstep = Lockstep(self._world, self.seat, framework.shard, framework.shards)
        self._world.keep_in_step(lockstep)
        return lockstep

    def _begin(self, loop: BlockingLoop) -> None:
        """Train by ``loop`` from now on."""
        session, self._loop = self._session, loop
        loop.count_on(self._evaluated)
        if (
            self.seat.replica == self._framework.shard == session.incarnation == 0
        ):  # one of each stage: nobody else knows what it trains
            session.note("stage", f"stage {self.seat.stage} is built", **described(self._framework))
        files, reach = self._framework.checkpoints, self._world.reach
        self._checkpoints = JobCheckpoints(
            session,
            self._settings,
            loop,
            reach,
            files,
            self.state,
            self.run_dir,
            self._between_steps,
            self.seat,
            self._place,
            lambda: self._worker.valid_from,
            self._log_choice(),
        )
        session.between_steps = self._between_steps

    def _log_choice(self) -> LogChoice | None:
        """The choice of what is logged, where anything is."""
        if self._log is None:
            return None
        size = self._framework.micro_batch_size
        return self._log.choice(self._session, self._settings, lambda: self.topology, size, self.state)

    def _place(self) -> IteratorPlace | None:
        return self.feed.place(self.topology.replicas, self._framework.micro_batch_size)

    def resume_iterators(self, folder: Path) -> None:
        """Take over where the checkpoint ``folder``, which was loaded before training, says that plain iterators stood.

        Raises RecycleError where ``recycle.resume_iterators`` is set and it can't be had.
        """
        if self._loop is None:
            size = self._framework.micro_batch_size
            self.feed.resume(folder, self.topology.replicas, size, self._settings.resume_iterators)

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

    def _begin_training(self) -> None:
        """Note that the first step begins, once."""
        startup, begun, self._trains = self._session.startup, self._trains, True
        if startup is not None and not begun:
            startup.begin_training(trained(self._framework.model.module))

    def _ask(self) -> None:
        """Ask to take part, once."""
        if self._asked:
            return
        self._asked, session, log = True, self._session, self._log
        if self._newcomer is None:  # of whom the others are told, and it of them
            session.rewind(self.step)
        address, shard = self._transport.address, self._framework.shard
        member = Member(session.rank, self.seat, address, session.host, session.incarnation, shard)
        session.heartbeats.start(lease_s(self._settings.deadlines))
        where = None if log is None else log.where(session, self._settings.transfer_interface)
        boundaries = ALL if log is None else log.boundaries
        job = job_spec(self._settings, self._framework, self.topology, self.run_dir, boundaries)
        session.send(Ready(member, self.step, job, where))

    def _make_stage(self, blocks: BlockSums | None) -> Stage | ScriptedStage | PushedStage:
        framework, model = self._framework, self._framework.model
        if framework.pushed is not None:
            return framework.pushed
        randomness = partial(self._randomness, self.seat.stage, framework.forward)
        if framework.compute is not None:
            if blocks is not None:
                raise RecycleError(
                    "recycle.exact with a backward that the script calls: its sums are not cut into blocks yet; leave "
                    "recycle.exact out"
                )
            return ScriptedStage(model, framework.compute, randomness, partial(self._session.note, "warning"))
        deferred = DeferredWeights(model.module) if self._settings.split_backward else None
        return Stage(
            model,
            deferred,
            randomness,
            blocks,
            framework.masters,
            self._say_fused,
            partial(self._session.note, "warning"),
        )

    def _make_stepping(self, blocks: BlockSums | None, scale: LossScale) -> Stepping:
        framework, parameters = self._framework, self._framework.parameters
        self._contributions = Contributions(parameters, blocks, framework.model.device)
        gradients = self._gradients = Gradients(framework.buckets, self._store, parameters, blocks, framework.tied)
        elsewhere = {weight.parameter for weight in framework.tied if weight.stages[0] != self.seat.stage}
        clipping = Clipping(self._store, parameters, framework.norm or TrueNorm(elsewhere), framework.clipping)
        scripted = framework.pushed is not None or framework.compute is not None  # so there is one stage
        undo = (
            NoUndo()
            if scripted and self._settings.clip != "validate"
            else undo_record(self._settings.undo, self.state, gradients)
        )
        units = partial(stage_units, framework, self.state, gradients)
        interface, device = self._settings.transfer_interface, framework.model.device
        self.transfers = Transfers(self._session, self.seat.stage, interface, device, units)
        return Stepping(
            framework.optimizer,
            self._stage,
            parameters,
            gradients,
            clipping,
            scale,
            undo,
            self._session,
            self.hash.wait,
        )

    def _blocks(self) -> Blocks:
        return self._settings.policy(False, self.topology.stages).blocks(self.topology)

    # --- a step --------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        """Recover from a membership change that something which the script does outside a step has met; then that is
        tried again.
        """
        with self.lifted(), self._surroundings.restored():
            self._running.catch_up()

    def _hand_on(self, datum: Datum, batch: Tensors, taker: Seat) -> None:
        self._world.transfer(datum, batch, taker, self._store.valid_from)

    def _changed(self) -> Iterator[torch.Tensor]:
        """The tensors that a step changes, and buffers, which what is left of a step reads; those of a newcomer are its
        script's own.
        """
        yield from self.state.tensors().values()
        if self._newcomer is None:
            yield from self._framework.model.module.buffers()

    def _randomness(
        self,
        stage: int,
        forward: Callable[[int, int], AbstractContextManager],
        micro_batch: MicroBatch,
        step: int,
        half: str,
    ) -> AbstractContextManager:
        """The context in which a micro-batch of ``stage``, whose forwards draw by ``forward``, draws."""
        if self._settings.rng == "stream":
            return nullcontext()
        seed = key(self._settings.seed, step, micro_batch, stage, half)
        return (
            keyed_torch(seed, self._framework.model.device)
            if half
            else forward(seed, self._framework.cursor.before(step) + micro_batch.index)
        )

    def _short_of_pinned(self, size: int) -> None:
        self._session.note(
            "warning",
            f"recycle.pinned_bytes {self._settings.pinned_bytes}, or what the machine lets one pin, is used up at seat "
            f"{self.seat}, and {size} bytes more were asked for: from now on copies from and to the accelerator keep "
            "this worker waiting; raise it (ulimit -l and a container's limits too), or lower recycle.keep_bytes",
            seat=str(self.seat),
        )

    def _say_fused(self, names: tuple[str, ...]) -> None:
        self._session.note(
            "fused",
            f"the backward of {', '.join(names)} on stage {self.seat.stage} is not split any more: "
            "a forward differentiates by its parameters, or twice through it, or they have hooks; "
            "the numbers are stock's, with less to overlap",
            stage=self.seat.stage,
            layers=names,
        )

    def _applied(self, step: int) -> None:
        if (norm := self._framework.judged()) is not None:
            self._store.put(Datum("norm", self.seat.stage, None, step), norm)
        every = self._settings.check_replicas
        along = self._companion is not None and self._companion.at_work  # the others have done so long ago
        if every and not along and step % every == 0:
            self._say_fingerprint(step)

    def _say_fingerprint(self, step: int) -> None:
        """Send the state's hash, for the coordinator to compare it with those of the other replicas."""
        session = self._session
        with session.heartbeats.at(ELSEWHERE, "the hash of its state"):
            copies = {weight.name: fingerprint(weight.parameter) for weight in self._framework.tied}
            session.send(Fingerprint(session.rank, step, self.state.digest(), copies))

    def _tell_hash(self, step: int, digest: str) -> None:
        """Send the hash that the coordinator has asked for, from the thread that has computed it."""
        session = self._session
        session.send(StateHash(session.rank, step, digest))
        with session.changed:
            session.changed.notify_all()

    # --- between steps -------------------------------------------------------------------------------

    def barrier(self, place: str, values: dict[str, Any] | None = None) -> BarrierPassed:
        """Return when all live workers have come to ``place`` with all their steps committed, with the values of
        all.
        """
        while True:
            self.settle()
            try:
                return self._running.barrier(place, values or {})
            except Interrupted:
                self._between_steps()

    def agree(self, place: str, value: int) -> None:
        """Check that all live workers call ``place``, a call of the script's, with the same ``value``.

        Raises RecycleError where they do not.  Before the first step nobody asks.
        """
        if self._loop is None:
            return
        self._checkpoints.conclude()
        asked = self.barrier(place, {str(self._session.rank): value}).values
        if len(values := sorted(set(asked.values()))) > 1:
            raise RecycleError(
                f"{place} was called with {', '.join(map(str, values))}: call it with the same number on every worker"
            )

    def resize(self, micro_batches: int) -> None:
        """Train with so many micro-batches a replica from the next step on.

        The framework knows of it already, and all have agreed on it.
        """
        self._framework.cursor.change(self.step + 1, micro_batches)
        self.topology = replace(self.topology, micro_batches=micro_batches)
        self._stage.resize(micro_batches, self._blocks() if self._settings.exact else None)
        if self._waiting_loop is not None and (replays := self._replays()) is not None:
            self._worker.helper = replays.helper(self.topology)
        if self._loop is not None:
            self._world.reach("resize")
            self._worker.resize(self.topology)
            self._loop.resize(self.topology, self._framework.batch())

    def save(self, folder: Path, tag: str | None = None, latest: bool = True, files: Checkpoints | None = None) -> None:
        """Save the checkpoint ``folder``/``tag`` of the last step, in place on return, complete also while workers are
        missing.

        ``tag`` None: by the step; ``latest``: a file of that name gets the tag; ``files``: instead of the framework's,
        where the script adds to them.  Raises NotSaved, on all workers, where one can't write it.  A newcomer's script
        comes by what the others have saved.
        """
        tag = str(tag if tag is not None else f"global_step{self.step}")
        if self.behind and not self._meets(end_of_saving(saving_place(folder, tag))):
            return
        with self.lifted(), self.apart():
            self.start()
            self._checkpoints.conclude()
            self.settle()
            self._checkpoints.save(folder, tag, latest, files, self.step)

    def begin_loading(self, place: str) -> None:
        """Prepare for a script's loading a checkpoint, at ``place``.

        Where training has begun, everybody does so at the same step, and all steps so far are committed.
        """
        self.hash.wait()
        if self._loop is not None:
            self._checkpoints.conclude()
            self.barrier(place)
            self._worker.forget_committed()
            self._world.reach("load.start")

    def recall_loading(self, place: str) -> Any:
        """What loading a checkpoint, by the call ``place``, gave the predecessor of this newcomer's script, whose
        counters and rates are taken over; what else was loaded comes with the state.

        Raises RecycleError where it is not kept.
        """
        assert self._session.startup is not None, "groups are made first"
        self._loadings += 1
        found, small = self._session.startup.recall(f"{place}, number {self._loadings}")
        self.state.put(small)
        return found

    def remember_loading(self, place: str, found: Any = None) -> None:
        """Keep for a newcomer what loading a checkpoint, by the call ``place``, has given the script."""
        self._loadings += 1
        small = self.state.small()
        small["optimizer"] |= {"state": {}}  # comes with the tensors
        if self._session.startup is not None:
            self._session.startup.remember(f"{place}, number {self._loadings}", (found, small))

    def loaded(self, whole: bool) -> None:
        """Go on from a checkpoint that is loaded, and from whose step the framework counts.

        Everybody goes on from there, with the data and the random numbers of the first time.  ``whole``: the
        optimizer's state was loaded too.
        """
        framework, step = self._framework, self._framework.optimizer.steps
        self.state.rewritten()
        framework.cursor.change(step + 1, self.topology.micro_batches)
        self._from_checkpoint = True
        if self._loop is not None:
            self._world.reach("load.end")
            self._worker.rewind(step)
            if whole or self._settings.undo != "inverse":  # whose roundings stay where not all is loaded
                self._say_fingerprint(step)
            self._loop.loaded(step)
            self._checkpoints.loaded(step)
