"""Pipelines in plain torch: an object that trains one stage and survives the loss of workers."""

from __future__ import annotations

import copy
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recycle_plugin.adapters.plain.training_job import PlainJob, check_numbers, session_with, settings_of
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.place import meet
from recycle_plugin.runtime.devices import kinds
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.devices.kinds import own_device
from recycle_plugin.runtime.movers.batches import packed
from recycle_plugin.runtime.stage.ports import Source
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.worker.data import DatasetSource
from recycle_plugin.settings.schema import Settings

Layer = Callable[[], nn.Module] | nn.Module
Data = Callable[[int, int, int], Any]  # of (step, replica, micro-batch) to (inputs, labels)


class Pipeline(PlainJob):
    """A worker's stage of ``layers``, and its training. Every worker of the job makes one with the same arguments.

    * ``layers``: modules, or callables that make them. Each worker calls those of its own stage only. A layer's output,
      a tensor or a tuple of tensors, is the next layer's input. ``parts``: how many layers each stage has, by default
      as equal as possible.
    * ``loss``: of (outputs of the last layer, labels). The trained loss is the mean over all micro-batches.
    * ``optimizer``: makes the optimizer of a stage's parameters. ``scheduler``: makes the optimizer's scheduler, which
      is stepped with it. ``clip``: the largest norm of a step's gradients over all stages, 0 for no clipping.
    * ``data``: ``data(step, replica, micro_batch)`` returns (inputs, labels), the same on any worker; steps count from
      1. Or a map-style dataset of such pairs, read in order, ``micro_batch_size`` samples a micro-batch.
    * ``stages``: of each replica. The job has as many replicas as its workers allow, at least two (one with
      recycle.log). ``micro_batches``: of a replica in a step.
    * ``shards``: processes that hold a seat together, each with a part of the stage. A tensor-parallel layer sums its
      parts over recycle_plugin.seat_group(). Boundary tensors and the loss are the same in all of them, and a parameter
      that all of them have gets the same gradient.
    * ``settings``: the plugin's, as in the section "recycle" of a DeepSpeed config (``recycle docs settings``).
      ``seed``: of the layers made here. ``device``: by default this worker's accelerator, if torch finds one and the
      environment variable DS_ACCELERATOR names no other kind, else the CPU.

    ``module`` has the stage's layers, named by their numbers in ``layers``; ``optimizer`` and ``scheduler`` are the
    stage's. Raises RecycleError or SettingsError for wrong arguments.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        data: Data | torch.utils.data.Dataset[Any],
        stages: int,
        micro_batches: int = 1,
        *,
        micro_batch_size: int = 1,
        parts: Sequence[int] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip: float = 0.0,
        shards: int = 1,
        seed: int = 0,
        device: torch.device | str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        check_numbers(stages=stages, micro_batches=micro_batches, micro_batch_size=micro_batch_size, shards=shards)
        chosen_settings = settings_of(settings, **({"split_backward": False} if shards > 1 else {}))
        _refuse_shards(shards, chosen_settings, clip)
        if not callable(optimizer):
            raise RecycleError(
                f"optimizer is a {type(optimizer).__name__}: give a function that makes one for a stage's parameters, "
                "lambda parameters: torch.optim.SGD(parameters, …)"
            )
        line = session_with(chosen_settings)
        workers = int(os.environ["WORLD_SIZE"])
        cut = _cut(len(layers), stages, workers, parts, shards, chosen_settings.log is not None)
        _refuse_shared(layers, cut)
        topology = Topology(workers // (stages * shards), stages, micro_batches)
        place = meet(line, topology, shards)
        where = own_device(os.environ.get("DS_ACCELERATOR")).where if device is None else torch.device(device)
        kinds.check(where.type)
        module = _built(layers, range(*cut[place.seat.stage]), seed).to(where)
        made = optimizer(module.parameters())
        super().__init__(
            line,
            chosen_settings,
            place,
            module,
            made,
            None if scheduler is None else scheduler(made),
            loss,
            clip,
            micro_batch_size,
            make=lambda stage: _made_again(layers, range(*cut[stage]), seed).to(where),
        )
        self._trainer.feed.source = _source(data, topology, self._cursor, micro_batch_size)

    def evaluate(self, data: Callable[[int, int], Any], micro_batches: int | None = None) -> float:
        """Return the mean loss, on every worker, with the layers in evaluation mode. ``data(replica, micro_batch)``
        returns (inputs, labels), for ``micro_batches`` of each replica, by default as many as in a step.
        """
        if (past := self._trainer.recorded_evaluation()) is not None:
            return past
        count = micro_batches or self._trainer.topology.micro_batches
        ours = [packed(data(self.seat.replica, number)) for number in range(count)] if self._trainer.feed.reads else []
        return self._trainer.evaluate(ours, count)


def _refuse_shards(shards: int, settings: Settings, clip: float) -> None:
    """Raise RecycleError for settings that seats of several workers do not support."""
    if shards > 1 and settings.split_backward:
        raise RecycleError(
            f"recycle.split_backward with shards={shards}: a layer's workers add up in its backward, which is not "
            "split yet; leave it out, or set it to false"
        )
    if shards > 1 and clip:
        raise RecycleError(
            f"clip={clip} with shards={shards}: the plugin can't tell which parameters are parts and which are copies, "
            "so it can't compute the norm over all of them; leave clip out"
        )
    if shards > 1 and settings.log is not None:
        raise RecycleError(
            f"recycle.log with shards={shards}: the logs of several workers of one seat can't be replayed yet; leave "
            "it out"
        )


def _cut(
    layers: int, stages: int, workers: int, parts: Sequence[int] | None, shards: int, logs: bool
) -> list[tuple[int, int]]:
    """Return each stage's layers as (first, end). ``logs``: one replica is enough, since its stages can be replayed."""
    if not 1 <= stages <= layers:
        raise RecycleError(f"stages is {stages}, and there are {layers} layers: write 1 to {layers}")
    each_replica = stages * shards
    if workers % each_replica or workers < (1 if logs else 2) * each_replica:
        raise RecycleError(
            f"{workers} workers for {stages} stages{f' of {shards} shards' * (shards > 1)}: start a multiple of "
            f"{each_replica}, and at least {2 * each_replica}, "
            "since a lost worker needs a replica to take its micro-batches: python -m recycle_plugin.launch --workers "
            f"{2 * each_replica}; or set recycle.log, so that a stage without one can be replayed"
        )
    each = (
        list(parts) if parts is not None else [layers // stages + (stage < layers % stages) for stage in range(stages)]
    )
    if len(each) != stages or sum(each) != layers or min(each) < 1:
        raise RecycleError(f"parts is {each}: write {stages} numbers of at least 1, {layers} in all")
    ends = [sum(each[: stage + 1]) for stage in range(stages)]
    return list(zip([0, *ends], ends))


def _refuse_shared(layers: Sequence[Layer], cut: list[tuple[int, int]]) -> None:
    """Raise RecycleError for weights that stages share, since each stage would train its own copy."""
    owner: dict[nn.Parameter, tuple[int, int]] = {}
    for stage, numbers in enumerate(cut):
        for number in range(*numbers):
            layer = layers[number]
            for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                other, its_stage = owner.setdefault(parameter, (number, stage))
                if its_stage != stage:
                    raise RecycleError(
                        f"layers {other} and {number} share a weight, and are in stages {its_stage} and {stage}: "
                        "weights that stages share are not supported here yet; give parts= that puts them into one "
                        "stage, or use DeepSpeed's TiedLayerSpec"
                    )


def _built(layers: Sequence[Layer] | Mapping[int, Layer], numbers: range, seed: int) -> nn.Sequential:
    """Make a stage's layers. Each draws its weights by its number, so they do not depend on the cut into stages."""
    made = OrderedDict()
    for number in numbers:
        given = layers[number]
        _refuse_function(number, given)
        with keyed(seed + number, CPU):  # the same weights on any device
            layer = given() if callable(given) and not isinstance(given, nn.Module) else given
        if not isinstance(layer, nn.Module):
            raise RecycleError(
                f"layer {number} is a {type(layer).__name__}: give a module, or a function without arguments that "
                "makes one"
            )
        made[str(number)] = layer
    module = nn.Sequential(made)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RecycleError(
            f"layers {numbers[0]} to {numbers[-1]}, a stage of their own, have no parameter to train: give parts= that "
            "puts them beside others"
        )
    return module


def _made_again(layers: Sequence[Layer], numbers: range, seed: int) -> nn.Sequential:
    """Make a stage's layers again beside this worker's own; modules that were given are copied."""

    def again(layer: Layer) -> Layer:
        return copy.deepcopy(layer) if isinstance(layer, nn.Module) else layer

    return _built({number: again(layers[number]) for number in numbers}, numbers, seed)


def _refuse_function(number: int, given: Layer) -> None:
    """Raise RecycleError for a function that computes instead of making a layer."""
    try:
        if callable(given) and not isinstance(given, nn.Module):
            inspect.signature(given).bind()
    except ValueError:  # the function has no known signature
        pass
    except TypeError as error:
        raise RecycleError(
            f"layer {number} is {getattr(given, '__name__', given)}, which is called without arguments to make a "
            f"module, and has {error}: if it computes outputs from inputs, give a module whose forward calls it"
        ) from None


def _source(data: Any, topology: Topology, cursor: DataCursor, size: int) -> Source:
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data, topology.replicas, cursor, size, drop_last=True, collate=None)
    if not callable(data):
        raise RecycleError(
            f"data is a {type(data).__name__}: give a function of (step, replica, micro_batch), or a map-style dataset"
        )
    return lambda step, micro_batch: data(step, *micro_batch)
