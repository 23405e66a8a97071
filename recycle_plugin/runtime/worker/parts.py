"""The parts with which a worker trains its stage, made once, in the order of their dependencies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from recycle_plugin.authentication.secret import check_heeded
from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.core.messages.from_workers import Fingerprint, StateHash
from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.faults import FaultScript
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import RecycleError
from recycle_plugin.observability.trace import TraceFile
from recycle_plugin.runtime.catch_up.transfers import Transfers
from recycle_plugin.runtime.collectives.pairs import LinkedPairs
from recycle_plugin.runtime.collectives.transports import carry_on_device, open_mover
from recycle_plugin.runtime.control.session import THROUGH_HOST, Session
from recycle_plugin.runtime.devices.kinds import accelerator_at
from recycle_plugin.runtime.devices.port import Tensors
from recycle_plugin.runtime.stage.block_sums import BlockSums
from recycle_plugin.runtime.stage.clipping import Clipping, TrueNorm
from recycle_plugin.runtime.stage.gradient_store import TorchGradients
from recycle_plugin.runtime.stage.gradients import Gradients, WorkerContributions
from recycle_plugin.runtime.stage.ports import Framework
from recycle_plugin.runtime.stage.pushed_stage import PushedStage
from recycle_plugin.runtime.stage.randomness import key, keyed_torch
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.state.background_hash import BackgroundHash
from recycle_plugin.runtime.state.stage_state import add_parameters, fingerprint
from recycle_plugin.runtime.state.surroundings import AsStarted
from recycle_plugin.runtime.state.undo import NoUndo
from recycle_plugin.runtime.worker.changed_state import ever_summed, stage_state, stage_units
from recycle_plugin.runtime.worker.feed import Feed
from recycle_plugin.runtime.worker.machine import PushedMachine, TorchMachine
from recycle_plugin.runtime.worker.measured_bytes import stage_bytes
from recycle_plugin.runtime.worker.on_join import OnJoin
from recycle_plugin.runtime.worker.operations import TorchOperations
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.scripted import ScriptedStage
from recycle_plugin.runtime.worker.stage_log import StageLog
from recycle_plugin.runtime.worker.stepping import Stepping, undo_record
from recycle_plugin.runtime.worker.tiers import AsMade, Host, OnDevice
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SettingsError


class Parts:
    """What a worker trains its seat's stage with, for the stage that ``framework`` has built.

    ``feed``: where micro-batches come from. ``state``: all that a step changes. ``run_dir``: the run folder.
    ``replays_along()``: whether a companion's replay of the stage is under way. Raises RecycleError for settings that
    the framework or the machine does not support.
    """

    def __init__(self, session: Session, settings: Settings, framework: Framework) -> None:
        self.session, self.settings, self.framework = session, settings, framework
        self.topology, self.seat, session.view.shard = framework.topology, framework.seat, framework.shard
        _check_faults(settings, self.topology)
        model = framework.model
        assert not isinstance(settings.pinned_bytes, str), "a checked size is a number"
        model.device.budget(settings.pinned_bytes, self._short_of_pinned)
        _check_link(settings.device_link, framework)
        carry_on_device(session, settings.device_link, model.device.kind, os.environ)
        if settings.exact:
            model.device.repeatable()
            session.device_link = THROUGH_HOST  # NCCL adds in an order of its own
        self.as_started = AsStarted(model.module)
        self._summed = framework.gradients
        blocks = BlockSums(self._summed, self.blocks()) if settings.exact else None
        self.stage = self._make_stage(blocks)
        self.transport = open_mover(session, model.device)
        self.store = self._make_store()
        rests = settings.batch == "shrink"
        self.feed = Feed(session, self.store, model.first or model.last, framework.next_batch, self._hand_on, rests)
        scale = LossScale(framework.scaler)
        self.state = stage_state(framework, self.stage, scale, self.feed.iterator_data)
        self.hash = BackgroundHash(self.state, self._tell_hash)
        self.stepping = self._make_stepping(blocks, scale)
        self.operations = TorchOperations(session, self.stage, self.stepping, self.feed.batch, self._applied)
        choice = self.operations.choice = self.stage.choice if isinstance(self.stage, Stage) else None
        check_heeded(settings.secret_file, settings.tls, os.environ)
        self.run_dir = settings.run_dir or f"runs/{session.job_id}"
        self.log = StageLog(session, framework, settings.log, self.run_dir) if settings.log is not None else None
        first = framework.shard == 0  # this worker does what one worker does for its seat
        named = None if choice is None else choice.named
        self.trace = (
            TraceFile(Path(self.run_dir) / "trace", self.seat, session.note, named) if settings.trace * first else None
        )
        self.on_join = OnJoin()
        self.world = self._make_world(first)
        self.replays_along: Callable[[], bool] = lambda: False
        self._checked = False  # whether the state was checked after a step

    def _make_store(self) -> StepStore:
        settings, tied = self.settings, bool(self.topology.tie(self.seat.chunk))
        assert not isinstance(settings.keep_bytes, str), "a checked size is a number"
        device = self.framework.model.device
        through_host = self.session.device_link == THROUGH_HOST
        tiers = (
            AsMade(),
            Host(device) if through_host else OnDevice(accelerator_at(device.where), settings.log is not None),
        )
        return StepStore(self.seat, self.topology.stages, tied, settings.keep_bytes, tiers)

    def _make_world(self, first: bool) -> TorchMachine:
        session, framework = self.session, self.framework
        world = (TorchMachine if framework.pushed is None else PushedMachine)(
            session,
            self.transport,
            self.operations,
            self.settings.fault_script(self.seat, session.view.incarnation) if first else FaultScript((), self.seat),
            self.transfers,
            self.hash,
            stage_units(framework, self.state, self.gradients),
            self.on_join.state,
        )
        if framework.pushed is not None:
            assert isinstance(world, PushedMachine), "of a script that pushes"
            world.script, session.hooks.pushed = framework.pushed.script, True
        return world

    def _make_stage(self, blocks: BlockSums | None) -> Stage | ScriptedStage | PushedStage:
        framework, model = self.framework, self.framework.model
        if framework.pushed is not None:
            return framework.pushed
        randomness = partial(self.randomness, self.seat.chunk, framework.forward)
        warn, tried = partial(self.session.note, "warning"), self.session.view.newcomer
        if framework.compute is not None:
            if blocks is not None:
                raise RecycleError(
                    "recycle.exact with a backward that the script calls: its sums are not cut into blocks yet; leave "
                    "recycle.exact out"
                )
            return ScriptedStage(model, framework.compute, randomness, warn, tried)
        deferred = DeferredWeights(model.module) if self.settings.split_backward else None
        return Stage(
            model,
            deferred,
            randomness,
            blocks,
            framework.masters,
            self._say_fused,
            warn,
            tried,
        )

    def _make_stepping(self, blocks: BlockSums | None, scale: LossScale) -> Stepping:
        framework, where = self.framework, self._summed
        self.contributions = WorkerContributions(where, blocks, framework.model.device)
        gradients = self.gradients = Gradients(framework.buckets, self.store, where, blocks, framework.tied)
        elsewhere = {weight.parameter for weight in framework.tied if weight.stages[0] != self.seat.chunk}
        clipping = Clipping(self.store, where, framework.norm or TrueNorm(elsewhere), framework.clipping)
        scripted = framework.compute is not None and self.settings.clip != "validate"  # then there is one stage
        undo = NoUndo() if framework.pushed or scripted else undo_record(self.settings.undo, self.state, gradients)
        units = partial(stage_units, framework, self.state, gradients)
        interface, device = self.settings.transfer_interface, framework.model.device
        self.transfers = Transfers(self.session, self.seat.stage, interface, device, units)
        return Stepping(
            framework.optimizer,
            self.stage,
            gradients,
            clipping,
            scale,
            undo,
            self.session,
            self.hash.finish,
        )

    def blocks(self) -> Blocks:
        """Return exact mode's blocks of micro-batches, in which sums are made."""
        return self.settings.policy(False, self.topology.stages).blocks(self.topology)

    def _hand_on(self, datum: Datum, batch: Tensors, taker: Seat) -> None:
        self.world.transfer(datum, batch, taker, self.store.valid_from)

    def randomness(
        self,
        stage: int,
        forward: Callable[[int, int], AbstractContextManager[object]],
        micro_batch: MicroBatch,
        step: int,
        half: str,
    ) -> AbstractContextManager[object]:
        """Return the context in which a micro-batch of ``stage`` draws; its forwards draw by ``forward``."""
        if self.settings.rng == "stream":
            return nullcontext()
        seed = key(self.settings.seed, step, micro_batch, stage, half)
        return (
            keyed_torch(seed, self.framework.model.device)
            if half
            else forward(seed, self.framework.cursor.before(step) + micro_batch.index)
        )

    def _short_of_pinned(self, size: int) -> None:
        self.session.note(
            "warning",
            f"recycle.pinned_bytes {self.settings.pinned_bytes}, or the machine's limit of pinned memory, is used up "
            f"at seat {self.seat}, which needs {size} bytes more: from now on copies from and to the accelerator keep "
            "this worker waiting; raise it (ulimit -l and a container's limits too), or lower recycle.keep_bytes",
            seat=str(self.seat),
        )

    def _say_fused(self, names: tuple[str, ...]) -> None:
        self.session.note(
            "fused",
            f"the backward of {', '.join(names)} on stage {self.seat.stage} is not split any more: "
            "a forward differentiates by its parameters, or twice through it; or its graph leads to other tensors, or "
            "through a custom Function; or they have hooks; "
            "the results stay the same, but less work overlaps",
            stage=self.seat.stage,
            layers=names,
        )

    def _applied(self, step: int) -> None:
        if (norm := self.framework.judged()) is not None:
            self.store.put(self.store.of_layers("norm", step), norm)
        if not self._checked:  # the optimizer's first step has made its state
            self.state.check()
            self._checked = True
            self._say_memory()
        every = self.settings.check_replicas
        if every and step % every == 0 and not self.replays_along():  # in a companion's replay that was done long ago
            self.say_fingerprint(step)

    def _say_memory(self) -> None:
        """Report what this stage's workers hold, once for the stage."""
        held, stage = self.stage.held if isinstance(self.stage, Stage) else None, self.seat.stage
        first = self.seat.replica == self.framework.shard == self.session.view.incarnation == 0
        if held is not None and held.activation is not None and first:
            found = stage_bytes(self.framework, self.state, held)
            text = f"stage {stage}: a micro-batch holds {found['activation']} bytes, a gradient {found['gradient']}"
            self.session.note("memory", text, stage=stage, **found)

    def say_fingerprint(self, step: int) -> None:
        """Send the state's hash, which the coordinator compares with those of the other replicas."""
        session = self.session
        with session.heartbeats.at(ELSEWHERE, "the hash of its state"):
            copies = {weight.name: fingerprint(weight.parameter) for weight in self.framework.tied}
            session.send(Fingerprint(session.rank, step, self.state.digest(), copies))

    def _tell_hash(self, step: int, digest: str) -> None:
        """Send a hash that the coordinator has asked for, on the thread that computed it."""
        session = self.session
        session.send(StateHash(session.rank, step, digest))
        session.waiting.wake()

    def resize(self, micro_batches: int) -> None:
        """Train with so many micro-batches a replica from now on."""
        self.topology = replace(self.topology, micro_batches=micro_batches)
        self.stage.resize(micro_batches, self.blocks() if self.settings.exact else None)

    def retrain(self, step: int) -> None:
        """Train what requires a gradient from ``step`` on, with an optimizer that may have new groups. All steps are
        committed. Raises RecycleError if that is not supported.
        """
        framework, module, summed_in = self.framework, self.framework.model.module, self._summed
        changed = self.as_started.changed
        if changed is None:
            return
        if framework.masters is not None or not isinstance(summed_in, TorchGradients):
            self.as_started.check("in bf16 or fp16, with shards, or if a framework has gradients of its own")
        if self.log is not None:
            self.as_started.check("in a job with recycle.log")
        if self.topology.tie(self.seat.chunk):
            self.as_started.check("in a stage that shares weights with others")
        known = {*summed_in.parameters, *self.state.optimizer.parameters().values()}
        more = {name: one for name, one in module.named_parameters() if one.requires_grad}
        if (strange := next((name for name, one in more.items() if one not in known), None)) is not None:
            raise RecycleError(
                f"{strange} requires a gradient, and the optimizer does not have it: call "
                "optimizer.add_param_group() before the next step"
            )
        assert isinstance(summed_in, TorchGradients), "as checked above"
        self.as_started = AsStarted(module)
        summed_in.train(more.values())
        names = "\n".join(more).encode()
        self.gradients.retrain(step, int.from_bytes(hashlib.sha256(names).digest()[:7], "big"))
        add_parameters(self.state.parts["weights"], more)
        self.world.units.train(ever_summed(framework, self.state))

    def finish(self) -> None:
        """Report the peak of held data, and close trace and log. The last step is committed."""
        store = self.store
        let_go = (
            f"; recycle.keep_bytes let {store.let_go} of them go before their step was committed"
            if store.let_go
            else ""
        )
        self.session.note(
            "peak",
            f"seat {self.seat} held at most {store.peak} micro-batches, and {store.peak_weight} bytes of boundary "
            f"tensors for its peers, sent or still to be sent{let_go}",
            seat=str(self.seat),
            held=store.peak,
            kept_bytes=store.peak_weight,
            dropped=store.let_go,
        )
        if isinstance(self.transport, LinkedPairs):
            by_link, by_host = self.transport.by_link, self.transport.by_host
            self.session.note(
                "moved",
                f"seat {self.seat} sent {by_link} boundary tensors over {self.session.device_link}, and {by_host} "
                "through the host",
                seat=str(self.seat),
                by_link=by_link,
                by_host=by_host,
            )
        for files in (self.trace, self.log):
            if files is not None:
                files.close()

    def close(self) -> None:
        """Close the lines to other workers."""
        self.transfers.close()
        self.transport.close()


def _check_link(by: str, framework: Framework) -> None:
    """Raise RecycleError if the job does not support sums that bypass the host yet."""
    if by != THROUGH_HOST and (framework.pushed or framework.compute or framework.shards > 1):
        kind = "seats of several processes" if framework.shards > 1 else "jobs whose script calls backward() itself"
        raise RecycleError(f'recycle.device_link is "{by}", which is not supported in {kind} yet: write "host"')


def _check_faults(settings: Settings, topology: Topology) -> None:
    """Raise RecycleError if a fault is to strike a seat that does not exist."""
    try:
        settings.refuse_faults(topology)
    except SettingsError as error:
        raise RecycleError(str(error)) from None
