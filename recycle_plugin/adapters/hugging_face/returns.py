"""Hugging Face's Trainer in a replica that rejoins: its loop goes on from the others' step.

A Trainer begins each step when it has the step's first batch, before it counts words over all ranks. Newcomers are
members from there on, so each collective of the loop has either all of them or none. All ranks then say whether they
are new. If one is, the first of the others gives the state of its loop, and each of them its loss that is not logged
yet.

A newcomer builds its engine, which then has the model's state, and takes the loop's state when training begins. It
passes over the epochs that are over, draws the present epoch in the others' order, skips what they have drawn, and
trains.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, ProgressCallback, TrainerState

from recycle_plugin.adapters.hugging_face.randomness import draw_on, drawn
from recycle_plugin.adapters.hugging_face.team import Team
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import Device

OWN = ("is_local_process_zero", "is_world_process_zero")  # fields of TrainerState that differ between ranks
COUNTS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")
FROM_PEERS = "the state of a peer"  # stands for a checkpoint's path


@dataclass
class Loop:
    """The state of a Trainer's loop before a step.

    ``drawn``: batches drawn in ``epoch``. ``seconds``: since the loop began. ``randomness``: states now; ``at_epoch``:
    at the epoch's first batch; ``synchronized``: what Accelerate has synchronised then. ``callbacks``: their exported
    states. ``loss``: the mean over the ranks of what they have not logged.
    """

    state: dict[str, Any]
    counts: dict[str, Any]
    epoch: int
    drawn: int
    seconds: float
    randomness: Any
    at_epoch: Any
    synchronized: list[torch.Tensor]
    scheduler: Any
    callbacks: list[tuple[str, dict[str, Any]]]
    loss: float = 0.0


class Returns:
    """The additions to Trainer's methods if replicas rejoin. Methods that get ``stock`` call it."""

    def __init__(self, team: Team, session: Session, engine: Any) -> None:
        self._team, self._session, self._engine = team, session, engine
        self._device: Device = device_of(engine.device)
        self._new = bool(session.view.newcomer)  # it has not reached its first step
        self._taken: Loop | None = None  # a newcomer's, from the others
        self._passing = self._new  # over epochs that are over
        self._epoch = self._drawn = 0
        self._began: float | None = None
        self._first = True  # the next batch is this epoch's first
        self._at_epoch: Any = None  # random states there, and what was synchronised after that
        self._synchronized: list[torch.Tensor] = []
        self._opened = False  # whether the next step is open

    # --- what a Trainer calls ---------------------------------------------------------------------------

    def hears(self, event: str, handler: Any, state: Any) -> bool:
        """Return whether callbacks hear of ``event`` now. A newcomer takes the loop's state before the first event."""
        if event == "on_train_begin" and self._new:
            self._take(handler, state)
        if event == "on_step_begin" and not self._opened:
            raise RecycleError(
                "recycle.rejoin with a get_batch_samples() that does not call Trainer's, where replicas come back: "
                'let it call super().get_batch_samples(…), or set recycle.rejoin to "never"'
            )
        self._opened &= event != "on_step_begin"
        return not (event == "on_epoch_begin" and self._passing)

    def began(self, handler: Any, state: TrainerState) -> None:
        """Set a newcomer's progress bars to its first step, after callbacks have heard that training begins."""
        for each in handler.callbacks if self._new else ():
            if isinstance(each, ProgressCallback) and each.training_bar is not None:
                bar = each.training_bar
                each.current_step = bar.initial = bar.n = bar.last_print_n = state.global_step
                bar.refresh()

    def run_epoch(self, stock: Callable[..., Any], of: Any, **named: Any) -> None:
        """Run an epoch; a newcomer begins where the others are."""
        epoch, loop = named["epoch"], self._taken
        skips = named["steps_trained_in_current_epoch"] if epoch == named["epochs_trained"] else 0
        if loop is not None:
            if epoch < loop.epoch:
                return
            self._passing, skips = False, loop.drawn
            of.control = of.callback_handler.on_epoch_begin(of.args, of.state, of.control)
            named |= {"epochs_trained": epoch, "steps_trained_in_current_epoch": skips}
            named |= {"resume_from_checkpoint": FROM_PEERS, "start_time": time.time() - loop.seconds}
        self._epoch, self._drawn, self._began, self._first = epoch, skips, named["start_time"], True
        before, of.args.ignore_data_skip = of.args.ignore_data_skip, of.args.ignore_data_skip and loop is None
        try:
            stock(of, **named)
        finally:
            of.args.ignore_data_skip = before

    def get_batch_samples(
        self, stock: Callable[..., Any], of: Any, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> Any:
        """Return the batches of a step, which begins once the first batch is there."""
        if self._first:
            self._begin_epoch()
        first = [*itertools.islice(epoch_iterator, 1)]
        self._first, self._team.synchronized, self._team.known = False, None, []
        if first:
            self._open(of)
        found = stock(of, itertools.chain(first, epoch_iterator), num_batches, device)
        self._drawn += len(found[0])
        return found

    def load_rng_state(self, stock: Callable[..., Any], of: Any, checkpoint: Any) -> None:
        """Load random states, unless a newcomer has the others'."""
        if checkpoint != FROM_PEERS:
            stock(of, checkpoint)

    def evaluate(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> Any:
        """Evaluate in training. For a newcomer, the evaluation before the first step is over."""
        if self._new:
            return {}
        with self._session.hooks.startup.apart():
            return stock(of, *arguments, **named)

    def finalize_training(
        self, stock: Callable[..., Any], of: Any, trial: Any, num_train_samples: Any, start_time: float
    ) -> Any:
        """Finalize training, with the time that the whole job has taken."""
        return stock(of, trial, num_train_samples, start_time if self._began is None else self._began)

    # --- those who train, and those who come back -------------------------------------------------------

    def _begin_epoch(self) -> None:
        """Record how the epoch is drawn; a newcomer draws it as the others do."""
        loop = self._taken
        if loop is not None:
            draw_on(self._device, loop.at_epoch)
            self._team.known = [*loop.synchronized]
        self._at_epoch = drawn(self._device)
        self._synchronized = self._team.synchronized = []

    def _open(self, of: Any) -> None:
        """Begin the next step, together with the newcomers that rejoin in it."""
        self._engine.open_step()
        self._opened, loop = True, self._taken
        if loop is None:
            self._meet(of)
            return
        of._tr_loss.fill_(loop.loss)
        for name, value in loop.counts.items():
            setattr(of, name, value)
        draw_on(self._device, loop.randomness)
        self._new, self._taken = False, None

    def _take(self, handler: Any, state: TrainerState) -> None:
        """Take the others' loop, as training begins in a newcomer."""
        with self._session.hooks.startup.apart():
            loop = self._meet(None)
        assert loop is not None, "this rank is new itself"
        for name, value in loop.state.items():
            setattr(state, name, value)
        for callback, (name, attributes) in zip(_exporting(handler), loop.callbacks):
            if type(callback).__name__ == name:
                vars(callback).update(attributes)
        if handler.lr_scheduler is not None:
            handler.lr_scheduler.load_state_dict(loop.scheduler)
        self._taken = loop

    def _meet(self, of: Any | None) -> Loop | None:
        """Return the loop of the ranks that train if a rank is new, else None. All ranks call it before a step. ``of``:
        the Trainer, on a rank that trains. Raises RecycleError if no live rank has the loop's state.
        """
        team = self._team
        while new := {rank for rank, row in team.rows(torch.tensor([self._new])).items() if row}:
            if not (old := [rank for rank in team.live if rank not in new]):
                raise RecycleError(
                    "all ranks that had the state of Trainer's loop were lost while others came back: start the job "
                    "again, with resume_from_checkpoint"
                )
            gives = self._session.rank == old[0]
            found = team.objects(None if of is None else (of._tr_loss.item(), self._loop(of) if gives else None))
            if old[0] in found:
                told = [found[rank] for rank in old if rank in found]
                loop: Loop = told[0][1]
                loop.loss = sum(loss for loss, _ in told) / len(told)
                return loop
        return None

    def _loop(self, of: Any) -> Loop:
        """Return the state of the loop of Trainer ``of``, without its loss."""
        assert self._began is not None, "it is in an epoch"
        return Loop(
            state={each.name: getattr(of.state, each.name) for each in fields(TrainerState) if each.name not in OWN},
            counts={name: getattr(of, name) for name in COUNTS},
            epoch=self._epoch,
            drawn=self._drawn,
            seconds=time.time() - self._began,
            randomness=drawn(self._device),
            at_epoch=self._at_epoch,
            synchronized=self._synchronized,
            scheduler=None if of.lr_scheduler is None else of.lr_scheduler.state_dict(),
            callbacks=[(type(each).__name__, each.state()["attributes"]) for each in _exporting(of.callback_handler)],
        )


def _exporting(handler: Any) -> list[Any]:
    return [each for each in handler.callbacks if isinstance(each, ExportableState)]
