"""Deferred weight gradients inside layers: how I and W become two instructions.

A converted layer runs one autograd node.  In I the node returns the gradient of its input and hands
what the weight gradient needs to a :class:`PendingWeights`; W computes the weight gradients from there
and delivers them through ``AccumulateGrad``.  Both halves together are bitwise equal to stock backward.

The node is the one place that cures five traps of torch's autograd (a test each in
tests/torch/test_traps.py):

1. parameters are held by reference, never through ``saved_tensors``: what comes back from there under
   non-reentrant checkpointing is a detached alias, and the gradient would be lost without a word;
2. W runs under ``no_grad`` on detached tensors, or pending work keeps the whole graph behind it alive;
3. parameters are no inputs of the node, or their hooks fire in I as well;
4. each micro-batch is accumulated by itself: one GEMM over two, or ``addmm_`` into ``.grad``, rounds
   differently;
5. uses of one parameter are summed in the order of the backward before one accumulation.

A weight may also be used past its layer (``F.linear(x, layer.weight)``): what I makes of its gradient there is put
aside, and joins the rest in W.  With three uses or more of both kinds the order of that sum is not torch's.

A forward that differentiates while it runs (``torch.autograd.grad`` in a layer) gets gradients as it does without a
split, and nothing is put off by that.  Where it differentiates twice through a layer, or by a layer's parameters, the
layer is fused from then on.  So is one with hooks on its parameters, which see the gradient when, and as often as,
stock shows it to them.

What is not converted stays fused inside I: correct, but with less to overlap.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.block_sums import in_place_of
from recycle_plugin.runtime.stage.inner_gradients import asked_for, engine_runs
from recycle_plugin.runtime.stage.operators import CONVERTERS, Converter, Gradients, Operator


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """How often each was changed in place."""
    return tuple(tensor._version for tensor in tensors)


class _Work(NamedTuple):
    """The weight half of one use, with the graph task (one call into autograd) that it came from."""

    operator: Operator
    x: Tensor
    gradient: Tensor
    task: int
    versions: tuple[int, ...]

    @property
    def keys(self) -> list[tuple[int, nn.Parameter]]:
        return [(self.task, parameter) for parameter in self.operator.parameters]

    def gradients(self) -> Gradients:
        if _versions((self.x, self.gradient)) != self.versions:
            raise RuntimeError("a tensor that a weight gradient needs was changed in place between I and W")
        return self.operator.weight_gradients(self.x, self.gradient)


class PendingWeights:
    """The weight half of one backward: what I leaves and W consumes.

    ``len()``: layer uses still to run.  Dropping the object drops the work.
    """

    def __init__(self) -> None:
        self._work: deque[_Work] = deque()
        self._made: dict[nn.Parameter, Tensor] = {}  # by I, past the layers that are split

    def __len__(self) -> int:
        return len(self._work)

    @property
    def nbytes(self) -> int:
        """Bytes of memory kept alive, a storage that several uses share counted once."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for work in self._work
            for storage in (work.x.untyped_storage(), work.gradient.untyped_storage())
        }
        return sum(storages.values()) + sum(gradient.nbytes for gradient in self._made.values())

    def add(self, operator: Operator, x: Tensor, gradient: Tensor) -> None:
        """Take the weight half of one use of a layer; called by its node, in the order of the backward."""
        x, gradient = x.detach(), gradient.detach()
        task = torch._C._current_graph_task_id()
        self._work.append(_Work(operator, x, gradient, task, _versions((x, gradient))))

    def join(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take a ``gradient`` of ``parameter`` that I has made outside of its layer, for W to add to its own and
        deliver.
        """
        self._made[parameter] = gradient

    @torch.no_grad()
    def run(self) -> None:
        """W: compute and accumulate everything pending, once; hooks fire here.

        A parameter's uses in one graph task are summed in backward order and accumulated when the last
        is there, which is when and how stock backward does it.
        """
        uses = Counter(key for work in self._work for key in work.keys)
        sums: dict[tuple[int, nn.Parameter], Tensor] = {}
        while self._work:
            work = self._work.popleft()
            for parameter, gradient in work.gradients():
                key = (work.task, parameter)
                sums[key] = sums[key] + gradient if key in sums else gradient
                uses[key] -= 1
                if not uses[key]:
                    whole, made = sums.pop(key), self._made.pop(parameter, None) if self._made else None
                    torch.autograd.backward([parameter], [whole if made is None else made + whole])
        while self._made:
            parameter, gradient = self._made.popitem()
            torch.autograd.backward((parameter,), (gradient,))


class _Deferral:
    """Where the nodes of one :class:`DeferredWeights` put their work.

    A copied module gets its own, which splits nothing.
    """

    def __init__(self) -> None:
        self.splits = False
        self.known: dict[int, nn.Parameter] = {}  # of the layers, by id: a tensor takes its time to be hashed
        self.trained: set[int] = set()
        self.put_off: set[int] = set()  # of these, weights whose gradient was ever put off
        self.held: PendingWeights | None = None
        self.twice: set[nn.Parameter] = set()  # of layers through which the running forward differentiates twice
        # An input that requires a gradient, so that the node is in the graph even when x is token ids.
        self.anchor = torch.zeros((), requires_grad=True)
        expanded: Any = self.anchor.expand_as(self.anchor).grad_fn
        self.anchored = expanded.next_functions[0][0]

    def __reduce__(self) -> tuple[type, tuple]:
        return _Deferral, ()

    def trains(self, operator: Operator) -> bool:
        """Whether the operator's parameters are those of the layers, want gradients as at the conversion, and one of
        them does.

        A weight in the parameter's place (torch.func.functional_call, a hook) is in the graph, and has no .grad.
        """
        wanted = False
        for parameter in operator.parameters:
            if id(parameter) not in self.known or parameter.requires_grad != (id(parameter) in self.trained):
                return False
            wanted = wanted or parameter.requires_grad
        return wanted

    @contextmanager
    def splitting(self) -> Iterator[None]:
        """Inside of this context uses of the layers are split."""
        self.splits = True
        try:
            yield
        finally:
            self.splits = False

    def take(self, operator: Operator, x: Tensor, gradient: Tensor) -> None:
        """Take the weight half of a node's backward, if that is one for weights.

        Then it is for all leaves, this anchor too; ``torch.autograd.grad`` of something else passes the anchor by.
        """
        if not torch._C._will_engine_execute_node(self.anchored):
            return
        if self.held is None:
            raise RecycleError(
                "a tensor of a layer's forward was differentiated after it, outside of the job's own backward: "
                "detach what is kept of a forward, or set recycle.split_backward to false"
            )
        self.held.add(operator, x, gradient)
        self.put_off.update(map(id, operator.parameters))

    def differentiated_twice(self, operator: Operator) -> None:
        """Note that a node's backward is to have a graph itself, which this one has not."""
        if self.held is not None:
            raise RecycleError(_UNSEEN)
        self.twice.update(operator.parameters)


_UNSEEN = (
    "a backward (a custom Function's, or the recomputation of a checkpointed layer) calls torch.autograd.grad by "
    "parameters, or twice through layers, whose backward is split, and the forward did not: "
    "set recycle.split_backward to false"
)


class _Split(torch.autograd.Function):
    """The node of a converted layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, operator: Operator, deferral: _Deferral) -> Tensor:
        ctx.save_for_backward(x)
        ctx.operator, ctx.deferral = operator, deferral
        ctx.versions = _versions(operator.parameters)
        # detach: F.linear returns a view for 3-D inputs, and a node's view must not be changed in place,
        # which is what nn.ReLU(inplace=True) behind a layer does
        return operator.forward(x).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            ctx.deferral.differentiated_twice(ctx.operator)
        if _versions(ctx.operator.parameters) != ctx.versions:  # autograd guards only what it saved itself
            raise RuntimeError(
                "a parameter was changed in place between F and I: was the optimizer stepped in between?"
            )
        (x,) = ctx.saved_tensors
        ctx.deferral.take(ctx.operator, x, gradient)
        wanted = ctx.needs_input_grad[0]
        return ctx.operator.input_gradient(x, gradient) if wanted else None, None, None, None


def _run_seam(deferral: _Deferral, module: nn.Module, converter: Converter, *args: Any, **kwargs: Any) -> Tensor:
    """What a converted module's seam runs instead of its own method."""
    call = converter.split(module, *args, **kwargs) if deferral.splits and _plain_autograd() else None
    if call is None or not deferral.trains(call[0]):
        return getattr(type(module), converter.seam)(module, *args, **kwargs)
    operator, x = call
    return _Split.apply(x, deferral.anchor, operator, deferral)


def _plain_autograd() -> bool:
    """Whether layers can be split here: with gradients, and without autocast, torch.func and forward mode.

    Under autocast the casts belong to the graph; torch.func and forward mode need the stock functions.
    """
    if not torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


class DeferredWeights:
    """Converts the supported layers of ``module`` in place, so that their weight gradients can wait.

    Parameters, state-dict names and module types stay.  ``converted`` and ``fused`` name the modules that
    defer and those with parameters of their own that stay fused: unknown types, layers with options that
    the operators do not know, and layers that share a parameter with a fused one (a sum half fused would
    round differently).

    Uses of a layer inside of :meth:`forward`, and those that :meth:`hold` computes once more, are split.  Everywhere
    else, and in a copy of the module, the layers are stock.  :meth:`fuse` and :meth:`restore` make them so for good.

    Raises ValueError if a part of ``module`` is converted already.
    """

    def __init__(self, module: nn.Module) -> None:
        self._deferral = _Deferral()
        self._names = tuple(_owners(module))
        self._layers = _choose(module)
        self._seams = {name: CONVERTERS[type(layer)].seam for name, layer in self._layers.items()}
        for layer in self._layers.values():
            converter = CONVERTERS[type(layer)]
            vars(layer)[converter.seam] = partial(_run_seam, self._deferral, layer, converter)
        self._learn()

    def _learn(self) -> None:
        self._deferral.known = {
            id(parameter): parameter for layer in self._layers.values() for parameter in layer.parameters(recurse=False)
        }
        self._deferral.trained = {
            number for number, parameter in self._deferral.known.items() if parameter.requires_grad
        }
        self.converted = tuple(self._layers)
        self.fused = tuple(name for name in self._names if name not in self._layers)

    def forward(self) -> AbstractContextManager:
        """A context for a forward whose backward will run in :meth:`hold`; uses of the converted layers inside are
        split.
        """
        self._deferral.twice.clear()
        return self._deferral.splitting()

    def unfit(self, asked: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """Fuse the layers that the last forward has differentiated in a way that a split does not allow; returns their
        names.

        These are those whose parameters it has ``asked`` for gradients of, or through which it has differentiated
        twice. Where there are any, the forward has to be run again.
        """
        return self.fuse({*asked, *self._deferral.twice})

    def hooked(self) -> tuple[str, ...]:
        """Fuse the layers whose parameters have hooks, which may look at anything of their backward; returns their
        names.
        """
        return self.fuse(
            [one for one in self._deferral.known.values() if one._backward_hooks or one._post_accumulate_grad_hooks]
        )

    @contextmanager
    def hold(self) -> Iterator[PendingWeights]:
        """A context for the backward, whose weight work is left in the collection that this yields."""
        if self._deferral.held is not None:
            raise RuntimeError("hold() inside hold(): the backward of two micro-batches can't be collected at once")
        self._deferral.held = pending = PendingWeights()
        weights = [parameter for parameter in self._deferral.known.values() if parameter.requires_grad]
        made: list[Tensor | None] = [None] * len(weights)
        try:
            with self._deferral.splitting(), engine_runs(self._refuse), in_place_of(weights, made):
                yield pending
        finally:
            self._deferral.held = None
        for parameter, gradient in zip(weights, made):
            if gradient is None:
                continue
            if (
                id(parameter) in self._deferral.put_off
            ):  # of other micro-batches, or of this one: theirs and this are added in the order of W
                pending.join(parameter, gradient)
            else:
                torch.autograd.backward([parameter], [gradient])

    def _refuse(self, inputs: tuple, accumulates: bool) -> None:
        if asked_for(inputs, self._deferral.known):
            raise RecycleError(_UNSEEN)

    def fuse(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """Make the layers that have one of ``parameters`` stock again, with those that share a parameter with them.

        Returns their names.
        """
        asked, names = set(parameters), []
        while asked and (
            found := [
                name for name, layer in self._layers.items() if not asked.isdisjoint(layer.parameters(recurse=False))
            ]
        ):
            for name in found:
                layer = self._layers.pop(name)
                vars(layer).pop(self._seams[name], None)
                asked.update(layer.parameters(recurse=False))
            names += found
        if names:
            self._learn()
        return tuple(names)

    def restore(self) -> None:
        """Undo the conversion.  Graphs built before still defer; calling it twice does nothing."""
        self.fuse(list(self._deferral.known.values()))


@contextmanager
def resting_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside of this context hooks of ``parameters`` do nothing; one that is removed there stays so."""
    resting = [
        (hooks, dict(hooks))
        for one in parameters
        for hooks in (one._backward_hooks, one._post_accumulate_grad_hooks)
        if hooks
    ]
    for hooks, were in resting:
        hooks.update(dict.fromkeys(were, lambda *_: None))
    try:
        yield
    finally:
        for hooks, were in resting:
            hooks.update({key: hook for key, hook in were.items() if key in hooks})


def _owners(module: nn.Module) -> dict[str, nn.Module]:
    """Modules with parameters of their own, by name."""
    return {name: part for name, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))}


def _choose(module: nn.Module) -> dict[str, nn.Module]:
    """The layers to convert: those with a converter that share no parameter with a layer that has none."""
    owners = _owners(module)
    chosen = {name: part for name, part in owners.items() if _supported(name, part)}
    while True:
        fused = {p for name, part in owners.items() if name not in chosen for p in part.parameters(recurse=False)}
        kept = {name: part for name, part in chosen.items() if fused.isdisjoint(part.parameters(recurse=False))}
        if len(kept) == len(chosen):
            return kept
        chosen = kept


def _supported(name: str, part: nn.Module) -> bool:
    converter = CONVERTERS.get(type(part))
    if converter is None:
        return False
    own = vars(part).get(converter.seam)
    if isinstance(own, partial) and own.func is _run_seam:
        raise ValueError(f"{name or type(part).__name__} is converted already: restore() it first")
    # somebody else's replacement of the method, or a weight computed by a hook (weight_norm), stays as it is
    return own is None and converter.supports(part)
