"""The DeepSpeed engine that runs plans: ``PipelineEngine`` for scripts, in front of the worker runtime's trainer.

No algorithm lives here. It lends DeepSpeed's model, optimizer, gradient buckets and checkpoints to the trainer
(runtime/worker/trainer.py), and keeps the signatures that scripts call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.constants import BFLOAT16, FP16
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils.data import DistributedSampler

from recycle_plugin.adapters.comes_back import ComesBack
from recycle_plugin.adapters.deepspeed import ties
from recycle_plugin.adapters.deepspeed.bf16 import MasterOptimizer, StateFiles, whole_state_mib
from recycle_plugin.adapters.deepspeed.checkpoint import EngineFiles, check_loadable, chosen
from recycle_plugin.adapters.deepspeed.feeding import Feeding, Repeating
from recycle_plugin.adapters.deepspeed.fp16 import HalfOptimizer
from recycle_plugin.adapters.deepspeed.model import keyed_forward, layers_of, made_again, reentrant
from recycle_plugin.adapters.deepspeed.monitors import FirstLive, Progress, Reporting
from recycle_plugin.adapters.deepspeed.ports import StockBuckets, StockNorm, StockOptimizer, counters_part, loss_scaler
from recycle_plugin.adapters.deepspeed.rank0 import replaced
from recycle_plugin.adapters.deepspeed.ties import Ties
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import Topology, tied
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.core.worker.loop_ports import DataEnded
from recycle_plugin.errors import DataIsOver, RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import device_of, put
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.movers.batches import packed
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.stage.ports import Clip, Framework, MadeStage, Scaler, Source, StageModel, trained
from recycle_plugin.runtime.worker.changed_state import scheduler_part
from recycle_plugin.runtime.worker.data import DatasetSource
from recycle_plugin.runtime.worker.trainer import Trainer
from recycle_plugin.settings.schema import Settings

# an evaluation that needs all workers
WHOLE = "eval_batch() with return_logits, without compute_loss or with another reduce_output than 'avg'"


@dataclass(frozen=True)
class EngineArguments:
    """The engine's arguments beside DeepSpeed's own."""

    session: Session
    settings: Settings


class RecycleEngine(ComesBack, PipelineEngine):
    """DeepSpeed's ``PipelineEngine``, which survives the loss of workers. Additional methods:
    ``set_data_source(source)`` replaces ``training_data`` and iterators, ``settle()`` waits until all steps so far are
    committed. ``on_join(callback, state)``, ``skip_to_present()`` and ``behind`` are for scripts of workers that come
    back.
    """

    _job: EngineArguments  # a class attribute, set by engine_class: users' constructors need not know it
    _dataset: Source | None = None  # training_data
    masters: Masters | None = None  # in bf16 and fp16
    scaler: Scaler | None = None  # of the loss
    seat: Seat
    _files: EngineFiles
    _feeding: Feeding
    _reporting: Reporting
    _may_skip = False  # steps may be skipped, and a newcomer does not know which
    _applies = False  # stock code is applying a step
    _clip: Clip  # of the step being applied
    _clipped_by: torch.Tensor | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.lr_scheduler is not None and not hasattr(self.lr_scheduler, "state_dict"):
            raise RecycleError(
                f"the learning-rate scheduler {type(self.lr_scheduler).__name__} has no state_dict, which DeepSpeed "
                "saves: give it state_dict() and load_state_dict()"
            )
        session, settings = self._job.session, self._job.settings
        if self.fp16_enabled():
            settings = settings.in_fp16(self.gradient_clipping())
        if self.fp16_auto_cast():
            self.module.register_forward_pre_hook(lambda module, inputs: self._cast_inputs_half(inputs))
        self.seat = Seat(self.grid.data_parallel_id, self.stage_id)
        self.monitor: Any = FirstLive(self.monitor, session)
        self._reporting = Reporting(
            session,
            lambda: self.monitor,
            self.steps_per_print(),
            lambda: Progress(self.global_steps, self.global_samples, self.train_batch_size()),
            lambda: self.get_lr()[0],
            self.scaler if self.fp16_enabled() else None,
        )
        if "megatron.core" in sys.modules:
            import recycle_plugin.adapters.megatron.layers  # noqa: F401  registers the converters of its layers
        specs = layer_specs(self.module)
        shared = ties.shared(self.module, specs)
        tied_weights = Ties(self.module, specs, shared, session.view, self.masters)
        if settings.loss_scaling and self.scaler is None:
            self.scaler = loss_scaler(self._config.float16_config)
        parts = self._parts()
        if parts is not None:
            here = self.seat.replica, self.grid.data_parallel_size
            self.optimizer.part = lambda: parts.part(*here)[OPTIMIZER_STATE_DICT]
        self._files = EngineFiles(self, self.checkpoint_engine, session, tied_weights, parts, self.scaler)
        self._may_skip = self.scaler is not None or settings.nonfinite == "skip"
        topology = Topology(
            self.grid.data_parallel_size, self.num_stages, int(self.micro_batches), tied(shared.values())
        )
        self._trainer = Trainer(session, settings, self._framework(topology, tied_weights))
        self._feeding = Feeding(
            self._trainer.feed,
            self.seat,
            self._dataset,
            bool(settings.exact),
            self._next_batch,
            self.set_dataiterator,
            lambda batch: batch if self.batch_fn is None else self.batch_fn(batch),
        )
        session.hooks.at_end = self.finish
        if self._config.zero_enabled and session.rank == 0:
            mib = whole_state_mib(trained(self.module))
            session.note(
                "zero",
                f'recycle.zero "replicate": each worker of a stage keeps the whole optimizer state, for stage 0 '
                f"{mib:.4g} MiB with Adam; shards "
                f"would take {mib / topology.replicas:.4g} MiB",
                mib=mib,
            )

    # --- what scripts call -------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Train one optimizer step. Returns the mean loss over all micro-batches of all replicas, on every worker.

        It may return before the step is committed, but the returned loss is final: recovery finishes the step inside
        the next call into the engine. The training thread waits for the commit when torch code in it first touches
        parameters or the optimizer's state, so no read is outdated and no write is undone. Call ``settle()`` before
        anything else touches them: another thread, a kept numpy array or storage, C++ without torch's dispatch.
        Learning rates and counts of steps are plain numbers; until the commit they are those of the applied step.

        ``data_iter``: as in DeepSpeed, read by the first and the last stage; core/vocabulary/iterator_draws.py tells
        what happens to it after a loss. If the iterators of all replicas have ended, all workers drop what they had
        left for the step and raise DataIsOver, a StopIteration.
        """
        try:
            return self._train_batch(data_iter)
        except DataEnded as ended:
            raise DataIsOver(
                f"{ended}: the data iterators of all replicas have ended; catch StopIteration around train_batch() "
                "where an epoch ends so, or wrap the loader in deepspeed.utils.RepeatingLoader"
            ) from None

    def _train_batch(self, data_iter: Any) -> torch.Tensor:
        with self._trainer.lifted():
            self._feeding.take_iterator(data_iter, self.data_iterator, self.global_steps + 1)
            if not torch.is_grad_enabled():
                raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
            self._check_batch_size()
            behind = self._trainer.behind
            with self._reporting.timed():
                loss = torch.tensor(self._trainer.train())
            if not (behind and self._trainer.behind):  # others have reported the steps before
                self._reporting.step(loss.item())
            self.agg_train_loss = put(loss, self.device, "the loss")
            return self.agg_train_loss

    def set_data_source(self, source: Callable[[int, int, int], Any]) -> None:
        """Take data from ``source(step, replica, micro_batch)``, which returns (inputs, labels). Call it before the
        first step. Steps count from 1, the same on every worker. Iterators given to ``train_batch`` are then not read.
        """
        self._feeding.set_source(source)

    def finish(self) -> None:
        """Wait until everybody's last step is committed, report, and close; then this worker may leave."""
        self.settle()
        self._reporting.commits()
        self._trainer.finish()

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of an evaluation, on every worker, once all training steps so far are committed. Workers
        may die meanwhile. Stock's other results need all workers: they raise RecycleError if a worker is missing, while
        this worker is behind, or after a worker has come back in a job that logs.
        """
        whole = return_logits or not compute_loss or reduce_output != "avg"
        if whole and self._trainer.behind:
            raise self._job.session.hooks.refusal(
                f"{WHOLE}, in a worker that has come back: only mean losses of evaluations are kept for its script; "
                'ask for the mean loss alone, or set recycle.rejoin to "never"'
            )
        if whole and self._trainer.may_have_replayed:
            raise RecycleError(
                f"{WHOLE} after a worker has come back in a job with recycle.log: stock evaluation counts its own "
                "messages, and that worker does not know the others' count; ask for the mean loss alone"
            )
        if (past := self._trainer.recorded_evaluation()) is not None:
            return put(torch.tensor(past), self.device, "the mean loss")
        self._trainer.start()
        self.settle()
        if whole:
            if missing := self._trainer.missing:
                raise RecycleError(
                    f"{WHOLE} needs every worker, and seat {', '.join(map(str, missing))} is lost; ask for the mean "
                    "loss alone, or evaluate from a checkpoint"
                )
            with self._trainer.apart():
                return super().eval_batch(
                    data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
                )
        count = num_micro_batches or self.micro_batches
        with replaced(self, data_iterator=data_iter):
            batches = [packed(batch) for batch in self._feeding.evaluated(count)]
        mean = torch.tensor(self._trainer.evaluate(batches, count))
        self._reporting.evaluated(mean.item())
        return put(mean, self.device, "the mean loss")

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches after this step. Raises RecycleError unless all workers do the same."""
        if train_batch_size == self.train_batch_size():
            return
        self._trainer.agree("set_train_batch_size()", train_batch_size)
        self._reporting.commits()  # their samples were counted by the old size
        super().set_train_batch_size(train_batch_size)
        self._trainer.resize(self.micro_batches)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save DeepSpeed's checkpoint of the last committed step, complete even if workers are missing. It is in place
        when this returns. Raises NotSaved, on all workers, if one can't write its part.
        """
        files = replace(self._files, client_state=client_state, exclude_frozen_parameters=exclude_frozen_parameters)
        self._trainer.save(Path(save_dir), tag, save_latest, files)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Load a checkpoint as DeepSpeed does. During training the whole job goes on from the checkpoint's step.

        Data and randomness are those of the first time. Plain iterators go on where they are, as in DeepSpeed; before
        training, with recycle.resume_iterators, where they stood when the checkpoint was saved. Raises RecycleError if
        the checkpoint does not fit this job.
        """
        place = f"load_checkpoint({load_dir!r}, {tag!r})"
        if self._trainer.behind:
            return self._trainer.loading.recall(place, str(load_dir), (None, None))
        path = chosen(Path(load_dir), tag)
        if tag is not None or Path(load_dir, "latest").is_file():  # else stock reports that there is none, and goes on
            self._files.check_whole(path)
        if not load_module_only:
            precision = "bf16" if self.bfloat16_enabled() else "fp16" if self.fp16_enabled() else "fp32"
            check_loadable(path, self.num_stages, precision, self._config.zero_enabled)
        self._trainer.begin_loading(place)
        with self._files.loading(path), self._trainer.apart():
            found = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        if found[0] is not None:
            with_optimizer = load_optimizer_states and not load_module_only
            self._files.load_rest(self._trainer.state, Path(found[0]).parent, with_optimizer)
            if with_optimizer:
                self._trainer.resume_iterators(Path(found[0]).parent)
            self._trainer.loaded(with_optimizer)
        self._trainer.loading.remember(str(load_dir), found)
        return found

    def get_lr(self) -> list[Any]:
        """Return stock's ``get_lr()``. Raises RecycleError in a worker that has come back while it can't be known."""
        self._refuse_behind("get_lr()")
        return super().get_lr()

    def get_mom(self) -> list[Any]:
        """Return stock's ``get_mom()``. Raises RecycleError in a worker that has come back while it can't be known."""
        self._refuse_behind("get_mom()")
        return super().get_mom()

    def _refuse_behind(self, what: str) -> None:
        if self._may_skip and self._trainer.behind and not self._applies:
            raise self._job.session.hooks.refusal(
                f"engine.{what} in a worker that has come back, and whose script goes through finished steps again: "
                "it learns which of them were skipped when it has caught up; ask only when engine.behind "
                "is false"
            )

    def get_global_grad_norm(self) -> Any:
        """Return the last step's norm, a scalar tensor, in bf16 and fp16 with gradient clipping; None in fp32, as in
        stock. Raises RecycleError if stock would know it, and no worker does.
        """
        norm = super().get_global_grad_norm()
        if norm is None and self.masters is not None and self.global_steps:
            if self._trainer.behind:
                raise self._job.session.hooks.refusal(
                    "engine.get_global_grad_norm() in a worker that has come back: ask when engine.behind is false"
                )
            raise RecycleError(
                "engine.get_global_grad_norm(): steps are applied before their norm is known, or without one: set "
                'gradient_clipping, and leave recycle.clip out or write "sync"'
            )
        return norm

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raise RecycleError: peers read a lost worker's data by the size that training began with."""
        raise RecycleError(
            "engine.set_train_micro_batch_size(): peers read a lost worker's data in its first micro-batch size; "
            "call engine.set_train_batch_size(), which changes the number of micro-batches"
        )

    def compile(self, *arguments: Any, **named: Any) -> None:
        """Raise RecycleError: the plugin's layers can't be compiled yet."""
        raise RecycleError(
            "engine.compile(): layers whose backward is split, and run again by peers, cannot be compiled yet; leave "
            "the call out"
        )

    # --- what stock code calls -----------------------------------------------------------------------

    def clip_fp32_gradients(self) -> None:
        """Clip for DeepSpeed's optimizer step, if clipping is on; in bf16 and fp16 the optimizer calls it."""
        self._clipped_by = self._clip()

    def _clip_masters(self) -> torch.Tensor | None:
        self.clip_fp32_gradients()
        return self._clipped_by

    def _broadcast_model(self) -> None:
        """Give all replicas the same weights; a newcomer gets the trained ones later."""
        startup = self._job.session.hooks.startup
        assert startup is not None, "groups are made before"
        with startup.building(trained(self.module)):
            super()._broadcast_model()

    def zero_optimization(self) -> bool:
        """Return False to stock code: with recycle.zero "replicate" it treats ZeRO stage 1 as stage 0."""
        return False

    def zero_optimization_stage(self) -> int:
        """Return 0 to stock code, whatever the stage with recycle.zero "replicate"."""
        return 0

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer | None) -> MasterOptimizer:
        """Return an optimizer with whole masters, where stock's has a part, and sum gradients over workers in fp32."""
        if optimizer is None:
            raise RecycleError(
                "bf16.enabled needs an optimizer: name one in the optimizer section, or give deepspeed.initialize one"
            )
        self.communication_data_type = torch.float32
        self.masters = Masters(trained(self.module))
        return MasterOptimizer(optimizer, self.masters, self._clip_masters)

    def _configure_fp16_optimizer(
        self, optimizer: torch.optim.Optimizer, low_precision_dtype: torch.dtype
    ) -> HalfOptimizer:
        """Return the plugin's fp16 optimizer, with masters as in bf16, and gradients summed in fp32 too. The loss scale
        is ZeRO stage 1's, also at stage 0: stock's there has no hysteresis, and multiplies no loss.
        """
        self.communication_data_type = torch.float32
        self.masters, self.scaler = Masters(trained(self.module)), loss_scaler(self._config.float16_config)
        return HalfOptimizer(optimizer, self.masters, self._clip_masters, self.scaler, self.gradient_clipping())

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str | None:
        """Return the dtype in which stock code sums gradients at stage 0; it would refuse fp32 for bf16 and fp16."""
        if self.bfloat16_enabled():
            return BFLOAT16
        return FP16 if self.fp16_enabled() else super()._do_optimizer_sanity_check(basic_optimizer)

    def _build_data_iter(self, dataset: Any) -> None:
        # stock's loader draws from the worker's stream as well, at the start of each epoch
        if self._job.settings.rng == "stream":
            super()._build_data_iter(dataset)
            self._dataset = lambda step, micro_batch: self._next_batch()
            return
        replicas, drops = self.grid.data_parallel_size, self._config.dataloader_drop_last
        self._dataset = DatasetSource(dataset, replicas, self._cursor, self.micro_batch_size, drops, self.collate_fn)
        if self.is_first_stage() or self.is_last_stage():
            own = self.mpu.get_data_parallel_rank()  # in stock's order
            sampler: DistributedSampler[Any] = DistributedSampler(dataset, self.dp_world_size, own, shuffle=False)
            self.training_dataloader = Repeating(partial(self.deepspeed_io, dataset, data_sampler=sampler))

    # --- what the trainer is lent --------------------------------------------------------------------

    def _parts(self) -> StateFiles | None:
        """Return the checkpoint's files for the optimizer's state; None if stock's model file has it."""
        if self.masters is None or (self.fp16_enabled() and not self._config.zero_enabled):
            return None
        state = self.basic_optimizer, self.masters, self.param_names, self.stage_id, self.gradient_clipping()
        return StateFiles(*state, self.scaler if self.fp16_enabled() else None)

    def _step_as_stock(self, clip: Clip) -> None:
        """Apply a step by stock code, which clips by ``clip``; it may ask for learning rates while behind."""
        self._clip = clip
        with replaced(self, _applies=True):
            super()._exec_optimizer_step()

    def _framework(self, topology: Topology, tied_weights: Ties) -> Framework:
        settings, module = self._job.settings, self.module
        device = device_of(self.device)
        first, last, keyed = self.is_first_stage(), self.is_last_stage(), settings.rng == "keyed"
        model = StageModel(
            module, module.loss_fn, self.micro_batches, first, last, device, partial(reentrant, module), keyed
        )
        return Framework(
            seat=self.seat,
            topology=topology,
            model=model,
            optimizer=StockOptimizer(self, self._step_as_stock),
            buckets=StockBuckets(
                self.gradient_average,
                self.mpu.get_data_parallel_group(),
                self.allreduce_bucket,
                self.flatten,
                self.unflatten,
            ),
            checkpoints=self._files,
            cursor=self._cursor,
            micro_batch_size=self.micro_batch_size,
            batch=lambda: int(self.train_batch_size()),
            next_batch=lambda what: self._feeding.next_batch(what),
            forward=partial(keyed_forward, module, device=device),
            clipping=float(self.gradient_clipping()),
            state=(scheduler_part(lambda: self.lr_scheduler, lambda: self.basic_optimizer), counters_part(self)),
            masters=self.masters,
            tied=tied_weights.weights,
            norm=StockNorm(self.stage_id, topology.replicas) if settings.norm == "deepspeed" else None,
            scaler=self.scaler,
            make=partial(self._make, topology, device),
            layers=layers_of(module),
        )

    def _make(self, topology: Topology, device: Device, stage: int) -> MadeStage:
        module, keyed = made_again(self.module, stage, device), self._job.settings.rng == "keyed"
        ends = stage == 0, stage == topology.stages - 1
        model = StageModel(module, module.loss_fn, self.micro_batches, *ends, device, partial(reentrant, module), keyed)
        masters = None if self.masters is None else Masters(trained(module))
        return MadeStage(model, partial(keyed_forward, module, device=device), masters)

    @cached_property
    def _cursor(self) -> DataCursor:
        return DataCursor(self.micro_batches)

    def _check_batch_size(self) -> None:
        """Raise RecycleError if the script has changed the number of micro-batches by hand."""
        planned = self._trainer.topology.micro_batches
        if self.micro_batches != planned:
            raise RecycleError(
                f"engine.micro_batches is {self.micro_batches}, and steps are planned for {planned}: call "
                "engine.set_train_batch_size() on every worker instead"
            )


def engine_class(users: type, job: EngineArguments) -> type:
    """Return the plugin's engine with ``users``, DeepSpeed's engine or a subclass of it, on top. The subclass's calls
    of ``super()`` reach the plugin's methods. Raises RecycleError if the subclass overrides something that would never
    be called, or a name that the plugin's engine uses.
    """
    mine = {name for each in users.__mro__ if not issubclass(PipelineEngine, each) for name in vars(each)}
    unheard = sorted(
        name
        for name in mine
        if name.startswith("_exec_") or name in ("_INSTRUCTION_MAP", "_train_schedule", "_aggregate_total_loss")
    )
    if unheard:
        raise RecycleError(
            f"{users.__name__}.{unheard[0]} overrides a part of DeepSpeed's schedule, "
            "which the plugin's schedule replaces, so it would not be called; override train_batch, eval_batch, "
            "save_checkpoint or load_checkpoint instead, or set recycle.enabled to false"
        )
    own = {name for each in (RecycleEngine, ComesBack) for name in {**vars(each), **each.__annotations__}}
    taken = {name for name in own if not hasattr(PipelineEngine, name)}
    if clash := sorted(mine & taken):
        raise RecycleError(
            f"{users.__name__}.{clash[0]} has the name of an attribute of the plugin's engine, and would replace it: "
            "give it another name"
        )
    bases = (RecycleEngine,) if users is PipelineEngine else (users, RecycleEngine)
    return type(RecycleEngine.__name__ if users is PipelineEngine else users.__name__, bases, {"_job": job})


def layer_specs(model: PipelineModule) -> list[Any]:
    return model._layer_specs
