"""The graph of one call of a layer, cut off from the graph around it, so that autograd can run it in halves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from recycle_plugin.runtime.stage.converters import Halves

# (outputs, gradients, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad): below the function that
# inner_gradients wraps, and without its Python
run_engine = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_GRAPH = 64  # most nodes of a layer's own graph


class Saved:
    """The tensors that a graph has saved, present while the graph is made and while autograd runs on it. The graph's
    nodes hold this object, which holds no node: a cycle through autograd's nodes would never be freed.
    """

    __slots__ = ("tensors",)

    def __init__(self) -> None:
        self.tensors: Any = []

    def pack(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def unpack(self, place: int) -> Tensor:
        found: Tensor = self.tensors[place]
        return found


class LayerGraph:
    """One call of a layer: the graph from its output to its input and its parameters. It keeps no tensor itself."""

    __slots__ = ("input", "made", "output", "parameters", "saved")

    def __init__(self) -> None:
        self.saved = Saved()

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor, known: dict[int, nn.Parameter]) -> bool:
        """Run ``function(x)`` in this graph; ``made`` is its output, without a graph. Returns False if the graph cannot
        be split: it reaches beyond the layer, or has a custom Function in it.
        """
        cut = _unseen(_cut, x) if x.requires_grad else x
        before = torch._C._autograd._get_sequence_nr()
        _push_hooks(self.saved.pack, self.saved.unpack)
        try:
            output = function(cut)
        finally:
            _pop_hooks()
        if type(output) is not Tensor or not self._ends(output.grad_fn, cut, known, before):
            return False
        _unseen(self._close, output, x, cut)
        return True

    def _ends(self, root: Any, x: Tensor, known: dict[int, nn.Parameter], before: int) -> bool:
        """Record where the graph ends; returns whether it can be split."""
        self.input: tuple[GradientEdge, ...] = ()
        parameters, custom, waiting = [], [], [root]
        for node in waiting:
            kind: Any = type(node)
            if kind is _AccumulateGrad:
                variable = node.variable
                if variable is x:
                    self.input = (GradientEdge(node, 0),)
                elif id(variable) in known:
                    parameters.append(variable)
                else:
                    return False
            elif node is None or node._sequence_nr() < before or len(waiting) > _GRAPH:
                return False
            else:
                if _custom(kind):
                    custom.append(node)
                for after, _ in node.next_functions:
                    if after is not None:
                        waiting.append(after)
        self.parameters = tuple(parameters)
        return bool(parameters) and not (custom and any(_leads_to_both(node, x) for node in custom))

    def _close(self, output: Tensor, x: Tensor, cut: Tensor) -> None:
        node: Any = output.grad_fn
        # holding the object of a Python node does not keep the node alive
        token = output.view_as(output).grad_fn if isinstance(node, torch._C._FunctionBase) else None
        self.output = GradientEdge(node, output.output_nr, token)
        if cut is not x:
            self.saved.tensors = [x if tensor is cut else tensor for tensor in self.saved.tensors]
            # free its memory: the graph holds ``cut`` even when x is freed, under checkpointing
            cut.data = _nothing(cut.device)
        # detach: F.linear returns a view for 3-D inputs, and a node's view must not be changed in place, as
        # nn.ReLU(inplace=True) after a layer does
        self.made: Tensor | None = output.detach()


def _unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` hidden from torch function modes."""
    if not torch._C._len_torch_function_stack():
        return function(*args)
    with torch._C.DisableTorchFunction():
        return function(*args)


def _cut(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _leads_to_both(root: Any, x: Tensor) -> bool:
    waiting, ends = [root], set()
    for node in waiting:
        if type(node) is _AccumulateGrad:
            ends.add(node.variable is x)
        waiting += [after for after, _ in node.next_functions if after is not None]
    return len(ends) == 2


@cache
def _custom(kind: Any) -> bool:
    """Return whether nodes of a type compute all gradients whatever is asked for; torch's own do not."""
    if issubclass(kind, torch._C._FunctionBase):
        return not bool(issubclass(kind._forward_cls, Halves))
    return str(kind.__name__) == "CppFunction"  # of a C++ extension
