"""What all jobs in plain torch have: steps, commits and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recycle_plugin.adapters.comes_back import ComesBack
from recycle_plugin.adapters.plain.checkpoint import PlainFiles, chosen
from recycle_plugin.adapters.plain.ports import PlainOptimizer
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.place import HeldSeat, make_alike
from recycle_plugin.runtime.control import session
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.stage.buckets import MeanBuckets
from recycle_plugin.runtime.stage.fitness import check_elementwise, check_layers, check_optimizer, check_scheduler
from recycle_plugin.runtime.stage.ports import CheckpointFormat, Compute, Framework, MadeStage, StageModel, trained
from recycle_plugin.runtime.stage.randomness import keyed, named
from recycle_plugin.runtime.worker.changed_state import scheduler_part
from recycle_plugin.runtime.worker.trainer import Trainer
from recycle_plugin.settings.schema import Settings

if TYPE_CHECKING:  # takes half a second to import; jobs without shards do without
    from recycle_plugin.adapters.plain.sharded import Shards


def settings_of(section: Mapping[str, Any] | None, **defaults: Any) -> Settings:
    """Return a plain job's settings. Raises SettingsError, or RecycleError for settings that it would ignore."""
    if not isinstance(section, Mapping | None):
        raise RecycleError(
            f'settings is a {type(section).__name__}: give a dict, as the section "recycle" of a DeepSpeed config'
        )
    chosen = Settings.from_section({"enabled": True, **defaults, **(section or {})})
    if not chosen.enabled:
        raise RecycleError(
            "recycle.enabled is false: a plain job has nothing else to train with; leave it out, or train without this "
            "class"
        )
    if chosen.loss_scaling:
        raise RecycleError("recycle.loss_scaling: plain jobs train in fp32, whose losses need no scale; leave it out")
    if chosen.norm == "deepspeed":
        raise RecycleError(
            'recycle.norm is "deepspeed": a plain job clips by the true norm over all stages; leave it out'
        )
    return chosen


def session_with(settings: Settings) -> Session:
    """Return this process's session, configured by ``settings``."""
    line = session.of_this_process()
    line.configure(settings.deadlines, settings.group_sums)
    return line


def check_numbers(**given: Any) -> None:
    """Raise RecycleError if one of the ``given`` counts is no whole number of at least 1."""
    for name, value in given.items():
        if not isinstance(value, Integral) or value < 1:
            raise RecycleError(f"{name} is {value!r}: write a whole number, 1 or more")


def device_of_all(module: nn.Module) -> Device:
    """Return the device that all of ``module`` is on. Raises RecycleError if it is on several."""
    found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(found) > 1:
        raise RecycleError(
            f"the module is on {' and '.join(sorted(map(str, found)))}: put all of it on the device that this worker "
            "computes on, module.to(device)"
        )
    return device_of(found.pop())


class PlainJob(ComesBack):
    """The training of the stage ``module`` at ``place``. ``make(stage)``: makes any stage's module once more.
    ``shards``: this process's part of a module that the processes of a replica share. ``dcp``: use the checkpoint
    format of torch.distributed.checkpoint.
    """

    def __init__(
        self,
        line: Session,
        settings: Settings,
        place: HeldSeat,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        clip: float,
        micro_batch_size: int = 1,
        compute: Compute | None = None,
        make: Callable[[int], nn.Module] | None = None,
        shards: Shards | None = None,
        dcp: bool = False,
    ) -> None:
        self.seat, self.module, self.optimizer, self.scheduler = place.seat, module, optimizer, scheduler
        _check(line, module, optimizer, scheduler, clip, shards, dcp)
        held = module if shards is None else shards
        if shards is not None:
            shards.take(optimizer)
        device = device_of_all(held)
        assert line.hooks.startup is not None, "there are groups"
        with line.hooks.startup.building(trained(held)):
            make_alike((*held.parameters(), *held.buffers()), place.peers)
        self._files = _files(place, module, optimizer, scheduler, shards, dcp)
        topology, shard, keyed_forwards = place.topology, place.shard, settings.rng == "keyed"
        self._cursor = DataCursor(topology.micro_batches)
        batch = len(topology.batch) * micro_batch_size

        def model_of(stage: int, layers: nn.Module) -> StageModel:
            ends = stage == 0, stage == topology.stages - 1
            return StageModel(layers, loss, topology.micro_batches, *ends, device, keyed=keyed_forwards)

        def made(other: int) -> MadeStage:
            assert make is not None, "then nobody asks"
            return MadeStage(model_of(other, make(other)), lambda seed, place: keyed(seed, device))

        steps = PlainOptimizer(optimizer, scheduler)
        framework = Framework(
            seat=self.seat,
            topology=topology,
            model=model_of(self.seat.stage, held),
            optimizer=steps,
            buckets=MeanBuckets(place.peers),
            checkpoints=self._files,
            cursor=self._cursor,
            micro_batch_size=micro_batch_size,
            batch=lambda: batch,
            forward=lambda seed, place: keyed(seed if shards is None else named(seed, f"shard {shard}"), device),
            clipping=clip,
            state=(scheduler_part(lambda: scheduler, lambda: optimizer), steps.counters),
            compute=compute,
            shards=place.shards,
            shard=shard,
            make=None if make is None else made,
        )
        self._trainer = Trainer(line, settings, framework)
        line.hooks.at_end = self._trainer.finish

    def step(self) -> float:
        """Train one optimizer step. Returns the mean loss over all micro-batches of all replicas, on every worker.

        It may return before the step is committed, but the returned loss is final. The training thread waits for the
        commit when torch code in it reads parameters or the optimizer's state. Call :meth:`settle` before anything else
        reads them.
        """
        return self._trainer.train()

    @property
    def steps(self) -> int:
        """How many steps were done, including those of a loaded checkpoint's job."""
        return self._trainer.step

    def save(self, folder: str | Path, tag: str | None = None) -> None:
        """Save a checkpoint of all steps so far in ``folder``/``tag``, complete even if workers are missing. It is in
        place when this returns. ``tag`` None: named by the step. Raises NotSaved, on all workers, if one can't write
        its part.
        """
        self._trainer.save(Path(folder), tag)

    def load(self, folder: str | Path, tag: str | None = None) -> None:
        """Load a checkpoint, by default the one saved last. The job goes on with the data and randomness of the step
        after it. Raises RecycleError if it does not fit this job.
        """
        place = f"load({str(folder)!r}, {tag!r})"
        if self._trainer.behind:
            self._trainer.loading.recall(place, str(folder))
            return
        self._trainer.begin_loading(place)
        with self._trainer.lifted():
            # No worker writes a checkpoint any more at this point, so all find the same one.
            self._files.read(self._trainer.state, chosen(Path(folder), tag))
            self._trainer.loaded(whole=True)
        self._trainer.loading.remember(str(folder))


def _check(
    line: Session,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    clip: float,
    shards: Shards | None,
    dcp: bool,
) -> None:
    """Raise RecycleError for arguments of a script that do not work."""
    check_layers(module)
    check_optimizer(module, optimizer)
    check_scheduler(scheduler)
    if shards is None and line.hooks.place is not None:
        raise RecycleError(
            "replica_mesh(…) without fully_shard: call fully_shard(module, mesh=replica_mesh(…)) before "
            "Replicas(…), or leave the mesh out"
        )
    if shards is not None or dcp:
        check_elementwise(optimizer, "dcp=True" if shards is None else "fully_shard")
    if not clip >= 0:
        raise RecycleError(f"clip is {clip}: write the largest norm that gradients may have, or 0 for any")


def _files(
    place: HeldSeat,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    shards: Shards | None,
    dcp: bool,
) -> CheckpointFormat:
    kinds = {what: type(which).__name__ for what, which in (("optimizer", optimizer), ("scheduler", scheduler))}
    if shards is None and not dcp:
        return PlainFiles(place.seat, place.topology.stages, module, kinds, place.shards, place.shard)
    from recycle_plugin.adapters.plain.distributed_files import DistributedFiles, Unsharded  # takes 0.5 s

    weights = shards or Unsharded(dict(module.named_parameters()))
    return DistributedFiles(module, weights, optimizer, kinds, place.shard)
