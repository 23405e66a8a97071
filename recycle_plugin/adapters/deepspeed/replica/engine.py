"""DeepSpeed's engine as one rank of a replica: scripts call it as stock's, and replicas may be lost.

It is stock's engine with the ranks of one replica as its data parallel group, in front of the worker runtime's steps
(runtime/worker/pushed_calls.py). What each call does:

* ``engine(batch)`` waits until the program wants a micro-batch, then runs stock's forward.
* ``engine.backward(loss)`` is stock's, with its reduction inside the replica, whose result is the micro-batch's
  contribution. For the last micro-batch of a step it also exchanges gradients with the other replicas, and the script
  finds the sum at stock's place. If a replica is lost before any rank has the sum, this rank gets more micro-batches:
  ``is_gradient_accumulation_boundary()`` tells when the last one is done.
* ``engine.step()`` is stock's. At the boundary it applies what the script has made of the sum, and returns when the
  step is committed. ``global_steps`` counts steps that were applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.constants import TRAIN_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE_PER_GPU
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import log_dist

from recycle_plugin.adapters.deepspeed.checkpoint import in_words
from recycle_plugin.adapters.deepspeed.monitors import FirstLive
from recycle_plugin.adapters.deepspeed.ports import COUNTERS, StockOptimizer, counters_part
from recycle_plugin.adapters.deepspeed.rank0 import first_for_stock, replaced
from recycle_plugin.adapters.deepspeed.replica.checkpoint import ReplicaFiles, WeightsFile
from recycle_plugin.adapters.deepspeed.replica.shards import Partitions, Whole, shards_of
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError
from recycle_plugin.patches import deepspeed_zero3
from recycle_plugin.runtime.collectives.place import HeldSeat, make_alike, meet
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.stage.buckets import MeanBuckets
from recycle_plugin.runtime.stage.ports import Clip, Framework, StageModel, trained
from recycle_plugin.runtime.stage.pushed_stage import PushedStage
from recycle_plugin.runtime.state.stage_state import StatePart
from recycle_plugin.runtime.worker.changed_state import scheduler_part
from recycle_plugin.runtime.worker.loading import note_later_checkpoint
from recycle_plugin.runtime.worker.pushed_calls import PushedCalls
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.trainer import Trainer
from recycle_plugin.settings.schema import Settings


@dataclass(frozen=True)
class ReplicaArguments:
    """The engine's arguments beside DeepSpeed's own."""

    session: Session
    settings: Settings
    replicas: int
    loads_last: bool = False  # the driver loads no checkpoint before its last step


class ReplicaGroups:
    """DeepSpeed's ``mpu``: the data parallel group is ``group``, the ranks of one replica. Nothing else is parallel."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._group)

    def get_data_parallel_world_size(self) -> int:
        return self._group.size()

    def get_data_parallel_rank(self) -> int:
        return self._group.rank()

    def get_model_parallel_group(self) -> None:
        """Return None: there is no model parallelism."""

    def get_model_parallel_world_size(self) -> int:
        """Return 1: there is no model parallelism."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Return 0: there is no model parallelism."""
        return 0


class ReplicaEngine(DeepSpeedEngine):
    """DeepSpeed's engine as one rank of a replica; the other replicas go on if one is lost. A rank that comes back has
    its shard, and is a member, when ``deepspeed.initialize`` returns. Its script goes on from ``global_steps``, as
    after ``load_checkpoint``.
    """

    monitor: Any  # these three are stock's
    mpu: Any
    dp_world_size: int
    _job: ReplicaArguments  # set by engine_class
    shards: Whole | Partitions
    _trainer: Trainer
    _steps: PushedCalls
    _boundary: bool | None = None  # what stock code is told; None: ask the program
    _lr_arguments: dict[str, Any] | None = None  # of the script's call of step()
    _judged: torch.Tensor | None = None  # the norm of the last step, if this rank has judged it

    def __init__(self, *arguments: Any, **named: Any) -> None:
        session, world = self._job.session, dist.get_world_size()
        shards = world // self._job.replicas
        topology = Topology(self._job.replicas, 1, int(named["config_class"].gradient_accumulation_steps))
        self._place = meet(session, topology, shards)
        group = session.hooks.seat_group if session.hooks.seat_group is not None else _alone(world)
        if named["config_class"].zero_optimization_stage == ZeroStageEnum.weights:
            deepspeed_zero3.apply()
        assert session.hooks.startup is not None, "there are groups"
        with session.hooks.startup.building(trained(named["model"])):
            super().__init__(*arguments, **named | {"mpu": ReplicaGroups(group)})
        session.hooks.startup.built()
        self.shards = shards_of(self)
        device = device_of(self.device)
        stage = PushedStage(self.shards.gradients, device, self.shards)
        self._trainer = Trainer(session, self._job.settings, self._framework(self._place, stage))
        self._trainer.feed.source = lambda step, micro_batch: None  # LOAD waits for the script, which has the data
        self._steps = PushedCalls(self._trainer, stage)
        session.hooks.at_end = self._steps.end
        self.monitor = FirstLive(self.monitor, session)
        self._loaded = 0  # number of checkpoints, before the first step
        self._losses: list[torch.Tensor] = []  # of this step's micro-batches so far
        self._ends_early = False  # the step ends without further micro-batches of this rank
        self._recalled: list[Any] = []  # results of load_checkpoint in this rank's predecessor
        if session.view.newcomer:
            self._recalled = [] if self._job.loads_last else [*_recalled(session)]
            self._steps.join()
            with session.hooks.startup.apart():
                self.shards.refresh_model()  # catching up has stepped the shards only

    # --- what scripts call -----------------------------------------------------------------------------

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run stock's forward. In training it is the forward of the next micro-batch."""
        if self.module.training and torch.is_grad_enabled():
            self._steps.begin()
        return super().forward(*inputs, **named)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run stock's backward for the last micro-batch's loss, and hand its contribution to the program."""
        if not self._steps.runs:
            raise RecycleError("engine.backward(loss) without a forward: call engine(…) for each micro-batch before it")
        with self._told(True), self._job.session.thread.in_backward(), self.shards.backward() as made:
            scaled = super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        # if the script has divided by the number of micro-batches, this loss is a part of the step's
        own = loss.detach() * (1 if scale_wrt_gas else self.gradient_accumulation_steps())
        self._losses.append(own)
        self._steps.run((made, own))
        while self._ends_early and self._steps.wants_more:
            self._steps.begin()
            fill = torch.stack(self._losses).mean() if scale_wrt_gas else torch.zeros_like(own)
            self._steps.run(([None] * len(made), fill))
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Run stock's step; at the boundary it follows the exchange with the other replicas."""
        self._lr_arguments = lr_kwargs
        if self._steps.close():
            self._losses, self._ends_early = [], False
        else:
            with self._told(False):
                super().step(lr_kwargs)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of this rank in the step. A later loss may change that."""
        return self._steps.at_boundary if self._boundary is None else self._boundary

    @property
    def data_cursor(self) -> int:
        """How many micro-batches this rank's script, and its predecessors', have given to steps. So many of the rank's
        data are used; after a loss that is more than ``global_steps`` implies.
        """
        return self._steps.given

    @property
    def between_steps(self) -> bool:
        """Whether the script is between two steps, with no micro-batch of the next one begun."""
        return self._steps.untouched

    def open_step(self) -> None:
        """Begin the next step before its first micro-batch: ranks that come back are members from then on."""
        self._steps.open()

    def settle(self) -> None:
        """Do nothing: each call returns with all steps committed."""

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save stock's files for the ranks of one replica, complete even if others are missing. Raises NotSaved, on all
        ranks, if one can't write, and RecycleError in the middle of a step.
        """
        if not self._steps.between:
            raise RecycleError(
                "save_checkpoint() in the middle of a step: call it after an engine.step() that has applied a step, "
                "that is, has raised engine.global_steps"
            )
        more: dict[str, Any] = {"client_state": client_state, "exclude_frozen_parameters": exclude_frozen_parameters}
        self._trainer.save(Path(save_dir), tag, save_latest, replace(self._files, **more))
        return True

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save all weights in one file, in place on return. Raises NotSaved, on all ranks, if it can't be written."""
        if self.zero_optimization_partition_weights() and not self.zero_gather_16bit_weights_on_model_save():
            return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)  # stock says why not
        files = WeightsFile(
            self, self.checkpoint_engine, self._job.session, self._place.shard, {}, exclude_frozen_parameters
        )
        self._trainer.save(Path(save_dir), save_filename, False, files)
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return all weights on the lowest live rank, None on the others. If that is lost meanwhile, gather again."""
        session = self._job.session
        while True:
            first = session.view.roster.first.rank if self._steps.begun else 0
            with first_for_stock(self, session.rank == first):
                found = super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
            if not self._steps.begun:
                return found
            self._trainer.barrier("_zero3_consolidated_16bit_state_dict()")
            if session.view.roster.first.rank == first:
                return found

    def load_checkpoint(self, load_dir: str, *arguments: Any, **named: Any) -> Any:
        """Load a checkpoint as DeepSpeed does, before the first step; later only if no rank ever comes back. A rank
        that has come back keeps its state, and gets the result that its predecessor got.
        """
        if self._recalled:
            self._loaded += 1
            return self._recalled.pop(0)
        startup = self._job.session.hooks.startup
        assert startup is not None, "there are groups"
        if startup.alone and startup.left_out(_loading(self._loaded + 1)):
            note_later_checkpoint(self._job.session, f"load_checkpoint({load_dir!r})")
            return None, None
        if self._steps.begun:
            if self._job.settings.rejoin != "never" and not self._job.loads_last:
                raise RecycleError(
                    "load_checkpoint() after the first step with recycle.replicas, which a replica that comes back "
                    'would miss: call it before the first step, or set recycle.rejoin to "never"'
                )
            self._trainer.begin_loading(f"load_checkpoint({load_dir!r})")
        scaler = self.shards.scaler
        with self._trainer.lifted(), self.shards.as_stock(), in_words(Path(load_dir)):
            found = super().load_checkpoint(load_dir, *arguments, **named)
        check_scale(scaler, self.shards.scaler, load_dir)
        if found[0] is not None:
            self._trainer.loaded(whole=True)
            self._steps.loaded()
        self._loaded += 1
        startup.remember(_loading(self._loaded), found)
        return found

    def no_sync(self) -> Any:
        """Do nothing if batches shrink, as in Accelerate's loop: each micro-batch is reduced at once anyway. Else raise
        RecycleError: a sum kept on one rank would be lost with it, and no other rank could take over its micro-batches.
        """
        if self._job.settings.batch == "shrink":
            return nullcontext()
        raise RecycleError("engine.no_sync() with recycle.replicas: a micro-batch is reduced at once; leave it out")

    def coalesce_grad_reduction(self) -> Any:
        """Raise RecycleError, as :meth:`no_sync` does."""
        raise RecycleError(
            "engine.coalesce_grad_reduction() with recycle.replicas: a micro-batch is reduced at once; leave it out"
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """If batches shrink, accept the boundary where it is, or an early end of the step, as all ranks do when their
        data end. Else raise RecycleError: the program decides the boundary, and a loss moves it.
        """
        shrinks, at_boundary = self._job.settings.batch == "shrink", self._steps.at_boundary
        self._ends_early = shrinks and is_boundary and not at_boundary
        if not (shrinks and (is_boundary or not at_boundary)):
            raise RecycleError(
                f"engine.set_gradient_accumulation_boundary({is_boundary}) with recycle.replicas: a lost replica moves "
                "the boundary; ask engine.is_gradient_accumulation_boundary()"
            )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raise RecycleError: steps of another size are not planned for yet."""
        raise RecycleError("engine.set_train_batch_size() with recycle.replicas is not supported yet; leave it out")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raise RecycleError: steps of another size are not planned for yet."""
        raise RecycleError(
            "engine.set_train_micro_batch_size() with recycle.replicas is not supported yet; leave it out"
        )

    # --- what stock code calls -------------------------------------------------------------------------

    def _broadcast_model(self) -> None:
        make_alike([each for each in self.module.parameters() if not hasattr(each, "ds_id")], dist.group.WORLD)  # type: ignore[arg-type]

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        """Return stock's optimizer. Stage 3 reads the config again for it, and the batch there is the job's."""
        sizes = {TRAIN_BATCH_SIZE: None, TRAIN_MICRO_BATCH_SIZE_PER_GPU: self.train_micro_batch_size_per_gpu()}
        with replaced(self, config=self.config | sizes):
            return super()._configure_zero_optimizer(optimizer)

    def _report_progress(self, step: int) -> None:
        said = f"step={step}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
        log_dist(said, ranks=[self._job.session.rank] if self._job.session.view.is_first else [])

    def _copy_recovery_script(self, save_path: str) -> None:
        """Do nothing, since stock acts on its rank 0 only: ReplicaFiles copies the script, whichever replica writes."""

    def clip_fp32_gradients(self) -> None:
        """Clip at stage 0 in fp32: each rank has all gradients, so it computes the norm alone."""
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.gradient_clipping())
        self._global_grad_norm = float(norm)

    def deepspeed_io(self, dataset: Any, *arguments: Any, **named: Any) -> Any:
        """Return stock's loader, with a part of the data for each rank of each replica."""
        with replaced(self, mpu=None, dp_world_size=dist.get_world_size()):
            return super().deepspeed_io(dataset, *arguments, **named)

    # --- what the trainer is lent ----------------------------------------------------------------------

    @contextmanager
    def _told(self, boundary: bool) -> Iterator[None]:
        """A context in which stock code is told ``boundary``, and takes the lowest live rank for rank 0."""
        before, self._boundary = self._boundary, boundary
        try:
            with first_for_stock(self, self._job.session.view.is_first):
                yield
        finally:
            self._boundary = before

    def _step_as_stock(self, clip: Clip) -> None:
        """Apply a step by stock code; if this rank is catching up, apply it as the others have."""
        given = clip()  # stock clips by itself: there is no limit here
        with self._job.session.thread.undisturbed(), self._told(True):
            if given is not None:
                self._judged = None
                self.shards.follow(given)
                self._optimizer_port.pass_over()
            else:
                self._judged = self.shards.step(lambda: DeepSpeedEngine.step(self, self._lr_arguments))
                count_micro_steps(self)

    def _framework(self, place: HeldSeat, stage: PushedStage) -> Framework:
        device, scale, topology = device_of(self.device), LossScale(self.shards.scaler), place.topology
        model = StageModel(
            self.shards.module, None, topology.micro_batches, True, True, device, gradients=self.shards.gradients
        )
        self._files = ReplicaFiles(self, self.checkpoint_engine, self._job.session, place.shard)
        self._optimizer_port = ReplicaOptimizer(self, self._step_as_stock)
        return Framework(
            seat=place.seat,
            topology=topology,
            model=model,
            optimizer=self._optimizer_port,
            buckets=MeanBuckets(place.peers),
            checkpoints=self._files,
            cursor=DataCursor(topology.micro_batches),
            micro_batch_size=self.train_micro_batch_size_per_gpu(),
            batch=lambda: int(self.train_batch_size()),
            forward=_no_forward,
            state=(
                scheduler_part(lambda: self.lr_scheduler, lambda: self.shards.wrapped),
                counters_part(self, COUNTERS[:-1]),  # micro_steps follows from them, and counts on within a step
                StatePart("scaler", get=scale.state, set=scale.set_state),
            ),
            shards=place.shards,
            shard=place.shard,
            pushed=stage,
            judged=lambda: self._judged,
        )


class ReplicaOptimizer(StockOptimizer):
    """The optimizer step of a ReplicaEngine."""

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The torch optimizer that changes this rank's shard."""
        return self._engine.shards.wrapped

    def pass_over(self) -> None:
        """Count a step that changes no weight here like one that does."""
        super().pass_over()
        count_micro_steps(self._engine)

    def skip(self) -> None:
        """Count a step that the others have skipped, as stock code does."""
        engine = self._engine
        engine.global_steps += 1
        engine.global_samples += engine.train_batch_size()
        engine.skipped_steps += 1
        engine._judged = None
        engine.optimizer._update_scale(True)
        count_micro_steps(engine)


def check_scale(ours: Any, loaded: Any, folder: str) -> None:
    """Raise RecycleError if the scaler that stock code has ``loaded`` from ``folder``, in place of ``ours``, has
    another scale, as one of an fp16 job has: losses would be multiplied by it.
    """
    if ours is not None and (loaded.dynamic, loaded.loss_scale) != (ours.dynamic, ours.loss_scale):
        raise RecycleError(
            f"load_checkpoint: {folder} is of a job with a loss scale ({loaded.loss_scale:g}), as in fp16, "
            "and this job's losses are not scaled; load the weights alone with load_module_only=True"
        )


def count_micro_steps(engine: Any) -> None:
    """Have ``engine`` count micro-batches as all replicas do, whichever ranks ran them."""
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def engine_class(job: ReplicaArguments) -> type:
    return type(ReplicaEngine.__name__, (ReplicaEngine,), {"_job": job})


def _loading(number: int) -> str:
    """Return the name under which the result of loading a checkpoint is remembered."""
    return f"load_checkpoint, number {number}"


def _recalled(session: Session) -> Iterator[Any]:
    """Yield the results of load_checkpoint in the script of this rank's predecessor, in order."""
    startup = session.hooks.startup
    assert startup is not None, "there are groups"
    number = 1
    while startup.remembered(_loading(number)):
        yield startup.recall(_loading(number))
        number += 1


def _alone(world: int) -> dist.ProcessGroup:
    """Return a group of this rank alone. All ranks make all of these groups."""
    return [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]


def _no_forward(seed: int, place: int) -> Any:
    raise AssertionError("the script runs its forwards itself")
