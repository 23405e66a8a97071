"""The computation of one pipeline stage, micro-batch by micro-batch.

A micro-batch's inputs, graph (stash) and deferred weight work live in the worker's store between instructions
(core/worker/step_store.py); this module computes one from the other. Gradients end up where the framework keeps them
(runtime/stage/gradient_store.py), summed in the program's order of weight gradients. In exact mode they end up in sums
of blocks (runtime/stage/block_sums.py), all of a micro-batch's at its W, also those that its I has made in layers that
are not split. In bf16 and fp16 the sums are the fp32 masters' (runtime/stage/masters.py), to which each instruction's
gradients are added by themselves.

After a failure a *boundary-only* forward or input gradient is run for the boundary tensor alone, since a peer needs it
again: it leaves no stash and adds nothing to any gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.port import COPY_S, Device, Tensors
from recycle_plugin.runtime.stage.backward_choice import BackwardChoice, Key
from recycle_plugin.runtime.stage.block_sums import BlockSums
from recycle_plugin.runtime.stage.boundary import (
    batch_part,
    differentiable,
    gradients,
    incoming,
    outgoing,
    packed,
    with_gradients,
)
from recycle_plugin.runtime.stage.gradient_store import Slots, empty, swapped
from recycle_plugin.runtime.stage.held_bytes import HeldBytes
from recycle_plugin.runtime.stage.inner_gradients import InnerGradients, engine_runs
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.stage.ports import StageModel, Told
from recycle_plugin.runtime.stage.repeatable import ModuleState, Rehearsal, Reuse, check_unchanged
from recycle_plugin.runtime.stage.split_backward import DeferredWeights, PendingWeights, resting_hooks

NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class LoadedBatch:
    """A micro-batch's data: the inputs on the first stage, the labels on the last one, None elsewhere."""

    data: Any = None
    labels: Any = None


@dataclass(frozen=True)
class Stash:
    """What F leaves for the backward: received activations (the graph's leaves), outputs and loss with their graph, and
    what splits that; None: I computes all gradients.
    """

    inputs: Tensors
    outputs: Tensors
    loss: torch.Tensor | None
    deferred: DeferredWeights | None


@dataclass(frozen=True)
class Inner:
    """What I leaves for W: the pending weight work, and in exact mode weight gradients that exist already."""

    pending: PendingWeights | None
    early: Slots | None


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of a forward: a loaded batch, received activations, and the object that splits its backward."""

    loaded: LoadedBatch
    inputs: Tensors  # leaves of the graph
    deferred: DeferredWeights | None


class Stage:
    """Runs forward and backward of single micro-batches of one stage.

    * ``deferred``: splits the backward; None leaves it fused.
    * ``randomness``: the context in which a micro-batch of a step draws in its forward ("") and in the halves of its
      backward ("input", "weight").
    * ``blocks``: exact mode's sums; ``masters``: of a model in bf16 or fp16.
    * ``fused``: gets the names of layers whose backward is no longer split; ``warn``: gets warnings.
    * ``tried``: other workers have checked that its forward may be run again.
    * ``held``: the bytes that a micro-batch holds.
    * ``choice``: which backwards are split; None: all or none.
    """

    def __init__(
        self,
        model: StageModel,
        deferred: DeferredWeights | None,
        randomness: Callable[[MicroBatch, int, str], AbstractContextManager[Any]],
        blocks: BlockSums | None = None,
        masters: Masters | None = None,
        fused: Callable[[tuple[str, ...]], None] = lambda names: None,
        warn: Callable[[str], None] = lambda text: None,
        tried: bool = False,
    ) -> None:
        self._model = model
        self._masters = masters
        self._parameters, self._made = list(model.module.parameters()), model.made
        self._by_id = {id(parameter): parameter for parameter in self._parameters}
        self._blocks = blocks
        self._deferred, self._fused, self._warn = deferred, fused, warn
        self._randomness = randomness
        self.held = HeldBytes(model.module)
        # in exact mode a whole I would hold all gradients beside their sums
        self.choice = BackwardChoice() if deferred is not None and blocks is None else None
        self.loss_scale = 1.0  # multiplies losses before the backward
        # what has been checked for changing no state: the forward, and the halves of a backward
        self._watched = {"forward"} if tried else set()
        self._memory: tuple[int, set[int]] = (0, set())  # (step, addresses of the weights)
        self._reuse = Reuse()
        self._trains: bool | None = None  # whether some micro-batch's outputs had a graph; None: none has run yet

    def resize(self, micro_batches: int, blocks: Blocks | None) -> None:
        """Train with this many micro-batches per replica and step from now on; ``blocks``: exact mode's, for these."""
        self._model = replace(self._model, scale=micro_batches)
        if self._blocks is not None:
            assert blocks is not None, "exact mode has blocks"
            self._blocks.resize(blocks)

    # --- compute -----------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        return self._model.device

    def load(self, batch: tuple[Any, Any], shared: bool = False) -> LoadedBatch:
        """Return a micro-batch's inputs (first stage) and labels (last stage), on the device. ``shared``: nobody else
        changes ``batch``.
        """
        model = self._model
        return LoadedBatch(
            batch_part(batch[0], model.device, shared) if model.first else None,
            batch_part(batch[1], model.device, shared) if model.last else None,
        )

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        """Return the results of F, I, W or B, by datum; with ``boundary_only`` I returns the boundary tensor alone."""
        op, stage, step, one = instruction.op, instruction.stage, instruction.step, instruction.works_on
        key = step, one
        if op is Op.F:
            data, received = Datum("data", stage, one, step), Datum("act", stage - 1, one, step)
            made, stash, loss = self.forward(key, have.get(data, LoadedBatch()), have.get(received, ()))
            found = {Datum("act", stage, one, step): made, Datum("stash", stage, one, step): stash}
            return found if loss is None else {**found, Datum("loss", stage, one, step): loss}
        if op is Op.W:
            self.backward_weight(key, have[Datum("inner", stage, one, step)])
            return {Datum("wgrad", stage, one, step): None}
        stash, grads = have[Datum("stash", stage, one, step)], have.get(Datum("grad", stage + 1, one, step))
        grad = Datum("grad", stage, one, step)
        if op is Op.B:
            return {grad: self.backward(key, stash, grads), Datum("wgrad", stage, one, step): None}
        if boundary_only:
            return {grad: self.backward_input_boundary_only(key, stash, grads)}
        made, inner = self.backward_input(key, stash, grads)
        return {grad: made, Datum("inner", stage, one, step): inner}

    def forward(self, key: Key, loaded: LoadedBatch, received: Tensors) -> tuple[Tensors, Stash, Told | None]:
        """Run one forward: returns what goes to the next stage, what the backward needs, and on the last stage the
        loss.

        Raises RecycleError if the model cannot be trained this way, for example if the forward calls ``backward()``.
        """
        model = self._model
        moved = model.device.from_host(received, "what goes into a forward", shared=True).wait(COPY_S)
        inputs = tuple([tensor.requires_grad_(differentiable(tensor)) for tensor in moved])
        given = ForwardInputs(loaded, inputs, self._splitting(key[1]))
        watched = "forward" not in self._watched and key[0] > 0
        outputs, loss = self._watched_forward(key, given) if watched else self._computed(key, given)
        if model.last:
            assert loss is not None, "the last stage makes the loss"
            return (), Stash(inputs, (), self._scaled(loss / model.scale), given.deferred), model.told(loss)
        stash = Stash(inputs, outgoing(outputs), None, given.deferred)
        made = packed(outputs, self._own_memory(key[0], stash.outputs))
        return tuple([tensor.detach() for tensor in made]), stash, None

    def _splitting(self, micro_batch: MicroBatch) -> DeferredWeights | None:
        """Return the object that splits a backward, or None. The first backward is always split, to measure the bytes
        for W, and in exact mode every one is.
        """
        whole = self.choice is not None and self.held.pending is not None and self.choice.whole(micro_batch)
        return None if whole else self._deferred

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times its scale, at least in fp32: in fp16 most scales would make it infinite."""
        if self.loss_scale == 1.0:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.loss_scale

    def _computed(self, key: Key, given: ForwardInputs) -> tuple[Any, torch.Tensor | None]:
        """Compute outputs and loss; again if layers had to be fused, since the forward differentiates through them."""
        unfit = given.deferred.hooked() if given.deferred is not None else ()
        while True:
            if unfit:
                self._fused(unfit)
            inner, failed = InnerGradients(self._by_id), None
            try:
                made = self._compute(key, given, inner)
            except Exception as error:
                failed = error
            if inner.adds:
                raise RecycleError(
                    "a layer or the loss calls backward() in its forward, which adds to the gradients of parameters, "
                    "once more for each time that the forward is run: use torch.autograd.grad, "
                    "or give backward() inputs=[...] without parameters"
                ) from failed
            unfit = given.deferred.unfit(inner.asked) if given.deferred is not None else ()
            if not unfit and failed is not None:
                raise failed
            if not unfit:
                if key[0] > 0 and not self._reuse.known:
                    self._reuse.see(_made(*made))
                return made

    def _compute(self, key: Key, given: ForwardInputs, inner: InnerGradients) -> tuple[Any, torch.Tensor | None]:
        model, (step, micro_batch) = self._model, key
        # an evaluation has a negative step; a boundary-only forward has a graph too: layers may want one, and without
        # it torch may choose other kernels
        split = NOTHING if given.deferred is None else given.deferred.forward()
        with self._randomness(micro_batch, step, ""), torch.set_grad_enabled(step > 0), engine_runs(inner.heard), split:
            outputs = model.module(self._data(given) if model.first else incoming(given.inputs))
            if not model.last:
                return outputs, None
            labels = batch_part(given.loaded.labels, model.device)
            return outputs, _checked(model.loss(outputs, labels) if model.loss is not None else outputs)

    def backward(self, key: Key, stash: Stash, grads: Tensors | None) -> Tensors:
        """Compute both gradients at once. Return the gradients for the previous stage."""
        with self._summing(key), self._drawing(key), self._watching("both"):
            with _hold(stash) as pending:
                made = self._differentiate(stash, grads)
            if pending is not None:
                pending.run()
        return made

    def backward_input(self, key: Key, stash: Stash, grads: Tensors | None) -> tuple[Tensors, Inner]:
        """Compute the input's gradient; the weights' work waits for :meth:`backward_weight`."""
        if self.choice is not None:
            self.choice.runs(key, stash.deferred is None)
        early = empty(self._made) if self._blocks is not None else None
        aside = NOTHING if early is None else self._aside(early)
        with self._drawing(key), self._watching("input"), aside, _hold(stash) as pending:
            made = self._differentiate(stash, grads)
        self._collect()
        if self.held.pending is None:
            self.held.left(pending, early)
        if self.choice is not None and pending is not None and pending.mixed:
            self.choice.keep_apart()
        return made, Inner(pending, early)

    @contextmanager
    def _aside(self, early: Slots) -> Iterator[None]:
        """Return a context in which ``early`` gets the weight gradients. Hooks of their sums are called in W."""
        hooks = [
            (parameter._post_accumulate_grad_hooks, dict(parameter._post_accumulate_grad_hooks))
            for parameter in self._parameters
            if parameter._post_accumulate_grad_hooks
        ]
        for each, _ in hooks:
            each.clear()
        try:
            with swapped(self._made, early):
                yield
        finally:
            for each, were in hooks:
                each.update(were)

    def backward_input_boundary_only(self, key: Key, stash: Stash, grads: Tensors | None) -> Tensors:
        """Compute the input's gradient for the boundary alone: no parameter's gradient changes, now or later.

        Parameters' gradients are set aside: torch.autograd.grad would leave them alone, but refuses checkpointed
        layers.
        """
        aside = swapped(self._made, empty(self._made))
        with self._drawing(key), aside, resting_hooks(self._parameters), _hold(stash):
            return self._differentiate(stash, grads)

    def backward_weight(self, key: Key, inner: Inner) -> None:
        """Compute the weight gradients that :meth:`backward_input` deferred, and add them to the sums."""
        with self._summing(key):
            if inner.early is not None:
                self._add(inner.early)
            if inner.pending is not None:
                with self._watching("weight"):  # draws nothing: only the operators' own work runs
                    inner.pending.run()

    # --- sums --------------------------------------------------------------------------------------

    def summed(self) -> None:
        """Drop this step's contributions, which are now in a sum over all workers. Raises RecycleError if no output of
        the stage depends on its parameters.
        """
        if self._trains is False:
            raise RecycleError(
                f"nothing that {'the first' if self._model.first else 'a'} stage gives depends on its parameters, "
                "so they would not be trained: reentrant activation checkpointing cuts off layers whose inputs have "
                "no gradient, such as token ids; set pipeline.use_reentrant to false, "
                "or leave them out of checkpointable_layers (parameters that are not to be trained: "
                "requires_grad = False)"
            )
        self.forget_sums()

    def forget_sums(self) -> None:
        """Drop the sums of blocks."""
        if self._blocks is not None:
            self._blocks.clear()

    # --- parts -------------------------------------------------------------------------------------

    def _drawing(self, key: Key) -> AbstractContextManager[Any]:
        """Return a context in which the backward's hooks and functions draw keyed numbers, other than the forward's."""
        return self._randomness(key[1], key[0], "input")

    def _differentiate(self, stash: Stash, grads: Tensors | None) -> Tensors:
        if self._model.last:
            assert stash.loss is not None, "the last stage has made the loss"
            _run_engine((stash.loss,), (torch.ones_like(stash.loss),))
        else:
            assert grads is not None, "the next stage has sent them"
            self._run_graph(stash.outputs, grads)
        return gradients(stash.inputs)

    def _run_graph(self, outputs: Tensors, grads: Tensors) -> None:
        if any(output.requires_grad for output in outputs):
            self._trains = True
            found = with_gradients(
                outputs, self._model.device.from_host(grads, "what goes into a backward", shared=True).wait(COPY_S)
            )
            if found:
                _run_engine(*zip(*found))
        elif self._trains is None:
            self._trains = False if any(parameter.requires_grad for parameter in self._parameters) else None

    def _watched_forward(self, key: Key, given: ForwardInputs) -> tuple[Any, torch.Tensor | None]:
        """Run the first training forward, twice if it is repeatable, and check what it changes."""
        self._watched.add("forward")
        module, before = self._model.module, ModuleState(self._model.module)
        if self._model.keyed:
            rehearsal = Rehearsal(module, before, self._blocks is not None, self._warn)
            rehearsal.once(self.held.forward(lambda: _made(*self._computed(key, given)), given.inputs))
            computed = self._computed(key, given)
            rehearsal.twice(_made(*computed))
            return computed
        computed = self._computed(key, given)
        check_unchanged(module, before, "forward")
        return computed

    def _watching(self, half: str) -> AbstractContextManager[None]:
        """Return a context for a backward: the first of each ``half`` must leave parameters and buffers unchanged."""
        return NOTHING if half in self._watched else self._watched_backward(half)

    @contextmanager
    def _watched_backward(self, half: str) -> Iterator[None]:
        before = ModuleState(self._model.module)
        yield
        self._watched.add(half)
        check_unchanged(self._model.module, before, "backward")
        called: dict[torch.Tensor, str] = {parameter: name for name, parameter in self._model.module.named_parameters()}
        sparse = (
            called.get(parameter, "a weight")
            for parameter, gradient in zip(self._made.parameters, self._made.view(), strict=True)
            if gradient is not None and gradient.layout is not torch.strided
        )
        if (name := next(sparse, None)) is not None:
            raise RecycleError(
                f"{name} has sparse gradients, which are not summed over replicas yet; build its layer with "
                "sparse=False"
            )

    def _own_memory(self, step: int, members: Tensors) -> Tensors:
        """Return tensors for a peer, copied if the optimizer or the next forward may change their memory."""
        if self._memory[0] != step:
            tensors = (*self._model.module.parameters(), *self._model.module.buffers())
            self._memory = step, {tensor.untyped_storage().data_ptr() for tensor in tensors}
        own, may = self._memory[1], self._reuse.may
        return tuple(
            [member.clone() if may or member.untyped_storage().data_ptr() in own else member for member in members]
        )

    def _data(self, given: ForwardInputs) -> Any:
        """Copy the inputs, since a layer may change them."""
        data = batch_part(given.loaded.data, self._model.device)
        if self._model.reentrant():
            for tensor in data if isinstance(data, tuple) else (data,):
                tensor.requires_grad_(differentiable(tensor))
        return data

    def _summing(self, key: Key) -> AbstractContextManager[None]:
        """Return a context in which additions to gradients count as the micro-batch's."""
        return NOTHING if self._blocks is None and self._masters is None else self._summing_apart(key)

    @contextmanager
    def _summing_apart(self, key: Key) -> Iterator[None]:
        with NOTHING if self._blocks is None else self._blocks.adding(key[1]):
            yield
            self._collect()

    def _add(self, early: Slots) -> None:
        """Add gradients that were set aside, and call their hooks, as a backward does."""
        self._made.add(early)
        for parameter, gradient in zip(self._made.parameters, early, strict=True):
            if gradient is not None:
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                    hook(parameter)

    def _collect(self) -> None:
        if self._masters is not None:
            self._masters.collect()


def _hold(stash: Stash) -> AbstractContextManager[PendingWeights | None]:
    return NOTHING if stash.deferred is None else stash.deferred.hold()


def _run_engine(outputs: Tensors, wanted: Tensors) -> None:
    """Do as torch.autograd.backward, whose checks of arguments take as long as the backward of a small layer."""
    _engine_run_backward(outputs, wanted, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _made(outputs: Any, loss: torch.Tensor | None) -> Tensors:
    return outgoing(outputs) if loss is None else (loss,)


def _checked(loss: Any) -> torch.Tensor:
    if not torch.is_tensor(loss) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if torch.is_tensor(loss) else f"a {type(loss).__name__}"
    elif not loss.is_floating_point():
        found = f"of type {str(loss.dtype).removeprefix('torch.')}, which has no gradient"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        found = "computed from nothing that is trained, or detached from it"
    else:
        return loss
    raise RecycleError(
        f"the loss of a micro-batch is {found}: loss_fn, or without one the last layer, has to give a tensor with one "
        "number"
    )
