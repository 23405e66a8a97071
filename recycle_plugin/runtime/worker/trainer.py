"""The trainer of one worker, whatever framework built the model.

It runs the worker's steps, what its script does between them, and recovery from the loss of others. ``train`` returns
before its step is committed.  What it returned stays final: recovery finishes the step inside the next call.  Whatever
of torch's touches parameters or the optimizer's state first, in the thread that trains, waits for the commit
(runtime/state/touch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, BarrierPassed
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.worker.checkpoint_saving import end_of_saving
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.core.worker.loop_ports import DataEnded, StepProgram
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.movers.batches import Tensors
from recycle_plugin.runtime.stage.ports import Checkpoints, Framework
from recycle_plugin.runtime.worker.checkpoint_files import saving_place
from recycle_plugin.runtime.worker.participant import Participant
from recycle_plugin.settings.schema import Settings


class Trainer(Participant):
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
        super().__init__(session, settings, framework)
        self.state.check()
        self._loadings = 0

    # --- what scripts call -------------------------------------------------------------------------

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
            self._parts.as_started.check()
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

    def skip_to_present(self) -> None:
        """Have a newcomer's script, which goes by the number of the last step, leave out steps that are over."""
        with self.lifted():
            self._begin_training()
            while self._newcomer is not None and self._newcomer.may_skip():
                self._past_loss(self._newcomer)

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
            self._parts.as_started.check()
            self.start()
            self.feed.begin()
            self._session.between_steps = None
            try:
                yield
            finally:
                self._session.between_steps = hear

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
        if self._parts.log is not None and self._waiting_loop is not None:
            with self.lifted(), self._surroundings.restored():
                self._waiting_loop.finish()

    def finish(self) -> None:
        """Wait until everybody's last step is committed, report, and close; then this worker may go."""
        self.settle()
        store = self._parts.store
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
        for files in (self._parts.trace, self._parts.log):
            if files is not None:
                files.close()
        if self._waiting_loop is not None:
            self._worker.serve_now(waiting=True)
        self._parts.transfers.close()
        self._parts.transport.close()

    # --- for the framework's own step ----------------------------------------------------------------

    def clip(self) -> None:
        """Clip ``parameter.grad`` as the step that is being applied wants it."""
        self._parts.stepping.clip()

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm with regard to which others have applied the step that is being applied; None where nobody has."""
        return self._parts.stepping.norm()

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

    def resume_iterators(self, folder: Path) -> None:
        """Take over where the checkpoint ``folder``, which was loaded before training, says that plain iterators stood.

        Raises RecycleError where ``recycle.resume_iterators`` is set and it can't be had.
        """
        if self._loop is None:
            size = self._framework.micro_batch_size
            self.feed.resume(folder, self.topology.replicas, size, self._settings.resume_iterators)

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
        self._parts.resize(micro_batches)
        if self._waiting_loop is not None and (replays := self._replays()) is not None:
            self._worker.helper = replays.helper()
        if self._loop is not None:
            self._parts.world.reach("resize")
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
        self._parts.hash.finish()
        if self._loop is not None:
            self._checkpoints.conclude()
            self.barrier(place)
            self._worker.forget_committed()
            self._parts.world.reach("load.start")

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
        small["optimizer"] |= {"state": {}}  # comes with the tensors, as what else the optimizer holds
        del small["attributes"]
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
            self._parts.world.reach("load.end")
            self._worker.rewind(step)
            if whole or self._settings.undo != "inverse":  # whose roundings stay where not all is loaded
                self._parts.say_fingerprint(step)
            self._loop.loaded(step)
            self._checkpoints.loaded(step)
