"""The DeepSpeed engine that runs plans: ``PipelineEngine`` with another schedule, which the worker runtime executes.

No algorithm lives here.  It lends DeepSpeed's model, optimizer, gradient buckets and checkpoints to
the runtime's loop, and keeps the signatures that user scripts call.  DeepSpeed's private names are
used in this module only.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Iterator

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.constants import BFLOAT16
from deepspeed.runtime.pipe.engine import PipelineEngine

from recycle_plugin import planner
from recycle_plugin.adapters.deepspeed import ties
from recycle_plugin.adapters.deepspeed.between import BetweenSteps
from recycle_plugin.adapters.deepspeed.bf16 import MasterOptimizer, trained
from recycle_plugin.adapters.deepspeed.feeding import Feeding
from recycle_plugin.adapters.deepspeed.model import AsStarted, keyed_forward, reentrant
from recycle_plugin.adapters.deepspeed.monitors import FirstLive, Reporting
from recycle_plugin.adapters.deepspeed.ports import StockBuckets, StockNorm, StockOptimizer, loss_scaler
from recycle_plugin.adapters.deepspeed.schedule import INSTRUCTION_MAP, PlanSchedule
from recycle_plugin.adapters.deepspeed.state import stage_state
from recycle_plugin.adapters.deepspeed.ties import Ties
from recycle_plugin.core.blocks import Blocks
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.job import Job as JobRecord
from recycle_plugin.core.line import JobEnded
from recycle_plugin.core.plan import Policy
from recycle_plugin.core.protocol import TOO_SLOW, Fingerprint, Ready
from recycle_plugin.core.roster import Member
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.stepstore import Retention, StepStore
from recycle_plugin.core.stopwatch import Stopwatch
from recycle_plugin.core.supply import Supply
from recycle_plugin.core.topology import Topology, tied
from recycle_plugin.core.watch import ELSEWHERE, promise_s
from recycle_plugin.core.worker import Judging, Worker
from recycle_plugin.runtime.blocks import BlockSums
from recycle_plugin.runtime.device import device_of
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.fingerprint import fingerprint
from recycle_plugin.runtime.loop import Loop
from recycle_plugin.runtime.randomness import key, keyed_torch
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.split_backward import DeferredWeights
from recycle_plugin.runtime.surroundings import Surroundings
from recycle_plugin.runtime.tiers import AsMade, Host
from recycle_plugin.runtime.touch import FirstTouch
from recycle_plugin.runtime.trace import TraceFile
from recycle_plugin.runtime.transport import Transport
from recycle_plugin.runtime.worker.clipping import Clipping, TrueNorm
from recycle_plugin.runtime.worker.data import DatasetSource, ScriptsIterator
from recycle_plugin.runtime.worker.gradients import Gradients
from recycle_plugin.runtime.worker.operations import Operations
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.stage import Stage, StageModel
from recycle_plugin.runtime.worker.stepping import Stepping, undo_record
from recycle_plugin.runtime.world import TorchMachine
from recycle_plugin.settings import Settings


@dataclass(frozen=True)
class Job:
    """What the engine needs besides DeepSpeed's own arguments."""

    session: Session
    settings: Settings


class RecycleEngine(BetweenSteps, Feeding, Reporting):
    """``train_batch``, ``eval_batch``, ``save_checkpoint`` as in DeepSpeed; they survive the loss of workers.

    Besides: ``set_data_source(source)`` gives batches by (step, micro-batch) instead of
    ``training_data`` or an iterator, and ``settle()`` waits until all steps done so far are committed.
    """

    _job: Job  # of the class that engine_class makes: users' constructors need not know of it

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.monitor = FirstLive(self.monitor, self._is_first, self._job.session.note)
        if self.lr_scheduler is not None and not hasattr(self.lr_scheduler, "state_dict"):
            raise RecycleError(f"the learning-rate scheduler {type(self.lr_scheduler).__name__} has no state_dict, so a step could not be taken back")
        settings = self._job.settings
        self.seat = Seat(self.grid.data_parallel_id, self.stage_id)
        specs = layer_specs(self.module)
        shared = ties.shared(self.module, specs)
        self.topology_ = Topology(self.grid.data_parallel_size, self.num_stages, int(self.micro_batches), tied(shared.values()))
        self._check_faults(settings)
        self._deferred = _split(self.module) if settings.split_backward else None
        self._parameters = trained(self.module) if self.masters is None else self.masters.parameters
        self._as_started = AsStarted(self.module)
        blocks = BlockSums(self._parameters, self._blocks()) if settings.exact else None
        self._stage = Stage(self._stage_model(), self._deferred, self._randomness, blocks, self.masters, self._say_fused, partial(self._job.session.note, "warning"))
        self._transport = Transport(self._job.session, device_of(self.device))
        retention = Retention(budget=settings.keep_bytes)
        self._store = StepStore(self.seat, self.num_stages, bool(self.topology_.tie(self.stage_id)), retention, (AsMade(), Host(device_of(self.device))))
        self._supply = Supply(self._store, ScriptsIterator(self._job.session, self._read_iterator), self._hand_on, self._say_dealt) if self._reads else None
        scale = LossScale(loss_scaler(self._config.float16_config) if settings.loss_scaling else None)
        self._stage_state = stage_state(self, self._stage, scale, self._places, self._supply)
        self._ties = Ties(self.module, specs, shared, self._job.session, self.masters)
        self._stepping = self._make_stepping(blocks, scale)
        self._operations = Operations(self._job.session, self._stage, self._stepping, self._batch, self._applied)
        self._touch = FirstTouch(self._changed, lambda: self._loop is None or self._loop.settled, self.settle)
        os.register_at_fork(before=self._touch.now)
        self._surroundings = Surroundings(self.module, device_of(self.device).kind, lambda: self.basic_optimizer.param_groups)
        self._loop: Loop | None = None
        self._trace: TraceFile | None = None

    # --- what scripts call -------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """One optimizer step; returns the mean loss over all micro-batches of all replicas, on every worker.

        It may return before the step is committed.  What it returned stays final: recovery finishes
        the step inside the next call into the engine.  Whatever of torch's touches parameters or the optimizer's state first, in
        the thread that trains, waits for the commit, so that what is read stays and what is written is not taken back; before
        something else touches them (another thread, a kept numpy array or storage, C++ without torch's dispatch) call ``settle()``.
        Learning rates and counts of steps are plain numbers: those of the step as it was applied, until then.

        ``data_iter``: as in DeepSpeed, read by the first and the last stage; core/sources.py has what happens to it after a loss.
        """
        with self._touch.lifted():
            return self._train_batch(data_iter)

    def _train_batch(self, data_iter: Any) -> torch.Tensor:
        self._take_iterator(data_iter)
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        self._as_started.check()
        self._check_batch_size()
        self._start()
        if not self._loop.settled and self._surroundings.changed():
            self.settle()  # with what the script has changed for the next step as it was
        self._begin_with_data()
        self.module.train()
        self._surroundings.remember()
        try:
            self._checkpoint_if_due()
            losses = self._loop.train(self._loop.machine.stepped + 1)
        except JobEnded as end:
            if end.code == TOO_SLOW:
                self._save_last()
            raise
        self.agg_train_loss = torch.tensor(sum(losses.values()) / len(losses), device=self.device)
        self._report_step()
        self._surroundings.leave()
        return self.agg_train_loss

    def compile(self, *arguments: Any, **named: Any) -> None:
        raise RecycleError("engine.compile(): layers whose backward is split, and run again by peers, cannot be compiled yet; leave the call out")

    def settle(self) -> None:
        """Return when every step that ``train_batch`` has returned for is committed, whoever dies meanwhile."""
        if self._loop is not None:
            with self._touch.lifted(), self._surroundings.restored():
                self._loop.settle()

    def _changed(self) -> Iterator[torch.Tensor]:
        """What a step changes, and buffers, which what is left of a step reads."""
        yield from self._stage_state.tensors().values()
        yield from self.module.buffers()

    def finish(self) -> None:
        """Everybody's last step is committed and this worker may go."""
        self.settle()
        self._report_commits()
        store = self._store
        let_go = f"; recycle.keep_bytes let {store.let_go} of them go before their step was committed" if store.let_go else ""
        self._job.session.note(
            "peak", f"seat {self.seat} held at most {store.peak} micro-batches, and {store.peak_weight} bytes of boundary tensors for its peers, "
            f"sent or still to be sent{let_go}",
            seat=str(self.seat), held=store.peak, kept_bytes=store.peak_weight, dropped=store.let_go,
        )  # fmt: skip
        if self._trace is not None:
            self._trace.close()
        self._transport.close()

    # --- starting ----------------------------------------------------------------------------------

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer | None) -> MasterOptimizer:
        """Where stock's has a part of the state each."""
        return self.master_optimizer(optimizer)

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str | None:
        """Stock code sums bf16 pipelines' gradients in bf16 at ZeRO stage 0, and refuses to do so in fp32."""
        return BFLOAT16 if self.bfloat16_enabled() else super()._do_optimizer_sanity_check(basic_optimizer)

    def _start(self) -> None:
        """At the first step: enrol, wait for everybody, make the plan.  (Checkpoints are loaded before.)"""
        if self._loop is not None:
            return
        planner.warm()  # so that no failure has to wait for a compiler
        session, settings = self._job.session, self._job.settings
        machine = StepMachine(self.global_steps)
        waits = settings.waits_for_norm(self.gradient_clipping())
        self._run_dir = run_dir = settings.run_dir or f"runs/{session.job_id}"
        self._store.rewind(machine.stepped, era=0)
        if settings.trace:
            self._trace = TraceFile(Path(run_dir) / "trace", self.seat)
        record = {"record": self._trace.add} if self._trace is not None else {}
        self._world = TorchMachine(session, self._transport, self._operations, settings.fault_script(self.seat), **record)
        costs, policy = settings.cost_model(self.topology_, self.micro_batch_size), settings.policy(waits, self.num_stages)
        judging = Judging(waits, settings.clip == "validate")
        self._worker = Worker(self._world, self.topology_, self._store, machine, judging, self._supply, Stopwatch(costs))
        loop = Loop(session, self._worker, self._world, self.topology_, costs, policy, machine, self._between_steps, settings.max_slowdown)
        member = Member(self.global_rank, self.seat, self._transport.address, session.host, session.incarnation)
        session.heart.start(promise_s(settings.progress_timeout_s, settings.heartbeat_timeout_s))
        if self._config.zero_enabled and session.rank == 0:
            self.say_whole_state()
        session.send(Ready(member, machine.stepped, self._job_record(run_dir, costs, policy)))
        loop.start()
        if self._from_checkpoint:
            self._say_fingerprint(machine.stepped)
        self._loop = loop
        self._start_between_steps(run_dir)
        session.between_steps = self._between_steps

    def _job_record(self, run_dir: str, costs: CostModel, policy: Policy) -> JobRecord:
        settings, shape = self._job.settings, self.topology_
        same = ("regroup_timeout_s", "progress_timeout_s", "idle_timeout_s", "heartbeat_timeout_s", "strict_placement", "max_slowdown", "report", "rebalance",
                "stagger_optimizer", "clip", "nonfinite", "loss_scaling", "undo", "keep_bytes", "rng", "seed", "exact")  # fmt: skip
        return JobRecord(
            shape.replicas, shape.stages, shape.micro_batches, shape.ties, run_dir, costs, policy, batch=int(self.train_batch_size()), norm=str(settings.norm),
            clipping=float(self.gradient_clipping()), arithmetic=device_of(self.device).arithmetic() if settings.exact else None,
            **{name: getattr(settings, name) for name in same},
        )  # fmt: skip

    def _make_stepping(self, blocks: BlockSums | None, scale: LossScale) -> Stepping:
        settings, tied = self._job.settings, self._ties.weights
        gradients = Gradients(StockBuckets(self), self._store, self._parameters, blocks, tied)
        elsewhere = {weight.parameter for weight in tied if weight.stages[0] != self.stage_id}
        norm = StockNorm(self.stage_id, self.grid.data_parallel_size) if settings.norm == "deepspeed" else TrueNorm(elsewhere)
        clipping = Clipping(self._store, self._parameters, norm, self.gradient_clipping())
        optimizer, undo = StockOptimizer(self, super()._exec_optimizer_step), undo_record(settings.undo, self._stage_state)
        return Stepping(optimizer, self._stage, self._parameters, gradients, clipping, scale, undo, self._job.session)

    def _stage_model(self) -> StageModel:
        first, last, keyed = self.is_first_stage(), self.is_last_stage(), self._job.settings.rng == "keyed"
        return StageModel(self.module, self.module.loss_fn, self.micro_batches, first, last, device_of(self.device), partial(reentrant, self.module), keyed)

    def _blocks(self) -> Blocks:
        return self._job.settings.policy(False, self.num_stages).blocks(self.topology_)

    def _check_faults(self, settings: Settings) -> None:
        for fault in settings.fault_list:
            if fault.seat not in self.topology_.seats:
                raise RecycleError(f"recycle.faults: '{fault}' names seat {fault.seat}, and the topology is "
                                   f"{self.topology_.replicas} replicas of {self.topology_.stages} stages (seats are replica.stage, from 0)")

    def _build_data_iter(self, dataset: Any) -> None:
        if self._job.settings.rng == "stream":  # stock's loader draws from the worker's stream as well, at each start of an epoch
            super()._build_data_iter(dataset)
            self._source = lambda step, micro_batch: self.next_batch()
            return
        replicas, drops = self.grid.data_parallel_size, self._config.dataloader_drop_last
        self._source = DatasetSource(dataset, replicas, self._places, self.micro_batch_size, drops, self.collate_fn)

    # --- a step ------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        """A membership change has broken a collective of the user's script: recover, then it is tried again."""
        with self._touch.lifted(), self._surroundings.restored():
            self._loop.catch_up()

    def next_batch(self) -> Any:
        """The next micro-batch of the script's iterator, or of stock's loader."""
        return self._next_batch()

    def _say_fused(self, names: tuple[str, ...]) -> None:
        self._job.session.note(
            "fused", f"the backward of {', '.join(names)} on stage {self.stage_id} is not split any more: a forward differentiates by its parameters, or "
            "twice through it, or they have hooks; the numbers are stock's, with less to overlap",
            stage=self.stage_id, layers=names,
        )  # fmt: skip

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, **INSTRUCTION_MAP}

    def plan_schedule(self) -> PlanSchedule | None:
        """What this worker runs, or has run last, as DeepSpeed's own schedules are looked at; None before the first step."""
        return None if self._loop is None else PlanSchedule(self._worker.program, self.micro_batches, self.num_stages, self.stage_id)

    def clip_fp32_gradients(self) -> None:
        """Called inside the optimizer step, where clipping is on: by stock code, in bf16 by the optimizer."""
        self._stepping.clip()

    def _applied(self, step: int) -> None:
        every = self._job.settings.check_replicas
        if every and step % every == 0:
            self._say_fingerprint(step)

    def _say_fingerprint(self, step: int) -> None:
        """For the others to compare it with theirs."""
        session = self._job.session
        with session.heart.at(ELSEWHERE, "the hash of its state"):
            copies = {weight.name: fingerprint(weight.parameter) for weight in self._ties.weights}
            session.send(Fingerprint(session.rank, step, self._stage_state.digest(), copies))

    # --- state beside the weights ------------------------------------------------------------------

    def _randomness(self, micro_batch: MicroBatch, step: int, half: str) -> Any:
        if self._job.settings.rng == "stream":
            return nullcontext()
        seed = key(self._job.settings.seed, step, micro_batch, self.stage_id, half)
        device = device_of(self.device)
        return keyed_torch(seed, device) if half else keyed_forward(self.module, seed, self._places.before(step) + micro_batch.index, device)


def engine_class(users: type, job: Job) -> type:
    """``users``, DeepSpeed's engine or a subclass of it, on top of ours: what it overrides and hands on to ``super()`` gets here."""
    mine = {name for each in users.__mro__ if not issubclass(PipelineEngine, each) for name in vars(each)}
    unheard = sorted(name for name in mine if name.startswith("_exec_") or name in ("_INSTRUCTION_MAP", "_train_schedule", "_aggregate_total_loss"))
    if unheard:
        raise RecycleError(
            f"{users.__name__}.{unheard[0]} overrides a part of DeepSpeed's schedule, which the plugin's own takes the place of, so it would not be "
            "called; override train_batch, eval_batch, save_checkpoint or load_checkpoint instead, or set recycle.enabled to false"
        )
    taken = {name for part in RecycleEngine.__mro__ for name in vars(part) if not hasattr(PipelineEngine, name)}
    if clash := sorted(mine & taken):
        raise RecycleError(f"{users.__name__}.{clash[0]} has the name of a part of the plugin's engine, which would call it instead of its own: give it another name")
    bases = (RecycleEngine,) if users is PipelineEngine else (users, RecycleEngine)
    return type(RecycleEngine.__name__ if users is PipelineEngine else users.__name__, bases, {"_job": job})


def layer_specs(model: PipelineModule) -> list:
    """What the layers of all stages are built from."""
    return model._layer_specs


def _split(module: torch.nn.Module) -> DeferredWeights:
    """Convert ``module``'s layers, megatron-core's too where the script uses them."""
    if "megatron.core" in sys.modules:
        import recycle_plugin.adapters.megatron.layers  # noqa: F401  registers their converters
    return DeferredWeights(module)
