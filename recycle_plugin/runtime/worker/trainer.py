"""The trainer of one worker, for any framework.

It runs the worker's steps, what its script does between them, and recovery from losses. ``train`` returns before its
step is committed, but what it returns is final: recovery finishes the step inside the next call. The training thread
waits for the commit when torch code in it first touches parameters or the optimizer's state (runtime/state/touch.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, BarrierPassed
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.losses import Loss, mean
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker import pushed
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.core.worker.loop_ports import DataEnded
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control import notice
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import Tensors
from recycle_plugin.runtime.stage.ports import CheckpointFormat, Framework, described, trained
from recycle_plugin.runtime.state.surroundings import SetByScript, Surroundings
from recycle_plugin.runtime.state.touch import FirstTouch
from recycle_plugin.runtime.worker.assembly import Assembled, assembled
from recycle_plugin.runtime.worker.blocking_loop import BlockingLoop, drain
from recycle_plugin.runtime.worker.brought import by_rank
from recycle_plugin.runtime.worker.checkpoint_files import Latest, saving_call
from recycle_plugin.runtime.worker.checkpoints import JobCheckpoints
from recycle_plugin.runtime.worker.entry import Entry
from recycle_plugin.runtime.worker.job_record import ready
from recycle_plugin.runtime.worker.loading import LoadingRecord
from recycle_plugin.runtime.worker.log_choice import LogChoice
from recycle_plugin.runtime.worker.on_join import Callback, Give
from recycle_plugin.runtime.worker.parts import Parts
from recycle_plugin.settings.schema import Settings


class Trainer:
    """Trains one worker's stage, built by ``framework``. All workers build theirs alike before anybody trains.
    ``feed``: where micro-batches come from. ``state``: all that a step changes. ``loading``: the results of the
    script's loading of checkpoints. Raises RecycleError for a second trainer in a process.
    """

    def __init__(self, session: Session, settings: Settings, framework: Framework) -> None:
        if session.hooks.trains:
            raise RecycleError(
                "a second engine, pipeline or set of replicas in this process: only one per process is supported; "
                "make one, and give it all layers"
            )
        session.hooks.trains, session.hooks.through = True, self.await_others
        self._session, self._settings, self._framework = session, settings, framework
        self._parts = parts = Parts(session, settings, framework)
        self.seat, self.feed, self.state = parts.seat, parts.feed, parts.state
        self.loading = LoadingRecord(session, parts.state)
        self._touch = FirstTouch(
            self._changed,
            lambda: self.settled and self._caught_up and not self.state.watches,
            self._show,
            lambda: self._entry is not None and self._entry.drops_changes,
        )
        os.register_at_fork(before=self._forks)
        model = framework.model
        self._surroundings = Surroundings(
            model.module, model.device.kind, lambda: framework.optimizer.wrapped.param_groups
        )
        self._assembled: Assembled | None = None  # assembled, perhaps before its loop begins
        self._loop: BlockingLoop | None = None
        self._checkpoints: JobCheckpoints  # set with the loop
        self._from_checkpoint = False  # a checkpoint was loaded before training
        self._asked = self._trains = False
        self._evaluated = 0
        # by micro-batch, of the last step run here if a framework logs more of each, or of the last evaluation
        self.losses: Mapping[str, Loss] = {}
        self._scripted: SetByScript | None = None  # a replay may have to set it again
        if session.view.newcomer or parts.log is not None:
            self._scripted = SetByScript(self._surroundings, model.module)
        self._entry: Entry | None = None
        if session.view.newcomer:
            assert self._scripted is not None, "a newcomer's steps may be replayed"
            self._entry = Entry(parts, self._scripted, self._ask, lambda: self._made.loop.newcomer, self._let_in)
        self.state.check()
        if settings.leave_on is not None:
            notice.watch(settings.leave_on, session)
            if framework.compute is not None and session.rank == 0:
                session.note(
                    "warning",
                    "recycle.leave_on: if a notice ends the job, no checkpoint is made, since this script calls "
                    "forward and backward itself: have it save often",
                )

    @property
    def topology(self) -> Topology:
        """The job's replicas, stages and micro-batches."""
        return self._parts.topology

    def lifted(self) -> AbstractContextManager[object]:
        """A context in which code of the framework's may touch parameters; it may be nested."""
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
        """Wait until every step that :meth:`train` has returned for is committed, whoever dies meanwhile."""
        if self._loop is not None:
            with self.lifted(), self._surroundings.restored():
                self._loop.settle()
                self.state.touched()
            self._parts.store.drop_sums(self.step)

    def _forks(self) -> None:
        """Settle before a fork, which copies parameters; not in a newcomer, where it may raise: no fork may fail."""
        if self._entry is None:
            self._touch.now()

    # --- what scripts call -------------------------------------------------------------------------

    def train(self) -> float:
        """Train one step. Returns the mean loss over all micro-batches of all replicas, on every worker. A newcomer's
        script gets the losses of steps that are over, without computing. Raises DataEnded if plain iterators have ended
        and can't fill the step.
        """
        try:
            return self._train()
        except DataEnded as ended:
            self.feed.data_ended(ended.step)
            raise

    def _train(self) -> float:
        with self.lifted():
            self._begin_training()
            self._see_trained()
            if self._entry is not None and (past := self._entry.past_loss()) is not None:
                return past
            if self._scripted is not None:  # steps up to the durable checkpoint are not replayed
                self._scripted.forget(self._session.view.durable)
                self._scripted.begin(self.step + 1)
            self.start()
            if not self._running.settled and (self._surroundings.other_modes or self._surroundings.changed()):
                self.settle()  # with the script's changes for the next step put aside
            self.feed.begin()
            if self._framework.compute is None:  # a script that runs its own forward sets the mode
                self._framework.model.module.train()
            self._surroundings.remember()
            step = self.step + 1
            try:
                self._checkpoints.make_if_due(step)
                loss = drain(self._running.training.train(step))
                self.losses = self._session.view.losses(step)
            except JobEnded as end:
                if self._framework.saves_last and self._saves_at(end):
                    self.save(self._checkpoints.agree_on_folder(self.barrier))
                raise
            except RuntimeError as error:
                if not isinstance(error, RecycleError):  # autograd's, of a weight whose gradient was still to come
                    self._check_kept(step)
                raise
            self._check_kept(step)
            self._surroundings.leave() if self._scripted is None else self._scripted.end()
            return loss

    def _see_trained(self) -> None:
        """Train parameters that the script has thawed since the last step; stop training those it has frozen."""
        if not self._surroundings.retrained:
            return
        if self._entry is not None:
            self._entry.check_trained()
        else:
            self.settle()  # with the parameters trained before
        self._parts.retrain(self.step + 1)
        self._surroundings.remember_trained()

    def _check_kept(self, step: int) -> None:
        """Raise RecycleError if the set of trained parameters has changed within ``step``."""
        if retrained := self._surroundings.retrained:
            raise RecycleError(
                f"{retrained} inside of step {step}, as by a layer's forward or a hook: do that between two steps"
            )

    def _saves_at(self, end: JobEnded) -> bool:
        """Whether to save a checkpoint before the script is left: if ``end`` asks for one, or at any end that all
        workers come to in a job with automatic checkpoints.
        """
        planned = self._session.view.end
        of_all = planned is not None and bool(planned.step) and not planned.failed
        return end.code == TRY_AGAIN or (of_all and self._settings.checkpoint is not None)

    def skip_to_present(self) -> None:
        """Skip steps that are over in a newcomer's script that counts by the number of the last step."""
        with self.lifted():
            self._begin_training()
            while self._entry is not None and self._entry.may_skip():
                self._entry.past_loss()

    def steps(self) -> Iterator[Any]:
        """Train step after step for a script that pushes micro-batches; yield each need of the script
        (core.worker.pushed).
        """
        return pushed.steps(self._running.training)

    @contextmanager
    def pushing(self, hear: Callable[[], None], joins: bool = False) -> Iterator[None]:
        """A context in which :meth:`steps` go on. Outside of it ``hear()`` recovers from membership changes that the
        script meets. ``joins``: the script has not come to its first step yet.
        """
        with self.lifted():
            if not joins:
                self._begin_training()
            self._parts.as_started.check()
            self.start()
            self.feed.begin()
            self._session.hooks.between_steps = None
            try:
                yield
            finally:
                self._session.hooks.between_steps = hear

    def drop_step(self) -> None:
        """Record that the script ends in the middle of a step; the other scripts have to end there too."""
        session = self._session
        session.view.begun = self.step
        if session.view.is_first:
            session.note(
                "data",
                f"the script of {session.view} ends in the middle of step {self.step + 1}: the data drawn for that is "
                "dropped, and the scripts of all workers have to end there",
                step=self.step + 1,
            )

    def evaluate(self, batches: Sequence[Tensors], count: int) -> float:
        """Return the mean loss of ``count`` micro-batches of each replica, on every worker, after all steps so far,
        whoever dies meanwhile. ``batches``: this worker's, packed (runtime/movers/batches.py), on the first and the
        last stage.
        """
        with self.lifted(), self.apart():
            self.start()
            self.settle()
            self._framework.model.module.eval()
            self.losses = drain(self._running.evaluations.run(batches, count))
            return mean(self.losses)

    def await_others(self) -> None:
        """Wait, after the end of the script, until nobody needs this worker: it may have to replay a stage."""
        self.settle()
        if self._parts.log is not None and self._assembled is not None:
            with self.lifted(), self._surroundings.restored():
                drain(self._assembled.loop.training.finish())

    def finish(self) -> None:
        """Wait until everybody's last step is committed, report, and close; then this worker may leave."""
        self.settle()
        # told by its goodbye: a script that got all its steps has begun none here
        self._session.view.begun = max(self._session.view.begun, self.step)
        self._parts.finish()
        if self._assembled is not None:
            self._assembled.worker.serve_now(waiting=True)
        self._parts.close()

    # --- what others ask of it -----------------------------------------------------------------------

    @property
    def missing(self) -> tuple[Seat, ...]:
        """The seats whose worker is lost."""
        return (
            ()
            if self._loop is None
            else tuple(seat for seat in self.topology.seats if seat not in self._session.view.roster.seats)
        )

    @property
    def may_have_replayed(self) -> bool:
        """Whether a worker may have come back in the middle of what the others do between two steps."""
        return self._settings.log is not None and any(member.incarnation for member in self._session.view.roster)

    # --- starting ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Enrol, wait for everybody and make the plan, once, before the first step and after loading a checkpoint."""
        if self._loop is not None:
            return
        loop = self._made.loop
        self._ask()
        drain(loop.training.start())
        if self._from_checkpoint:
            self._parts.say_fingerprint(loop.machine.stepped)
        self._begin(loop)

    @property
    def _made(self) -> Assembled:
        """The loop by which this worker trains, made once, before it asks or waits for others."""
        if self._assembled is None:
            self._assembled = assembled(self._parts, self.step, self.between_steps, self._scripted, self.apart)
        return self._assembled

    def _begin(self, loop: BlockingLoop) -> None:
        """Train by ``loop`` from now on."""
        session, self._loop = self._session, loop
        loop.evaluations.count_on(self._evaluated)
        # one worker of each stage reports it: nobody else knows what the stage trains
        if self.seat.replica == self._framework.shard == session.view.incarnation == 0:
            session.note("stage", f"stage {self.seat.stage} is built", **described(self._framework))
        self._checkpoints = JobCheckpoints(
            self._parts,
            loop,
            self.between_steps,
            lambda *to: self.feed.write_place(self.topology.replicas, self._framework.micro_batch_size, *to),
            lambda: self._made.worker.valid_from,
            self._log_choice(),
        )
        session.hooks.between_steps = self.between_steps

    def _log_choice(self) -> LogChoice | None:
        if self._parts.log is None:
            return None
        return self._parts.log.choice(self._session, self._settings, lambda: self.topology, self.state)

    def _begin_training(self) -> None:
        """Record that the first step begins, once."""
        startup, begun, self._trains = self._session.hooks.startup, self._trains, True
        if startup is not None and not begun:
            startup.begin_training(trained(self._framework.model.module))

    def _ask(self) -> None:
        if self._asked:
            return
        self._asked, session = True, self._session
        if self._entry is None:  # a newcomer is told where the job is
            session.view.rewind(self.step)
        session.begin_heartbeats(self._settings.deadlines)
        session.send(ready(self._parts, self.step))

    @property
    def _running(self) -> BlockingLoop:
        assert self._loop is not None, "training has not begun"
        return self._loop

    def between_steps(self) -> None:
        """Recover from a membership change that the script meets outside a step, in an operation then repeated."""
        with self.lifted(), self._surroundings.restored():
            drain(self._running.training.catch_up())

    def _changed(self) -> Iterator[torch.Tensor]:
        """Yield tensors that a step changes, and those that the rest of a step reads, a newcomer's excepted: buffers,
        and learning rates in tensors, which an undo takes back too.
        """
        yield from self.state.tensors().values()
        if self._entry is None:
            yield from self._framework.model.module.buffers()
            yield from self.state.optimizer.rates()

    # --- between steps -------------------------------------------------------------------------------

    def barrier(self, place: str, values: dict[str, Any] | None = None) -> BarrierPassed:
        """Wait until all live workers have come to ``place`` with their steps committed. Returns the values of all."""
        while True:
            self.settle()
            try:
                return drain(self._running.training.barrier(Barrier(Meets.SCRIPT, place), values or {}))
            except Interrupted:
                self.between_steps()

    def agree(self, place: str, value: int) -> None:
        """Raise RecycleError unless all live workers call ``place``, a call of the script's, with the same ``value``.
        Before the first step nothing is checked.
        """
        if self._loop is None:
            return
        self._checkpoints.conclude()
        asked = by_rank(int, self.barrier(place, {str(self._session.rank): value}))
        if len(values := sorted(set(asked.values()))) > 1:
            raise RecycleError(
                f"{place} was called with {', '.join(map(str, values))}: call it with the same number on every worker"
            )

    def resize(self, micro_batches: int) -> None:
        """Train with so many micro-batches a replica after this step, as the framework does and all have agreed."""
        self._framework.cursor.change(self.step + 1, micro_batches)
        self._parts.resize(micro_batches)
        made = self._assembled
        if made is not None and made.replays is not None:
            made.worker.helper = made.replays.helper()
        if self._loop is not None:
            self._parts.world.reach("resize")
        if made is not None:
            made.worker.resize(self.topology)
        if self._loop is not None:
            self._loop.resize(self.topology, self._framework.batch())
        elif made is not None:  # a newcomer catches up with the others' resize
            made.loop.training.plan_for(self.topology)

    def save(
        self,
        folder: Path,
        tag: str | None = None,
        latest: bool | Latest = True,
        files: CheckpointFormat | None = None,
    ) -> None:
        """Save the last step's checkpoint in ``folder``/``tag``, complete even if workers are missing. It is in place
        when this returns.

        ``tag`` None: named by the step. ``latest``: as for a Checkpoint (checkpoint_files.py). ``files``: replaces
        the framework's format, if the script adds to it. A newcomer's script skips checkpoints that the others have
        saved. Raises NotSaved, on all workers, if one can't write its part.
        """
        tag = str(tag if tag is not None else f"global_step{self.step}")
        if self._entry is not None and not self._entry.meets(Barrier(Meets.SAVED, saving_call(folder, tag))):
            return
        with self.lifted(), self.apart():
            self.start()
            self._checkpoints.conclude()
            self.settle()
            self._checkpoints.save(folder, tag, latest, files, self.step)

    @property
    def folder(self) -> Path:
        """The folder for checkpoints for which the script has named none; known once training has begun."""
        return self._checkpoints.folder

    # --- loading a checkpoint ------------------------------------------------------------------------

    def resume_iterators(self, folder: Path) -> None:
        """Take the positions of plain iterators from the checkpoint ``folder``, which was loaded before training.
        Raises RecycleError if ``recycle.resume_iterators`` is set and they are not known.
        """
        if self._loop is None:
            size = self._framework.micro_batch_size
            self.feed.resume(folder, self.topology.replicas, size, self._settings.resume_iterators)

    def begin_loading(self, place: str) -> None:
        """Prepare for the script's loading of a checkpoint, by its call ``place``. During training all workers do so at
        the same step, with all steps so far committed.
        """
        self._parts.hash.finish()
        if self._loop is not None:
            self._checkpoints.conclude()
            self.barrier(place)
            self._made.worker.forget_committed()
            self._parts.world.reach("load.start")

    def loaded(self, whole: bool) -> None:
        """Go on from a loaded checkpoint, whose step the framework counts from. All workers go on with the data and
        random numbers of the first time. ``whole``: the optimizer's state was loaded too.
        """
        framework, step = self._framework, self._framework.optimizer.steps
        self.state.rewritten()
        framework.cursor.change(step + 1, self.topology.micro_batches)
        self._from_checkpoint = True
        if self._loop is not None:
            self._parts.world.reach("load.end")
            self._made.worker.rewind(step)
            if whole or self._settings.undo != "inverse":  # it rounds: what is not loaded may differ
                self._parts.say_fingerprint(step)
            drain(self._loop.training.loaded(step))
            self._checkpoints.loaded(step)

    # --- coming back -------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether this worker has come into a job that trains, and its script has not caught up with the others'."""
        return self._entry is not None

    def join(self) -> None:
        """Wait until this newcomer is a member with its stage's state. Its script begins at the others' step."""
        assert self._entry is not None, "only a newcomer comes to take part"
        with self.lifted():
            self._entry.join()

    def recorded_evaluation(self) -> float | None:
        """Return the mean loss of an evaluation that was over before this worker came back; None if it takes part.
        Called instead of :meth:`evaluate`, before any data is read for that.
        """
        return None if self._entry is None else self._entry.past_evaluation()

    def _let_in(self) -> None:
        assert self._entry is not None, "only a newcomer comes to take part"
        self._evaluated, self._entry = self._entry.evaluated, None
        loop = self._made.loop
        self._begin(loop)
        self._parts.on_join.joined(loop.machine.stepped, loop.newcomer.handed)

    @property
    def _caught_up(self) -> bool:
        """Whether the state is that of the script's step; a newcomer's is not until it has caught up."""
        return self._entry is None or self._entry.caught_up

    def _show(self) -> None:
        """Let the script touch parameters. Raises RecycleError if they are not those of its step."""
        if self._entry is not None:
            self._entry.check_caught_up()
        self.settle()

    def apart(self) -> AbstractContextManager[object]:
        """A context for something that a newcomer's script does not do over again."""
        return nullcontext() if self._session.hooks.startup is None else self._session.hooks.startup.apart()

    def on_join(self, callback: Callback, state: Give | None) -> None:
        """Have ``callback(step, state)`` called before a newcomer's first step, with a live peer's ``state()``."""
        self._parts.on_join.add(callback, state)
