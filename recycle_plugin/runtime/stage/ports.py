"""What a worker's trainer needs of the framework that built its model, as protocols.

These are how gradients are summed, how a step is applied and counted, by what norm it is judged, how a checkpoint is
written.  An adapter gives each of them, as one :class:`Framework`.  They are functions of the framework's own, called
where its own step would call them; whatever has to survive a failure is decided around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.stage.gradient_store import GradientStore, TorchGradients
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.stage.tied import TiedWeight
from recycle_plugin.runtime.state.stage_state import StageState, StatePart

if TYPE_CHECKING:  # which reads this module
    from recycle_plugin.runtime.stage.pushed_stage import PushedStage

Told = torch.Tensor | tuple[torch.Tensor, dict[str, int]]
"""A micro-batch's loss, detached; or the loss and what else is logged of it in one flat tensor, with how many numbers
each of these has, by name.
"""
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
Parameters = list[torch.nn.Parameter]
Reach = Callable[[str], None]
Clip = Callable[[], torch.Tensor | None]
"""Clips the gradients of the step that is being applied; gives the norm with regard to which, None where nobody knows
it.
"""
Compute = Callable[[int, int, int], torch.Tensor]
"""Of (step, replica, micro-batch): its loss, after the script has called ``backward()`` on it."""
Source = Callable[[int, MicroBatch], Any]
"""Of (step, micro-batch): the batch of inputs and labels."""


class OptimizerStep(Protocol):
    """A framework's optimizer step: applied once, or only counted.

    What takes it back is around ``wrapped`` (runtime/state/undo), prepared before and recorded as that steps.
    """

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The torch optimizer that changes the weights."""

    @property
    def steps(self) -> int:
        """How many steps it has applied or skipped; those of a checkpoint's job included."""

    def apply(self, clip: Clip) -> None:
        """Step by the framework's gradients; schedulers and counters go on.  ``clip()`` is called before, where the
        framework's own step clips.
        """

    def skip(self) -> None:
        """Let schedulers and counters go on as after a step that overflowed; no weight and no state of the optimizer
        changes.
        """

    def pass_over(self) -> None:
        """Let counters, and schedulers as if no step were skipped, go on as after a step that the others have applied
        before this worker came; no weight and no state of the optimizer changes.
        """


class Buckets(Protocol):
    """A framework's way to sum the gradients of a stage's workers."""

    @property
    def limit(self) -> int:
        """So many numbers end a bucket."""

    @property
    def averages(self) -> bool:
        """Whether sums are divided by the logical number of replicas."""

    @property
    def group(self) -> MemberGroup:
        """The process group of the stage's workers."""

    def all_reduce(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of ``gradients`` over the group, flat, divided where ``averages``; they stay as they are."""

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One flat tensor that has all elements of ``tensors``."""

    def unflatten(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parts of a flat tensor, in the shapes of ``like``."""


class Norm(Protocol):
    """The norm by which a step's gradients are judged."""

    def share(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> float:
        """This stage's share, squared, of ``gradients``, by parameter; all its workers find the same."""

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        """The norm over all stages, a scalar, from the share of each, by its number."""


class Scaler(Protocol):
    """A loss scale, and the rule by which it changes."""

    loss_scale: float

    def update_scale(self, overflow: bool) -> None:
        """Change the scale after a step that was applied, or, on ``overflow``, skipped.

        Raises where the scale can't go down any more.
        """


class CheckpointShare(Protocol):
    """What one worker writes of a checkpoint, of whatever format.

    ``turn``: this worker's place among the ``turns`` workers that hold the same part of its stage; the first writes
    what the stage writes once.  ``copies``: contents are copied before :meth:`save` returns, so that nobody else needs
    to.
    """

    turn: int
    turns: int
    copies: bool

    def save(self, path: Path, contents: Any) -> None:
        """Write a file, at once or while training goes on.  What can't be written raises nothing here, where others may
        wait for this worker.
        """

    def check(self) -> None:
        """Raise NotSaved where something could not be written."""


class CheckpointFormat(Protocol):
    """A framework's own files of a checkpoint: how state is gathered, written, and read.

    Who writes when, and where to, is alike for all (runtime/worker/checkpoint_files.py).
    """

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over this worker's files of the checkpoint ``path``, of the ``state`` as it is now."""

    def dump(self, contents: Any, file: Any) -> None:
        """Write ``contents`` to an open file, in any thread."""

    def complete(self, folder: Path) -> None:
        """Write what is made of all workers' files, which are in ``folder``; the first live worker does, and once more
        where that was lost.  Raises NotSaved.
        """

    def read(self, state: StageState, folder: Path) -> None:
        """Take the state of this worker's stage, the optimizer's too, from the checkpoint ``folder``, by itself: the
        others may be anywhere.  Raises RecycleError where it can't be had.
        """


@dataclass(frozen=True)
class StageModel:
    """What a stage computes, and how.

    ``loss``: of (outputs, labels) on the last stage; ``scale``: the divisor of each micro-batch's loss, the logical
    number of micro-batches of a replica; ``reentrant()``: whether the first stage's data has to require a gradient, as
    reentrant checkpointing of a layer wants it, which else would be cut off from the graph; ``keyed``: a forward that
    is run again draws the same random numbers.  ``told``: what all workers are told of a loss that was just computed.
    ``gradients``: where a backward adds to them, and the optimizer's step
    finds them; None: in ``parameter.grad`` (of the masters, where there are some).
    """

    module: torch.nn.Module
    loss: Callable[[Any, Any], torch.Tensor] | None
    scale: int
    first: bool
    last: bool
    device: Device
    reentrant: Callable[[], bool] = lambda: False
    keyed: bool = True
    gradients: GradientStore | None = None
    told: Callable[[torch.Tensor], Told] = torch.Tensor.detach

    @property
    def made(self) -> GradientStore:
        """Where a backward adds to the weights' gradients."""
        return TorchGradients(self.module.parameters()) if self.gradients is None else self.gradients

    def summed(self, masters: Masters | None) -> GradientStore:
        """Where contributions are added up, and the step finds their sum."""
        if self.gradients is not None:
            return self.gradients
        return TorchGradients(trained(self.module)) if masters is None else masters.gradients


@dataclass(frozen=True)
class MadeStage:
    """A stage that a worker has made beside its own: ``model``; the context ``forward(seed, place)`` as a Framework's;
    ``masters`` of a model in bf16 or fp16.
    """

    model: StageModel
    forward: Callable[[int, int], AbstractContextManager[Any]]
    masters: Masters | None = None

    @property
    def gradients(self) -> GradientStore:
        """Where contributions are added up."""
        return self.model.summed(self.masters)


@dataclass(frozen=True)
class Framework:
    """All that a framework lends the trainer of the worker at ``seat`` (runtime/worker/trainer.py).

    ``cursor``: the data cursor, which has the positions of a replica's micro-batches among all of its;
    ``micro_batch_size``: samples of one; ``batch()``: samples of a step, of all replicas; ``next_batch(what)`` reads
    the script's plain iterator, ``what`` names it in errors; ``forward(seed, place)`` is the context in which a forward
    draws by ``seed``, for the micro-batch at that position. ``clipping``: the largest norm of a step's gradients, 0:
    any.  ``state``: what else a step changes, schedulers and counters. ``masters``: those of a model in bf16 or fp16,
    which the optimizer steps.  ``norm`` None: the true one over all stages; ``scaler`` None: losses are not scaled.
    ``compute``: the script's own forward and backward of a model that is one stage (runtime/worker/scripted.py).
    ``shards``: workers that hold each seat together, of which this one is number ``shard``.  ``make(stage)``: any stage
    of the pipeline, made once more from its layer specs, with weights that nobody may use; it leaves this worker's own
    module and random streams as they are.  None where that can't be.  ``pushed``: the stage of a script that runs
    forward, backward and step itself (core/worker/pushed.py), whose steps are never taken back.  ``judged()``: the norm
    by which the framework itself has judged the last step, not finite where it was skipped; None where the plugin does.
    ``layers``: the module's, in the order in which they run, if that is not its children's.  ``saves_last``: the
    trainer saves a checkpoint at a planned end that asks for one; False: whoever calls it does.
    """

    seat: Seat
    topology: Topology
    model: StageModel
    optimizer: OptimizerStep
    buckets: Buckets
    checkpoints: CheckpointFormat
    cursor: DataCursor
    micro_batch_size: int
    batch: Callable[[], int]
    next_batch: Callable[[str], tuple[Any, Any]]
    forward: Callable[[int, int], AbstractContextManager[Any]]
    clipping: float = 0.0
    state: Sequence[StatePart] = ()
    masters: Masters | None = None
    tied: Sequence[TiedWeight] = ()
    norm: Norm | None = None
    scaler: Scaler | None = None
    compute: Compute | None = None
    shards: int = 1
    shard: int = 0
    make: Callable[[int], MadeStage] | None = None
    pushed: PushedStage | None = None
    judged: Callable[[], torch.Tensor | None] = lambda: None
    layers: Sequence[torch.nn.Module] = ()
    saves_last: bool = True

    @property
    def gradients(self) -> GradientStore:
        """Where contributions are added up, and the optimizer's step finds their sum."""
        return self.model.summed(self.masters)


def described(framework: Framework) -> dict[str, Any]:
    """What the ``stage`` of ``framework`` trains: the names of its ``layers``' classes in the order in which they run,
    how many ``parameters``, of tied weights those of their first stage, in which ``precision``.

    A model that the script runs itself is one layer.
    """
    module, loss = framework.model.module, framework.model.loss
    layers = framework.layers or [each for each in module.children() if each is not loss]
    elsewhere = {id(tied.parameter) for tied in framework.tied if tied.stages[0] != framework.seat.chunk}
    kinds = {str(each.dtype).removeprefix("torch.") for each in trained(module)}
    return {
        "stage": framework.seat.stage,
        "layers": [type(each).__name__ for each in ([module] if framework.compute is not None else layers)],
        "parameters": sum(each.numel() for each in trained(module) if id(each) not in elsewhere),
        "precision": ", ".join(sorted(PRECISIONS.get(kind, kind) for kind in kinds))
        + (", with fp32 masters" if framework.masters is not None else ""),
    }


def trained(module: torch.nn.Module) -> Parameters:
    """The parameters of ``module`` that require a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
