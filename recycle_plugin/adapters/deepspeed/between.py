"""What scripts do between steps: evaluate, save and load; all of it survives the loss of workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable

import torch

from recycle_plugin.adapters.deepspeed.bf16 import WholeState
from recycle_plugin.adapters.deepspeed.checkpoint import (
    Copied, Durable, Inventory, beside, check_loadable, chosen, file_beside, is_writer, parts_of, stand_in, take_beside, without_optimizer,
)  # fmt: skip
from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.protocol import Met
from recycle_plugin.core.rhythm import Rhythm
from recycle_plugin.core.watch import ELSEWHERE
from recycle_plugin.runtime.batches import packed
from recycle_plugin.runtime.device import HOST
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.worker.background import Background
from recycle_plugin.runtime.worker.saving import Saving


class BetweenSteps(WholeState):
    """The part of :class:`~recycle_plugin.adapters.deepspeed.engine.RecycleEngine` that no step needs."""

    _background: Background | None = None
    _saved_to: str | None = None
    _from_checkpoint = False  # from a checkpoint, before training

    def _start_between_steps(self, run_dir: str) -> None:
        """Training starts."""
        session, loop, settings = self._job.session, self._loop, self._job.settings
        self._saving = Saving(session, loop, self._world.reach)
        if settings.checkpoint is not None:
            folder = Path(settings.checkpoint_dir or Path(run_dir) / "checkpoint")
            rhythm, copy = Rhythm(settings.checkpoint.overhead, loop.machine.stepped), partial(self._copy_state, folder)
            self._background = Background(session, loop, self._saving, rhythm, folder, settings.checkpoint.keep, copy, self._between_steps)

    def eval_batch(
        self, data_iter: Any, return_logits: bool = False, compute_loss: bool = True, reduce_output: str | None = "avg",
        bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> Any:  # fmt: skip
        """The mean loss, on every worker, after all training steps so far are committed; whoever dies meanwhile.

        Whatever else stock evaluation returns needs every worker.
        """
        self._start()
        self.settle()
        if return_logits or not compute_loss or reduce_output != "avg":
            if self._degraded():
                raise RecycleError(
                    f"eval_batch() with return_logits, without compute_loss or with another reduce_output than 'avg' needs every worker, and seat "
                    f"{self._missing()} is lost; ask for the mean loss alone, or evaluate from a checkpoint"
                )
            return super().eval_batch(data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches)
        count = num_micro_batches or self.micro_batches
        self.module.eval()
        losses = self._loop.evaluate([packed(batch) for batch in self._read(data_iter, count)], count)
        mean = torch.tensor(sum(losses.values()) / len(losses), device=self.device)
        if self._is_first() and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", mean.item(), self.global_samples)])
        return mean

    def _read(self, data_iter: Any, count: int) -> list[Any]:
        """As stock does: the first and the last stage's workers read all of their replica's batches."""
        training, self.data_iterator = self.data_iterator, data_iter
        try:
            return [self.next_batch() for _ in range(count)] if self.is_first_stage() or self.is_last_stage() else []
        finally:
            self.data_iterator = training

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As in DeepSpeed, another number of micro-batches from the next step on; every worker asks for the same there."""
        if train_batch_size == self.train_batch_size():
            return
        if self._loop is not None:
            self._conclude_background()
            asked = self._meet("set_train_batch_size()", {str(self.global_rank): train_batch_size}).values
            if len(sizes := sorted(set(asked.values()))) > 1:
                raise RecycleError(f"set_train_batch_size() was called with {', '.join(map(str, sizes))}: call it with the same number on every worker")
            self._report_commits()  # whose samples were counted by the size so far
        super().set_train_batch_size(train_batch_size)
        self._places.change(self.global_steps + 1, self.micro_batches)
        self.topology_ = replace(self.topology_, micro_batches=self.micro_batches)
        self._stage.resize(self.micro_batches, self._blocks() if self._job.settings.exact else None)
        if self._loop is not None:
            self._world.reach("resize")
            self._worker.resize(self.topology_)
            self._loop.resize(self.topology_, train_batch_size)

    def _check_batch_size(self) -> None:
        """Before each step."""
        planned = self.topology_.micro_batches
        if self.micro_batches != planned:
            raise RecycleError(
                f"engine.micro_batches is {self.micro_batches}, and steps are planned for {planned}: call engine.set_train_batch_size() on every worker instead"
            )

    def _degraded(self) -> bool:
        return self._loop is not None and len(self._job.session.roster.seats) < len(self.topology_.seats)

    def _missing(self) -> str:
        return ", ".join(str(seat) for seat in self.topology_.seats if seat not in self._job.session.roster.seats)

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: dict = {}, save_latest: bool = True, exclude_frozen_parameters: bool = False
    ) -> bool:
        """DeepSpeed's own checkpoint of the last committed step, complete also while workers are missing, and in place at once."""
        self._start()
        self._conclude_background()
        self.settle()
        self._saved_to = save_dir

        def write(unfinished: str) -> None:
            self._write_state(self._durable(), Path(save_dir), unfinished, client_state, exclude_frozen_parameters)

        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        self._saving.save(Path(save_dir), tag, save_latest, write, f"checkpoint of step {self.global_steps}")
        return True

    def _save_last(self) -> None:
        """The checkpoint that a job leaves which has become too slow; whatever the script adds to its own ones is not in it."""
        settings = self._job.settings
        self.save_checkpoint(settings.checkpoint_dir or self._saved_to or str(Path(self._run_dir) / "checkpoint"))

    def _write_state(self, files: Durable | Copied, folder: Path, tag: str, client_state: dict = {}, exclude_frozen_parameters: bool = False) -> None:
        """This worker's share of a checkpoint of the state as it is now, through ``files``."""
        generation, whole = self._job.session.generation, self._stage_state
        inventory = Inventory(files, self._ties.place, list(whole.optimizer.parameters()), self._ties.saved() | self._own_files())
        with stand_in(self, self.seat, generation, inventory), without_optimizer(self):
            super().save_checkpoint(str(folder), tag, client_state, False, exclude_frozen_parameters)
        if is_writer(self.seat, generation) and (left := inventory.left(whole)):
            files.save(left, str(file_beside(folder / tag, self.stage_id)))
        if self.masters is not None:
            state, parts = self.state_files(), self.topology_.replicas
            for number in parts_of(self.seat, generation, parts):
                files.save({**state.part(number, parts), "ds_config": self.config}, str(folder / tag / state.name(number)))

    def _own_files(self) -> set[str]:
        """Tensors of the state that files of the plugin's own have (bf16.py)."""
        return set() if self.masters is None else {name for name in self._stage_state.tensors() if name.startswith(("masters/", "optimizer/"))}

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, custom_load_fn: Callable | None = None,
    ) -> Any:  # fmt: skip
        """Stock; while training, everybody goes on from the checkpoint's step, from which data and randomness are those of the first time.

        But plain iterators go on where they stand, as in DeepSpeed.
        """
        path = chosen(Path(load_dir), tag)
        if not load_module_only:
            check_loadable(path, self.num_stages, self.masters is not None)
        if self._loop is not None:
            self._conclude_background()
            self._meet(f"load_checkpoint({load_dir!r}, {tag!r})")
            self._worker.forget_committed()
            self._world.reach("load.start")
        with self._job.session.heart.at(ELSEWHERE, "a checkpoint"), without_optimizer(self), self._ties.loading():
            found = super().load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        with_optimizer = load_optimizer_states and not load_module_only
        if found[0] is not None:
            with self._job.session.heart.at(ELSEWHERE, "a checkpoint"):
                self._load_rest(Path(found[0]).parent, with_optimizer)
        self._places.change(self.global_steps + 1, self.micro_batches)
        if self._loop is not None and found[0] is not None:
            self._world.reach("load.end")
            self._worker.rewind(self.global_steps)
            if with_optimizer or self._job.settings.undo != "inverse":  # whose roundings stay where not all is loaded
                self._say_fingerprint(self.global_steps)
            self._loop.loaded(self.global_steps)
            if self._background is not None:
                self._background.loaded(self.global_steps)
        self._from_checkpoint |= found[0] is not None
        return found

    def _load_rest(self, path: Path, with_optimizer: bool) -> None:
        """What stock code leaves to the plugin."""
        self._ties.load(path, partial(self.checkpoint_engine.load, map_location=self.device))
        self._load_beside(path, with_optimizer)
        if self.masters is not None:
            self.load_masters(path if with_optimizer else None)
        self._stage_state.rewritten()

    def _load_beside(self, path: Path, with_optimizer: bool) -> None:
        """What stock's files have no place for."""
        read, session = partial(self.checkpoint_engine.load, map_location=HOST), self._job.session
        saved = beside(path, self.stage_id, self.global_steps if with_optimizer else None, read)
        take_beside(self._stage_state, saved, with_optimizer)
        if self._job.settings.loss_scaling and with_optimizer and "loss_scale" not in saved["small"] and self._is_first():
            session.note("warning", f"{path} has no loss scale, since it is not of a job with recycle.loss_scaling: it stays at {self._stage.loss_scale:g}")

    def _durable(self) -> Durable:
        return Durable(self.checkpoint_engine, self._world.reach)

    def _copy_state(self, folder: Path, unfinished: str) -> Callable[[], None]:
        """What writes this worker's share of a checkpoint of the state as it is now."""
        files = Copied(self._durable())
        self._write_state(files, folder, unfinished)
        return files.write

    def _conclude_background(self) -> None:
        if self._background is not None:
            self._background.conclude()

    def _checkpoint_if_due(self) -> None:
        """Before each step."""
        if self._background is not None:
            self._background.before(self._loop.machine.stepped + 1)

    def _meet(self, place: str, values: dict[str, Any] | None = None) -> Met:
        """Return when all live workers have come to ``place`` with all their steps committed."""
        while True:
            self.settle()
            try:
                return self._loop.meet(place, values or {})
            except Interrupted:
                self._between_steps()
