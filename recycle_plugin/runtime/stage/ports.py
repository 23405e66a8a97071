"""Protocols for what a worker's trainer needs of the framework that built its model.

They say how gradients are summed, how a step is applied and counted, by what norm it is judged, and how a checkpoint is
written. An adapter fills each of them, as one :class:`Framework`. They are the framework's own functions, called where
its own step would call them; decisions about surviving a failure are made around them.
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

if TYPE_CHECKING:  # that module imports this one
    from recycle_plugin.runtime.stage.pushed_stage import PushedStage

Told = torch.Tensor | tuple[torch.Tensor, dict[str, int]]
"""A micro-batch's detached loss; or a flat tensor of the loss and other logged values, with {name: count}."""
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
Parameters = list[torch.nn.Parameter]
Reach = Callable[[str], None]
Clip = Callable[[], torch.Tensor | None]
"""Clips the gradients of the step that is being applied; returns the norm used for that, None if unknown."""
Compute = Callable[[int, int, int], torch.Tensor]
"""(step, replica, micro-batch) to its loss, after the script has called ``backward()`` on it."""
Source = Callable[[int, MicroBatch], Any]
"""(step, micro-batch) to its batch of inputs and labels."""


class OptimizerStep(Protocol):
    """A framework's optimizer step: applied once, or only counted. The undo record (runtime/state/undo) is
    prepared before ``wrapped`` steps, and filled while it steps.
    """

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The torch optimizer that changes the weights."""

    @property
    def steps(self) -> int:
        """The number of steps applied or skipped, including those before a loaded checkpoint."""

    def apply(self, clip: Clip) -> None:
        """Step; schedulers and counters advance. ``clip()`` is called where the framework's own step would clip."""

    def skip(self) -> None:
        """Advance schedulers and counters as after a step that overflowed; weights and optimizer state stay."""

    def pass_over(self) -> None:
        """Advance counters and schedulers for a step that the others applied before this worker came; the schedulers
        also for steps that the others skipped. Weights and optimizer state stay.
        """


class Buckets(Protocol):
    """A framework's way to sum the gradients of a stage's workers."""

    @property
    def limit(self) -> int:
        """The number of elements that ends a bucket."""

    @property
    def averages(self) -> bool:
        """Whether sums are divided by the logical number of replicas."""

    @property
    def group(self) -> MemberGroup:
        """The process group of the stage's workers."""

    def all_reduce(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the flat sum of ``gradients`` over the group, divided if ``averages``; they stay unchanged."""

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate ``tensors`` to a flat tensor."""

    def unflatten(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Split a flat tensor into parts in the shapes of ``like``."""


class Norm(Protocol):
    """The norm by which a step's gradients are judged."""

    def share(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> float:
        """Return this stage's squared share, from gradients by parameter; all its workers get the same."""

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Return the norm over all stages, a scalar, from {stage number: share}."""


class Scaler(Protocol):
    """A loss scale, and the rule by which it changes."""

    loss_scale: float

    def update_scale(self, overflow: bool) -> None:
        """Change the scale after a step that was applied or, on ``overflow``, skipped. Raises if it cannot go lower."""


class CheckpointShare(Protocol):
    """What one worker writes of a checkpoint, in any format.

    ``turn``: this worker's place among the ``turns`` workers that hold the same part of its stage; the first writes
    what is written once per stage. ``copies``: :meth:`save` copies contents before it returns, so its callers need not.
    """

    turn: int
    turns: int
    copies: bool

    def save(self, path: Path, contents: Any) -> None:
        """Write a file, at once or in the background. Never raise, since others may wait; :meth:`check` does."""

    def check(self) -> None:
        """Raise NotSaved if something could not be written."""


class CheckpointFormat(Protocol):
    """A framework's own checkpoint files: how state is gathered, written, and read. runtime/worker/checkpoint_files.py
    decides, alike for all frameworks, who writes when and where.
    """

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over this worker's files of the checkpoint ``path``, with the present ``state``."""

    def dump(self, contents: Any, file: Any) -> None:
        """Write ``contents`` to an open file, in any thread."""
        torch.save(contents, file)

    def complete(self, folder: Path) -> None:
        """Write what is made of all workers' files, which are in ``folder``; nothing in most formats. The first live
        worker calls this, and another again if that one is lost. Raises NotSaved.
        """
        return

    def read(self, state: StageState, folder: Path) -> None:
        """Load the state of this worker's stage and optimizer from the checkpoint ``folder``, without the other
        workers. Raises RecycleError if that is impossible.
        """


@dataclass(frozen=True)
class StageModel:
    """What a stage computes, and how.

    * ``loss(outputs, labels)``: on the last stage.
    * ``scale``: the divisor of each micro-batch's loss, the logical number of micro-batches of a replica.
    * ``reentrant()``: whether the first stage's data must require a gradient: reentrant checkpointing would else cut
      layers off from the graph.
    * ``keyed``: a forward that is run again draws the same random numbers.
    * ``told``: what all workers are told of a new loss.
    * ``gradients``: where the framework keeps gradients; None: ``parameter.grad`` (of the masters, if there are any).
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
        """Return where contributions are added up, and the step finds their sum."""
        if self.gradients is not None:
            return self.gradients
        return TorchGradients(trained(self.module)) if masters is None else masters.gradients


@dataclass(frozen=True)
class MadeStage:
    """A stage made beside the worker's own. ``forward(seed, place)``: as a Framework's; ``masters``: as there."""

    model: StageModel
    forward: Callable[[int, int], AbstractContextManager[Any]]
    masters: Masters | None = None

    @property
    def gradients(self) -> GradientStore:
        """Where contributions are added up."""
        return self.model.summed(self.masters)


def _no_iterator(what: str) -> tuple[Any, Any]:
    raise AssertionError(f"{what}: this job's data does not come from an iterator")


@dataclass(frozen=True)
class Framework:
    """All that a framework lends the trainer of the worker at ``seat`` (runtime/worker/trainer.py).

    * ``cursor``: the data cursor, with the positions of a replica's micro-batches in its data.
    * ``micro_batch_size``: samples of a micro-batch; ``batch()``: samples of a step, over all replicas.
    * ``next_batch(what)``: reads the script's plain iterator; ``what`` names it in errors.
    * ``forward(seed, place)``: a context in which a forward draws by ``seed``, for the micro-batch at that position.
    * ``clipping``: the largest norm of a step's gradients; 0: any.
    * ``state``: what else a step changes: schedulers and counters.
    * ``masters``: of a model in bf16 or fp16; the optimizer steps them.
    * ``norm`` None: the plugin computes the exact norm over all stages. ``scaler`` None: losses are not scaled.
    * ``compute``: the script's own forward and backward of a one-stage model (runtime/worker/scripted.py).
    * ``shards``: the workers that hold each seat together; this one is number ``shard``.
    * ``make(stage)``: builds any stage again from its layer specs, with placeholders for weights: load its state before
      use. It leaves this worker's module and random streams alone. None if that is impossible.
    * ``pushed``: the stage of a script that runs forward, backward and step itself (core/worker/pushed.py); its steps
      are never taken back.
    * ``judged()``: the norm by which the framework itself judged the last step, non-finite if it skipped the step; None
      if the plugin judges.
    * ``layers``: the module's in running order, if that is not its children's.
    * ``saves_last``: the trainer saves the checkpoint that a planned end asks for; False: its caller does.
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
    forward: Callable[[int, int], AbstractContextManager[Any]]
    next_batch: Callable[[str], tuple[Any, Any]] = _no_iterator
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
    """Describe what the stage of ``framework`` trains, for people.

    ``layers``: class names in running order (a model that the script runs itself is one layer). ``parameters``: their
    number; tied weights count at their first stage. ``precision``: their dtypes.
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
    """Return the parameters of ``module`` that require a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
