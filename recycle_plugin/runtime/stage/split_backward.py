"""Deferred weight gradients inside layers: how I and W become two instructions.

A converted layer runs its own stock forward, in a graph that is cut off from the one around it. Outside, one node
stands for that graph. In I the node asks autograd for the gradient of the graph's input, and hands the graph to a
:class:`PendingWeights`. W asks autograd for the parameters' gradients, of all layers in one run. autograd computes both
halves, so whatever surrounds the layer (modes, patches, hooks on saved tensors, another dtype) acts as in stock, bit
for bit.

The node saves what the graph would: hooks on saved tensors and checkpointing see it once, as in stock. This avoids five
traps of torch's autograd (a test each in tests/torch/test_traps.py):

1. a parameter's gradient goes to the parameter, never to what comes back from ``saved_tensors``: that is a detached
   alias under non-reentrant checkpointing, and the gradient would be lost silently;
2. the graph ends at the layer's input, or pending work would keep the whole graph behind it alive;
3. parameters are no inputs of the node, or their hooks would fire in I as well;
4. each micro-batch is accumulated by itself: one GEMM over two, or ``addmm_`` into ``.grad``, rounds differently;
5. autograd sums the uses of one parameter in backward order, before one accumulation.

Two alternatives were measured (docs/figures.md). Our own operators that compute both halves without autograd take a
tenth less host time, and are wrong if anything surrounds a layer. Splitting the whole stage's graph, as
torch.distributed.pipelining does, holds all activations until W, and recomputes a checkpointed layer in each half. It
cannot split reentrant checkpoints, or a stage whose inputs have no gradient.

A weight may also be used outside its layer (``F.linear(x, layer.weight)``). I sets that gradient aside, and W adds it.
With three or more uses of both kinds, or with two in different reentrant checkpoints, the order of that sum is not
torch's.

A forward that differentiates while it runs (``torch.autograd.grad`` in a layer) gets its gradients at once, as without
a split. A layer is fused from then on in three cases:

* the forward differentiates twice through it, or by its parameters;
* its graph leads anywhere but to its input and its own parameters, or through a custom Function, which computes both
  halves at once;
* its parameters have hooks, which must see the gradient when, and as often as, in stock.

Layers that are not converted stay fused inside I: correct, but with less to overlap. So is a micro-batch whose halves
would gain nothing (runtime/stage/backward_choice.py): its forward runs outside of :meth:`DeferredWeights.forward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import checkpoint

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.converters import CONVERTERS, Converter
from recycle_plugin.runtime.stage.inner_gradients import asked_for, engine_runs
from recycle_plugin.runtime.stage.layer_graph import LayerGraph, run_engine

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


class _Work(NamedTuple):
    """The weight half of one use, and the graph task (one call into autograd) that it came from."""

    graph: LayerGraph
    saved: list[Tensor]
    gradient: Tensor
    task: int
    versions: list[int]  # of ``saved``: how often each was changed in place
    version: int  # of the gradient

    def load(self) -> None:
        if [one._version for one in self.saved] != self.versions or self.gradient._version != self.version:
            raise RuntimeError("a tensor that a weight gradient needs was changed in place between I and W")
        self.graph.saved.tensors = self.saved


class PendingWeights:
    """The weight half of one backward, from I to W. ``len()``: layer uses still to run. Dropping it drops the work."""

    def __init__(self) -> None:
        self._work: list[_Work] = []
        self._made: dict[Tensor, Tensor] = {}  # by I, outside the split layers

    def __len__(self) -> int:
        return len(self._work)

    @property
    def nbytes(self) -> int:
        """Bytes of memory kept alive; a shared storage counts once, parameters do not count."""
        tensors = [tensor for work in self._work for tensor in (*work.saved, work.gradient)]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        for parameter in {one for work in self._work for one in work.graph.parameters}:
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(storages.values()) + sum(gradient.nbytes for gradient in self._made.values())

    def add(self, graph: LayerGraph, saved: list[Tensor], gradient: Tensor) -> None:
        """Record the weight half of one use of a layer. Called by its node, in the order of the backward."""
        task, versions = torch._C._current_graph_task_id(), [one._version for one in saved]
        self._work.append(_Work(graph, saved, gradient, task, versions, gradient._version))

    @property
    def mixed(self) -> bool:
        """Whether I has made gradients of parameters whose layers are split."""
        return bool(self._made)

    def join(self, parameter: Tensor, gradient: Tensor) -> None:
        """Record a ``gradient`` of ``parameter`` that I has made outside its layer; W adds it to its own."""
        self._made[parameter] = gradient

    def run(self) -> None:
        """Compute and accumulate everything pending, once, for W; hooks fire here. A parameter's uses in one graph task
        are summed in backward order before one accumulation, as in stock.
        """
        work, self._work = self._work, []
        for parameters, uses in _runs(work):
            made = [parameter for parameter in parameters if parameter in self._made] if self._made else []
            for use in uses:
                use.load()
            outputs = (*[use.graph.output for use in uses], *made)
            gradients = (*[use.gradient for use in uses], *map(self._made.pop, made))
            run_engine(outputs, gradients, True, False, parameters, True, True)
        while self._made:
            parameter, gradient = self._made.popitem()
            torch.autograd.backward((parameter,), (gradient,))


def _runs(work: list[_Work]) -> Iterator[tuple[tuple[nn.Parameter, ...], list[_Work]]]:
    """Yield (parameters, uses) of each autograd run in W, one per graph task.

    A parameter used in several tasks (each reentrant checkpoint has its own) gets a run for each of them, in the order
    in which the tasks finished with the parameter.
    """
    tasks: dict[int, list[_Work]] = {}
    last: dict[tuple[int, int], nn.Parameter] = {}  # by (task, parameter's id), in the order of the last use
    for one in work:
        tasks.setdefault(one.task, []).append(one)
        for parameter in one.graph.parameters:
            last.pop((one.task, id(parameter)), None)
            last[one.task, id(parameter)] = parameter
    if len(tasks) == 1:
        yield tuple(last.values()), work
        return
    times = Counter([number for _, number in last])
    for task, uses in tasks.items():
        own = tuple([parameter for (of, number), parameter in last.items() if of == task and times[number] == 1])
        if own:
            yield own, uses
    for (task, number), parameter in last.items():
        if times[number] > 1:
            yield (parameter,), [use for use in tasks[task] if number in map(id, use.graph.parameters)]


class _Deferral:
    """Where the nodes of a :class:`DeferredWeights` put their work. A copied module gets its own, without splits."""

    def __init__(self) -> None:
        self.splits = False
        self.known: dict[int, nn.Parameter] = {}  # the layers' parameters by id, since hashing a tensor takes time
        self.put_off: set[int] = set()  # of these, weights of calls that were ever split
        self.held: PendingWeights | None = None
        self.aside: list[tuple[nn.Parameter, Tensor | None]] = []  # these weights' gradients before the running I
        self.unfit: set[nn.Parameter] = set()  # of layers used by the running forward in a way that cannot be split
        # an input that requires a gradient: keeps the node in the graph even if x is token ids
        self.anchor = torch.zeros((), requires_grad=True)
        expanded: Any = self.anchor.expand_as(self.anchor).grad_fn
        self.anchored = expanded.next_functions[0][0]

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return _Deferral, ()

    def trains(self, module: nn.Module) -> bool:
        """Return whether all the module's parameters are the layers', and at least one wants a gradient. A replacement
        of the parameter (torch.func.functional_call, a hook) is in the graph, but has no .grad.
        """
        wanted = False
        for parameter in module._parameters.values():
            if parameter is not None:
                if id(parameter) not in self.known:
                    return False
                wanted = wanted or parameter.requires_grad
        return wanted

    def run(self, module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
        """Run a call of a layer so that its backward is split; returns its output, or None if it cannot be split."""
        graph, fits = LayerGraph(), False
        try:
            if fits := graph.run(function, x, self.known):
                self.put_off_now(graph.parameters)
                return _split(torch._C._functorch.unwrap_if_dead(x), self.anchor, graph, self)
            return None
        finally:
            if not fits:
                self.unfit.update(one for one in module._parameters.values() if one is not None)

    def put_off_now(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the weights' gradients off from now on, also in a backward that runs, which recomputes their layer."""
        new = [one for one in parameters if id(one) not in self.put_off]
        self.put_off.update(map(id, new))
        if self.held is not None:
            self.set_aside(new)

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Empty the weights' gradients until the end of :meth:`DeferredWeights.hold`."""
        for one in parameters:
            self.aside.append((one, one.grad))
            one.grad = None

    def __enter__(self) -> None:
        """Begin a context in which uses of the layers are split."""
        self.splits = True

    def __exit__(self, *error: object) -> None:
        self.splits = False

    def take(self, graph: LayerGraph, saved: list[Tensor], gradient: Tensor) -> None:
        """Record the weight half of a node's backward if that backward is for weights. Such a backward is for all
        leaves, also the anchor; a ``torch.autograd.grad`` of something else skips the anchor.
        """
        if not torch._C._will_engine_execute_node(self.anchored):
            return
        if self.held is None:
            raise RecycleError(
                "a tensor of a layer's forward was differentiated later, outside of the job's own backward: "
                "detach tensors kept from a forward, or set recycle.split_backward to false"
            )
        self.held.add(graph, saved, gradient)

    def differentiated_twice(self, graph: LayerGraph) -> None:
        """Handle a backward that must have a graph itself, which this node cannot give."""
        if self.held is not None:
            raise RecycleError(_UNSEEN)
        self.unfit.update(graph.parameters)


_UNSEEN = (
    "a backward (a custom Function's, or the recomputation of a checkpointed layer) calls torch.autograd.grad by "
    "parameters, or twice through layers, whose backward is split, though the forward did not: "
    "set recycle.split_backward to false"
)


class _Split(torch.autograd.Function):
    """The node of a converted layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, graph: LayerGraph, deferral: _Deferral) -> Tensor:
        ctx.save_for_backward(*graph.saved.tensors)
        ctx.set_materialize_grads(False)  # like torch's own nodes, which pass no gradient on if they get none
        made, graph.made, graph.saved.tensors = graph.made, None, None
        ctx.graph, ctx.deferral = graph, deferral
        assert made is not None, "the graph has run"
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        graph = ctx.graph
        if torch.is_grad_enabled():
            ctx.deferral.differentiated_twice(graph)
        # detached, or pending work would keep the graph behind x alive
        graph.saved.tensors = saved = [one.detach() if one.requires_grad else one for one in ctx.saved_tensors]
        made = None
        if gradient is not None:
            ctx.deferral.take(graph, saved, gradient)
            if ctx.needs_input_grad[0] and graph.input:
                (made,) = run_engine((graph.output,), (gradient,), True, False, graph.input, True, False)
        graph.saved.tensors = None
        return made, None, None, None


# torch.autograd.Function.apply without its first checks: no transform is active here (_plain_autograd), and tensors of
# finished ones are unwrapped
_split: Callable[..., Tensor] = super(torch.autograd.Function, _Split).apply


def _run_seam(deferral: _Deferral, module: nn.Module, converter: Converter, *args: Any, **kwargs: Any) -> Tensor:
    """Run a call of a converted module's seam: split if possible, else by its own method."""
    if deferral.splits and _plain_autograd() and deferral.trains(module):
        call = converter.of(module, args, kwargs)
        if call is not None and _plain(call[1]) and (made := deferral.run(module, *call)) is not None:
            return made
    own: Tensor = getattr(type(module), converter.seam)(module, *args, **kwargs)
    return own


def _plain(x: Any) -> bool:
    return (type(x) is Tensor or type(x) is nn.Parameter) and not x.is_nested


def _dispatched() -> bool:
    """Return whether a dispatch mode is active, other than selective checkpointing's."""
    count = torch._C._len_torch_dispatch_stack()
    return not all(isinstance(torch._C._get_dispatch_stack_at(place), _SELECTIVE) for place in range(count))


def _plain_autograd() -> bool:
    """Return whether layers can be split here: with gradients; without autocast, torch.func, forward and dispatch
    modes.

    Under autocast several layers may share a cast, which belongs to the graph around them. torch.func and forward mode
    need the stock functions. A dispatch mode would see the functions that cut a graph off.
    """
    if not torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
        return False
    if torch._C._len_torch_dispatch_stack() and _dispatched():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


class DeferredWeights:
    """Converts the supported layers of ``module`` in place, so that their weight gradients can wait.

    Parameters, state-dict names and module types stay. ``converted`` names the modules that defer. ``fused`` names
    those with parameters that do not: unknown types, embeddings with max_norm or sparse gradients, and layers that
    share a parameter with a fused one (a half-fused sum would round differently).

    Only uses inside :meth:`forward`, and those recomputed inside :meth:`hold`, are split. Elsewhere, and in a copy of
    the module, the layers are stock. :meth:`fuse` and :meth:`restore` make them so for good.

    Raises ValueError if part of ``module`` is converted already.
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
        self.converted = tuple(self._layers)
        self.fused = tuple(name for name in self._names if name not in self._layers)

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context for a forward whose backward runs in :meth:`hold`; uses of converted layers are split."""
        self._deferral.unfit.clear()
        return self._deferral

    def unfit(self, asked: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """Fuse the layers that the last forward used in ways that cannot be split; returns their names.

        These are layers whose parameters' gradients it has ``asked`` for, layers it differentiated through twice, and
        layers whose graph cannot be split. If there are any, the forward must be run again.
        """
        found = {*asked, *self._deferral.unfit}
        return self.fuse(found) if found else ()

    def hooked(self) -> tuple[str, ...]:
        """Fuse the layers whose parameters have hooks, which may inspect all of their backward; returns their names."""
        found = [one for one in self._deferral.known.values() if one._backward_hooks or one._post_accumulate_grad_hooks]
        return self.fuse(found) if found else ()

    @contextmanager
    def hold(self) -> Iterator[PendingWeights]:
        """Return a context for the backward; it yields the collection that gets the deferred weight work."""
        deferral = self._deferral
        if deferral.held is not None:
            raise RuntimeError("hold() inside hold(): the backward of two micro-batches can't be collected at once")
        deferral.splits, deferral.held = True, (pending := PendingWeights())
        deferral.set_aside([one for key, one in deferral.known.items() if key in deferral.put_off])
        try:
            with engine_runs(self._refuse):
                yield pending
        finally:
            deferral.splits, deferral.held = False, None
            made = [(one, one.grad) for one, _ in deferral.aside]
            for one, before in deferral.aside:
                one.grad = before
            deferral.aside.clear()
        for one, gradient in made:
            if gradient is not None:  # W adds it in its turn, after other micro-batches' or this one's deferred part
                pending.join(one, gradient)

    def _refuse(self, inputs: tuple[Any, ...], accumulates: bool) -> None:
        if asked_for(inputs, self._deferral.known):
            raise RecycleError(_UNSEEN)

    def fuse(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """Make layers with one of ``parameters`` stock again, and those that share with them; returns their names."""
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
    """Return a context in which hooks of ``parameters`` do nothing; a hook removed inside stays removed."""
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
    return {name: part for name, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))}


def _choose(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers to convert: those with a converter that share no parameter with a layer without one."""
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
    # a replaced method, or a weight computed by a hook (weight_norm), stays as it is
    return own is None and converter.supports(part)
