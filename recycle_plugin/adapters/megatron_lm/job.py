"""A Megatron-LM job on one worker: its steps, evaluations and checkpoints, run by the worker runtime's trainer.

Megatron's loop calls it in place of ``train_step``, ``evaluate`` and ``save_checkpoint``. No algorithm lives here, and
no collective of Megatron's step is called: the runtime sums gradients, norms and losses among the live workers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import global_vars, wandb_utils

import recycle_plugin.adapters.megatron.layers  # noqa: F401  registers the converters of its layers
from recycle_plugin.adapters.megatron_lm import log_line
from recycle_plugin.adapters.megatron_lm.checkpoint import TRACKER, MegatronFiles
from recycle_plugin.adapters.megatron_lm.data import IndexedData
from recycle_plugin.adapters.megatron_lm.early_exit import EarlyExit
from recycle_plugin.adapters.megatron_lm.model import Batches, StageModule, detach_from_ddp
from recycle_plugin.adapters.megatron_lm.ports import (
    MegatronNorm,
    MegatronOptimizer,
    MegatronScale,
    masters_of,
    tied_weights,
)
from recycle_plugin.adapters.megatron_lm.refusals import check_built
from recycle_plugin.adapters.megatron_lm.sharded import ShardedFiles
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import Topology, tied
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.runtime.collectives.group import check_backend
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.movers.batches import packed
from recycle_plugin.runtime.stage.buckets import MeanBuckets
from recycle_plugin.runtime.stage.ports import Framework, StageModel, trained
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.system.console import print_whole
from recycle_plugin.runtime.worker.trainer import Trainer
from recycle_plugin.settings.schema import Settings


class Job:
    """The training of one worker's stage. ``in_parts``: checkpoints are those of a distributed optimizer."""

    def __init__(
        self,
        session: Session,
        settings: Settings,
        args: Namespace,
        model: list[Any],
        optimizer: Any,
        scheduler: Any,
        in_parts: bool,
    ) -> None:
        check_backend(torch.distributed.get_backend())
        inner = check_built(model, optimizer)
        session.configure(settings.deadlines, settings.group_sums)
        get_rerun_state_machine().set_mode(RerunMode.DISABLED)
        detach_from_ddp(model[0])
        self._scale = None if getattr(inner, "grad_scaler", None) is None else MegatronScale(inner.grad_scaler)
        if self._scale is not None:
            settings = settings.in_fp16(float(args.clip_grad))
        self._session, self._args = session, args
        self.seat = Seat(mpu.get_data_parallel_rank(), mpu.get_pipeline_model_parallel_rank())
        shape = mpu.get_data_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
        self._batches = Batches()
        ends = self.seat.stage == 0, self.seat.stage == shape[1] - 1
        self._module = StageModule(model[0], self._batches, *ends)
        self._micro_batches = get_num_microbatches()  # per replica and step; all workers have the same
        self._cursor = DataCursor(self._micro_batches)
        self._steps = MegatronOptimizer(inner, scheduler, args.iteration, self._samples)
        files = ShardedFiles if args.ckpt_format == "torch_dist" else MegatronFiles
        self._files = files(self.seat, args, unwrap_model(model), optimizer, scheduler, in_parts)
        self._trainer = Trainer(session, settings, self._framework(settings, inner, *shape))
        self._data = IndexedData(self._batches, self._cursor, args)
        self._trainer.feed.source = self._data
        self._exit, self._saved = EarlyExit(session, args), -1
        self._unsaid: list[tuple[int, str]] = []  # the last step's lines, which another worker prints
        session.hooks.at_end = self._finish

    # --- what Megatron's loop calls --------------------------------------------------------------------

    def train_step(self, forward_step: Any, data_iterator: Any) -> tuple[Any, ...]:
        """Train a step. Return the same values as Megatron's ``train_step``."""
        self._module.forward_step = forward_step
        self._data.take(data_iterator)
        self._resize_if_ramped_up(get_num_microbatches())
        skipped = self._steps.skipped
        try:
            loss = self._trainer.train()
        except JobEnded as end:
            if self._trainer.behind:
                raise
            saves = self._exit.saves(end, self._trainer.folder, self._saved == self._steps.steps)
            return {}, 1, saves, True, 0, None, None, 0
        self._exit.ask_if_due()
        if self._scale is not None:
            self._scale.put()  # for the log line, and checkpoints
        went = self._steps.skipped == skipped
        norm = self._steps.last_norm if went and not self._trainer.behind else None
        return self._logged(loss), int(not went), False, False, 0, norm, None, 0

    def _resize_if_ramped_up(self, micro_batches: int) -> None:
        """Change to the next step's number of micro-batches, as Megatron's schedule of batch sizes has it."""
        if micro_batches != self._micro_batches:
            self._trainer.agree("the schedule of batch sizes", micro_batches)
            self._micro_batches = micro_batches
            self._trainer.resize(micro_batches)

    def evaluate(self, forward_step: Any, data_iterator: Any, iterations: int | None) -> dict[str, torch.Tensor]:
        """Return the mean losses of an evaluation by name, on the last stage; {} on the others."""
        self._module.forward_step = forward_step
        self._batches.begin_evaluation()
        args = self._args
        size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        together = (getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size) * args.data_parallel_size
        count = size // together
        found: log_line.Sums = {}
        for _ in range(args.eval_iters if iterations is None else iterations):
            for name, value in self._evaluated(data_iterator, count).items():
                found[name] = found.get(name, 0) + value
            args.consumed_valid_samples += size
        return log_line.quotients(found) if self._module.last else {}

    def _evaluated(self, data_iterator: Any, count: int) -> log_line.Sums:
        """Return the sums of one evaluation's values; {} if the evaluation was over before this worker came."""
        ours = []
        if self._trainer.feed.reads:
            ours = [self._batches.packed(next(data_iterator), training=False) for _ in range(count)]
        if self._trainer.recorded_evaluation() is not None:
            return {}
        self._trainer.evaluate([packed((values, values)) for values in ours], count)
        return log_line.sums(self._trainer.losses)

    def save(self, iteration: int, operations: Any) -> None:
        """Save a checkpoint of all steps so far to Megatron's place, complete even if workers are missing."""
        folder, tag = Path(self._args.save), f"iter_{iteration:07d}"
        files = self._files.at(iteration, operations)
        self._trainer.save(folder, tag, (TRACKER, str(iteration)), files)
        if self.writer(global_vars.get_wandb_writer, "wandb", "wandb_project"):
            wandb_utils.on_save_checkpoint_success(str(folder / tag), str(folder / TRACKER), str(folder), iteration)
        self._saved = iteration
        self._exit.leave_if_asked()

    @property
    def prints(self) -> bool:
        """Whether this worker prints for Megatron's last rank. The oldest process of the last stage does (the highest
        rank of several), since it has all steps of a log line. A newcomer that is behind does not.
        """
        if self._trainer.behind or not self._module.last:
            return False
        peers = self._session.view.roster.peers(self.seat.stage)
        oldest = max(peers, key=lambda one: (-one.incarnation, one.rank), default=None)
        return self._session.rank == (self._args.world_size - 1 if oldest is None else oldest.rank)

    def print(self, message: str) -> None:
        """Print a line of Megatron's last rank if this worker prints."""
        if self.prints:
            self._take_over()
            print_whole(message)
        else:
            step = self._steps.steps
            self._unsaid = [*((at, line) for at, line in self._unsaid if at == step), (step, message)]

    def _take_over(self) -> None:
        """Print the kept lines of the steps that the lost printing worker, whose place this worker takes, had not
        applied.
        """
        for step, line in self._unsaid:
            if step > self._session.view.interrupted_behind:
                print_whole(line)
        self._unsaid.clear()

    def _finish(self) -> None:
        self._trainer.finish()
        if self.prints:
            self._take_over()

    def writer(self, stock: Callable[[], Any], kind: str, flag: str) -> Any:
        """Return the writer ``stock()`` on the worker that prints, made here if ``flag`` is set; else None."""
        if not self.prints:
            return None
        if stock() is None and getattr(self._args, flag):
            rank, self._args.rank = self._args.rank, self._args.world_size - 1
            getattr(global_vars, f"_set_{kind}_writer")(self._args)
            self._args.rank = rank
        return stock()

    def _logged(self, loss: float) -> dict[str, torch.Tensor]:
        if not self._module.last:
            return {}
        if self._trainer.behind:  # a newcomer knows only the mean loss of steps that are over
            return {"lm loss": torch.tensor(loss)}
        return log_line.quotients(log_line.sums(self._trainer.losses))

    # --- what the trainer is lent ----------------------------------------------------------------------

    def _samples(self) -> int:
        return self._micro_batches * self._args.micro_batch_size * self._args.data_parallel_size

    def _framework(self, settings: Settings, inner: Any, replicas: int, stages: int) -> Framework:
        module, args = self._module, self._args
        layers = unwrap_model(module.layers)
        shares, masters = not args.untie_embeddings_and_output_weights, masters_of(module, inner)
        ties = tied([(0, stages - 1)]) if shares and stages > 1 else ()
        weights = tied_weights(layers, shares, stages, replicas, self._session.view, masters)
        device = device_of(trained(module)[0].device)
        first, last, keyed_forwards = self.seat.stage == 0, self.seat.stage == stages - 1, settings.rng == "keyed"
        elsewhere = {weight.parameter for weight in weights if self.seat.chunk != weight.stages[0]}
        return Framework(
            seat=self.seat,
            topology=Topology(replicas, stages, self._micro_batches, ties),
            model=StageModel(
                module, module.loss, self._micro_batches, first, last, device, keyed=keyed_forwards, told=module.told
            ),
            optimizer=self._steps,
            buckets=MeanBuckets(mpu.get_data_parallel_group()),
            checkpoints=self._files,
            cursor=self._cursor,
            micro_batch_size=args.micro_batch_size,
            batch=self._samples,
            forward=lambda seed, place: keyed(seed, device),
            clipping=float(args.clip_grad),
            state=(self._steps.state,),
            masters=masters,
            tied=weights,
            scaler=self._scale,
            norm=MegatronNorm(self._steps.wrapped, elsewhere),
            layers=[layers],
            saves_last=False,
        )
