"""Hears what a forward differentiates while it runs: energies, gradient penalties, learning inside a layer.

No public function of torch sees every such call: ``torch.autograd.grad`` may be imported by name, and ``torch.func``
ends in it too. All of them, and ``backward``, reach the engine through one function of ``torch.autograd``, which is
wrapped while a forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

ENGINE = "_engine_run_backward"  # (outputs, gradients, retain_graph, create_graph, inputs, ..., accumulate_grad=)


@contextmanager
def engine_runs(heard: Callable[[tuple[Any, ...], bool], None]) -> Iterator[None]:
    """Return a context in which ``heard(inputs, accumulates)`` is called before each run of autograd's engine.

    The run computes gradients of ``inputs`` (none: of all leaves). If it ``accumulates`` these are added to their
    ``.grad``, else returned, as by ``torch.autograd.grad``.
    """
    run = getattr(torch.autograd, ENGINE)

    def told(outputs: object, *given: Any, **named: Any) -> object:
        heard(given[3], named["accumulate_grad"])
        return run(outputs, *given, **named)

    setattr(torch.autograd, ENGINE, told)
    try:
        yield
    finally:
        setattr(torch.autograd, ENGINE, run)


class InnerGradients:
    """Records the gradients that one forward asks for while it runs. ``parameters``: the stage's, by id. ``asked``:
    those whose gradients the forward wants. ``adds``: whether it adds to the ``.grad`` of some, as ``backward`` does.
    """

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.asked: list[torch.nn.Parameter] = []
        self.adds = False

    def heard(self, inputs: tuple[Any, ...], accumulates: bool) -> None:
        """Record a run of autograd's engine; see :func:`engine_runs`."""
        asked = asked_for(inputs, self._parameters)
        self.asked += asked
        self.adds |= accumulates and (bool(asked) or not inputs)


def asked_for(inputs: tuple[Any, ...], known: Mapping[int, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters, ``known`` by id, among the tensors and GradientEdges that a run of the engine is for."""
    if not inputs:
        return []
    leaves = (getattr(one.node, "variable", None) if isinstance(one, GradientEdge) else one for one in inputs)
    return [known[id(leaf)] for leaf in leaves if id(leaf) in known]
