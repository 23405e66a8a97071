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

What is not converted stays fused inside I: correct, but with less to overlap.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Gradients = Iterable[tuple[nn.Parameter, Tensor]]


class Operator(Protocol):
    """One use of a layer's parameters, with the two halves of its backward apart.

    ``x``: the input, any shape; ``gradient``: that of the output, in the output's shape and dtype.
    """

    parameters: tuple[nn.Parameter, ...]

    def forward(self, x: Tensor) -> Tensor: ...

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Gradient of ``x``, in its shape.  Called only when ``x`` requires one."""

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> Gradients:
        """A gradient in its parameter's shape for each parameter that requires one."""


class LinearOperator:
    """``x [..., in] @ weight [out, in].T + bias [out]``; the two halves repeat torch's own GEMMs."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight, self.bias = weight, bias
        self.parameters = (weight,) if bias is None else (weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        rows, upper = _rows(x), _rows(gradient)
        if rows.stride() == (1, rows.shape[0]):  # column-major: torch multiplies the transposes
            return self.weight.t().mm(upper.t()).t().view(x.shape)
        return upper.mm(self.weight).view(x.shape)

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> Gradients:
        rows = _rows(gradient)
        if self.weight.requires_grad:
            yield self.weight, rows.t().mm(_rows(x))
        if self.bias is not None and self.bias.requires_grad:
            # torch folds a contiguous input to two dimensions, adds the bias there and sums there
            yield self.bias, rows.sum(0) if x.is_contiguous() else gradient.sum(tuple(range(gradient.dim() - 1)))


def _rows(x: Tensor) -> Tensor:
    """``x [..., width]`` as torch folds it for a GEMM: [everything else, width], a view where that is possible."""
    return x.reshape(-1, x.shape[-1])


class EmbeddingOperator:
    """Rows of ``weight [vocabulary, hidden]`` by ``x``, int64 ids of any shape; ids have no gradient."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.parameters = (weight,)

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight)

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        raise TypeError("the ids of an embedding have no gradient")

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> Gradients:
        yield self.weight, torch.ops.aten.embedding_dense_backward(gradient, x, self.weight.shape[0], -1, False)


@dataclass(frozen=True)
class Converter:
    """How one exact layer type is converted.

    ``split(module, *args, **kwargs)`` gets the arguments of the module's method ``seam`` and returns the
    operator and its input, or None to run the stock method for this call.  ``supports(module)`` is asked
    once, at conversion.
    """

    seam: str
    split: Callable[..., tuple[Operator, Tensor] | None]
    supports: Callable[[nn.Module], bool] = lambda module: True


_CONVERTERS: dict[type[nn.Module], Converter] = {}


def register_converter(kind: type[nn.Module], converter: Converter) -> None:
    """Convert modules whose type is exactly ``kind`` (a subclass may have another forward)."""
    _CONVERTERS[kind] = converter


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
        return sum(storages.values())

    def add(self, operator: Operator, x: Tensor, gradient: Tensor) -> None:
        """Called by the node during backward, in the order of the backward."""
        x, gradient = x.detach(), gradient.detach()
        task = torch._C._current_graph_task_id()
        self._work.append(_Work(operator, x, gradient, task, _versions((x, gradient))))

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
                    torch.autograd.backward([parameter], [sums.pop(key)])


class _Deferral:
    """Where the nodes of one :class:`DeferredWeights` put their work.  A copied module gets its own."""

    def __init__(self) -> None:
        self.held: PendingWeights | None = None
        # kept alive by the backward's own callback, so that one that fails leaves nothing behind
        self.ending: WeakValueDictionary[int, PendingWeights] = WeakValueDictionary()
        # An input that requires a gradient, so that the node is in the graph even when x is token ids.
        self.anchor = torch.zeros((), requires_grad=True)

    def __reduce__(self) -> tuple[type, tuple]:
        return _Deferral, ()

    def pending(self) -> PendingWeights:
        """The held collection, or outside of ``hold`` one that runs when the current backward ends."""
        if self.held is not None:
            return self.held
        task = torch._C._current_graph_task_id()
        pending = self.ending.get(task)
        if pending is None:
            pending = self.ending[task] = PendingWeights()
            torch.autograd.Variable._execution_engine.queue_callback(pending.run)
        return pending


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
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        if _versions(ctx.operator.parameters) != ctx.versions:  # autograd guards only what it saved itself
            raise RuntimeError("a parameter was changed in place between F and I: was the optimizer stepped in between?")
        (x,) = ctx.saved_tensors
        ctx.deferral.pending().add(ctx.operator, x, gradient)
        wanted = ctx.needs_input_grad[0]
        return ctx.operator.input_gradient(x, gradient) if wanted else None, None, None, None


def _run_seam(deferral: _Deferral, module: nn.Module, converter: Converter, *args: Any, **kwargs: Any) -> Tensor:
    """What a converted module's seam runs instead of its own method."""
    stock = partial(getattr(type(module), converter.seam), module)
    # Under autocast the casts belong to the graph; without grad there is nothing to split.
    call = None if not torch.is_grad_enabled() or _autocast() else converter.split(module, *args, **kwargs)
    if call is None or not any(parameter.requires_grad for parameter in call[0].parameters):
        return stock(*args, **kwargs)
    operator, x = call
    return _Split.apply(x, deferral.anchor, operator, deferral)


def _autocast() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


class DeferredWeights:
    """Converts the supported layers of ``module`` in place, so that their weight gradients can wait.

    Parameters, state-dict names and module types stay.  ``converted`` and ``fused`` name the modules that
    defer and those with parameters of their own that stay fused: unknown types, layers with options that
    the operators do not know, and layers that share a parameter with a fused one (a sum half fused would
    round differently).

    Outside of :meth:`hold` a backward delivers its weight gradients when it ends, summed as stock does.
    Parameters are not part of the graph, hence ``torch.autograd.grad`` with respect to them and double
    backward do not work on converted layers; :meth:`restore` brings them back.

    Raises ValueError if a part of ``module`` is converted already.
    """

    def __init__(self, module: nn.Module) -> None:
        self._deferral = _Deferral()
        chosen = _choose(module)
        for layer in chosen.values():
            converter = _CONVERTERS[type(layer)]
            vars(layer)[converter.seam] = partial(_run_seam, self._deferral, layer, converter)
        self._layers = chosen
        self.converted = tuple(chosen)
        self.fused = tuple(name for name, layer in _owners(module).items() if name not in chosen)

    @contextmanager
    def hold(self) -> Iterator[PendingWeights]:
        """Backward runs inside leave their weight work in the collection that this yields."""
        if self._deferral.held is not None:
            raise RuntimeError("hold() inside hold(): the backward of two micro-batches can't be collected at once")
        self._deferral.held = pending = PendingWeights()
        try:
            yield pending
        finally:
            self._deferral.held = None

    def restore(self) -> None:
        """Undo the conversion.  Graphs built before still defer; calling it twice does nothing."""
        for layer in self._layers.values():
            vars(layer).pop(_CONVERTERS[type(layer)].seam, None)
        self._layers = {}
        self.converted, self.fused = (), self.fused + self.converted


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
    converter = _CONVERTERS.get(type(part))
    if converter is None:
        return False
    own = vars(part).get(converter.seam)
    if isinstance(own, partial) and own.func is _run_seam:
        raise ValueError(f"{name or type(part).__name__} is converted already: restore() it first")
    # somebody else's replacement of the method, or a weight computed by a hook (weight_norm), stays as it is
    return own is None and converter.supports(part)


def _plain_weight(module: nn.Module) -> bool:
    return type(module._parameters.get("weight")) is nn.Parameter


def _split_linear(module: nn.Linear, input: Tensor) -> tuple[Operator, Tensor] | None:
    # a vector takes torch's matrix-vector kernels, which round differently
    return None if input.dim() < 2 else (LinearOperator(module.weight, module.bias), input)


def _plain_embedding(module: nn.Embedding) -> bool:
    options = (module.padding_idx, module.max_norm, module.scale_grad_by_freq, module.sparse)
    return _plain_weight(module) and options == (None, None, False, False)


def _split_embedding(module: nn.Embedding, input: Tensor) -> tuple[Operator, Tensor]:
    return EmbeddingOperator(module.weight), input


register_converter(nn.Linear, Converter("forward", _split_linear, _plain_weight))
register_converter(nn.Embedding, Converter("forward", _split_embedding, _plain_embedding))
