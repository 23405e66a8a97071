"""The face of the plain adapter: one object that trains a stage of a pipeline, and its replicas, whoever dies."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from recycle_plugin.adapters.plain.checkpoint import StageFiles, chosen
from recycle_plugin.adapters.plain.ports import Buckets, Steps
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.places import Places
from recycle_plugin.core.topology import Topology
from recycle_plugin.runtime import session
from recycle_plugin.runtime.average import BACKEND
from recycle_plugin.runtime.batches import packed
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.randomness import keyed
from recycle_plugin.runtime.worker.changed import scheduler_part
from recycle_plugin.runtime.worker.data import DatasetSource
from recycle_plugin.runtime.worker.fitness import check_layers
from recycle_plugin.runtime.worker.ports import Framework, Source, StageModel
from recycle_plugin.runtime.worker.trainer import Trainer
from recycle_plugin.settings import Settings

Layer = Callable[[], nn.Module] | nn.Module
Data = Callable[[int, int, int], Any]  # of (step, replica, micro-batch): (inputs, labels)


class Pipeline:
    """A stage of ``layers``, and the training of all of it.  Every worker of the job makes one alike.

    * ``layers``: modules, or callables that make them, of which each worker only calls those of its stage; one's output is the next one's input, a tensor or a
      tuple of tensors.  ``parts``: how many each stage has; by default as many each as can be.
    * ``loss``: of (outputs of the last layer, labels); the mean over all micro-batches is what is trained.
    * ``optimizer``: makes one for a stage's parameters; ``scheduler``: makes one for the optimizer, and is stepped with it; ``clip``: the largest norm of a step's
      gradients over all stages, 0 for any.
    * ``data``: ``data(step, replica, micro_batch)`` gives (inputs, labels), the same whoever asks; steps count from 1.  Or a map-style dataset of such pairs, read in
      order, of which a micro-batch has ``micro_batch_size``.
    * ``stages``: of each replica; there are as many replicas as the job's workers are enough for, at least two.  ``micro_batches``: of a replica, in a step.
    * ``settings``: the plugin's, as in a DeepSpeed config's section "recycle" (README, "Settings").  ``seed``: of the layers that are made here.

    ``module`` has the stage's layers, by their numbers in ``layers``; ``optimizer`` and ``scheduler`` are the stage's.
    Raises RecycleError where something does not fit, and SettingsError.
    """

    def __init__(
        self, layers: Sequence[Layer], loss: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        data: Data | torch.utils.data.Dataset, stages: int, micro_batches: int = 1, *, micro_batch_size: int = 1, parts: Sequence[int] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None, clip: float = 0.0, seed: int = 0, settings: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        chosen_settings = Settings.from_section({"enabled": True, **(settings or {})})
        line = session.of_this_process()
        line.configure(chosen_settings.wait_timeout_s, chosen_settings.regroup_timeout_s, chosen_settings.group_sums)
        workers = int(os.environ["WORLD_SIZE"])
        cut = _cut(len(layers), stages, workers, parts)
        topology = Topology(workers // stages, stages, micro_batches)
        stage, replica = divmod(line.rank, topology.replicas)
        self.seat = Seat(replica, stage)
        self.module = _built(layers, range(*cut[stage]), seed)
        check_layers(self.module)
        peers = _meet(topology, stage)
        _alike(self.module, peers)
        self.optimizer = optimizer(self.module.parameters())
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        steps, places = Steps(self.optimizer, self.scheduler, lambda: self._trainer.clip()), Places(micro_batches)
        self._files = StageFiles(line, self.seat, stages, self.module)
        model = StageModel(self.module, loss, micro_batches, stage == 0, stage == stages - 1, torch.device("cpu"), keyed=chosen_settings.rng == "keyed")
        batch = topology.replicas * micro_batches * micro_batch_size
        framework = Framework(
            self.seat, topology, model, steps, Buckets(peers), self._files, places, micro_batch_size, lambda: batch, _no_iterator, _forward, clip,
            (scheduler_part(lambda: self.scheduler), steps.counters),
        )  # fmt: skip
        self._trainer = Trainer(line, chosen_settings, framework)
        self._trainer.feed.source = _source(data, topology, places, micro_batch_size)
        self._micro_batches = micro_batches
        line.at_end = self._trainer.finish

    def step(self) -> float:
        """One optimizer step; the mean loss over all micro-batches of all replicas, on every worker.

        It may return before the step is committed; what it returned stays final.  Whoever reads parameters or the optimizer's state with torch in the thread
        that trains waits for the commit; call :meth:`settle` before something else does.
        """
        return self._trainer.train()

    @property
    def steps(self) -> int:
        """How many were done, by the job of a loaded checkpoint too."""
        return self._trainer.step

    def settle(self) -> None:
        """Return when all of them are committed, whoever dies meanwhile."""
        self._trainer.settle()

    def evaluate(self, data: Callable[[int, int], Any], micro_batches: int | None = None) -> float:
        """The mean loss, on every worker, with the layers in evaluation mode.  ``data(replica, micro_batch)`` gives (inputs, labels), of so many for each replica."""
        count = micro_batches or self._micro_batches
        ours = [packed(data(self.seat.replica, number)) for number in range(count)] if self._trainer.feed.reads else []
        return self._trainer.evaluate(ours, count)

    def save(self, folder: str | Path, tag: str | None = None) -> None:
        """A checkpoint of all steps so far is in ``folder``/``tag`` when this returns, complete whoever is missing.  ``tag`` None: by the step."""
        self._trainer.save(Path(folder), tag)

    def load(self, folder: str | Path, tag: str | None = None) -> None:
        """Everybody goes on from that checkpoint, by default the one saved last, with the data and the random numbers of its next step."""
        path = chosen(Path(folder), tag)
        self._trainer.begin_loading(f"load({str(folder)!r}, {tag!r})")
        with self._trainer.lifted():
            self._files.read(self._trainer.state, path)
            self._trainer.loaded(whole=True)


def _cut(layers: int, stages: int, workers: int, parts: Sequence[int] | None) -> list[tuple[int, int]]:
    """The first layer of each stage and that of the next one."""
    if not 1 <= stages <= layers:
        raise RecycleError(f"stages is {stages}, and there are {layers} layers: write 1 to {layers}")
    if workers % stages or workers < 2 * stages:
        raise RecycleError(f"{workers} workers for {stages} stages: start a multiple of {stages}, and at least {2 * stages}, since a lost worker needs a replica to take "
                           f"its micro-batches: python -m recycle_plugin.launch --workers {2 * stages}")
    each = list(parts) if parts is not None else [layers // stages + (stage < layers % stages) for stage in range(stages)]
    if len(each) != stages or sum(each) != layers or min(each) < 1:
        raise RecycleError(f"parts is {each}: write {stages} numbers of at least 1, {layers} in all")
    ends = [sum(each[: stage + 1]) for stage in range(stages)]
    return list(zip([0, *ends], ends))


def _built(layers: Sequence[Layer], numbers: range, seed: int) -> nn.Sequential:
    """Each layer draws its weights by its number, whichever stage has it."""
    made = OrderedDict()
    for number in numbers:
        with keyed(seed + number):
            made[str(number)] = layers[number] if isinstance(layers[number], nn.Module) else layers[number]()
    module = nn.Sequential(made)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RecycleError(f"layers {numbers[0]} to {numbers[-1]}, a stage of their own, have no parameter to train: give parts= that puts them beside others")
    return module


def _meet(topology: Topology, stage: int) -> dist.ProcessGroup:
    """The group of this stage's workers, of those that all workers make."""
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    replicas = topology.replicas
    return [dist.new_group(range(number * replicas, (number + 1) * replicas)) for number in range(topology.stages)][stage]


@torch.no_grad()
def _alike(module: nn.Module, peers: dist.ProcessGroup) -> None:
    """All begin with what the first of them has: layers may have been made outside, from whatever seed."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor, src=dist.get_global_rank(peers, 0), group=peers)


def _source(data: Any, topology: Topology, places: Places, size: int) -> Source:
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data, topology.replicas, places, size, drop_last=True, collate=None)
    if not callable(data):
        raise RecycleError(f"data is a {type(data).__name__}: give a function of (step, replica, micro_batch), or a map-style dataset")

    def batch(step: int, micro_batch: MicroBatch) -> Any:
        return data(step, *micro_batch)

    return batch


def _forward(seed: int, place: int) -> AbstractContextManager:
    return keyed(seed)


def _no_iterator(what: str) -> Any:
    raise AssertionError(f"{what}: a plain pipeline's data comes from its source")
