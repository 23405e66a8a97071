"""Listens to what a forward differentiates while it runs: energies, gradient penalties, learning inside of a layer.

torch offers no seam here that sees every call: ``torch.autograd.grad`` may have been imported by name, and functions of
``torch.func`` end in it too.  All of them, and ``backward``, reach the engine through one function of
``torch.autograd``, which is listened to while a forward runs, and called.
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
    """Inside of this context, call ``heard(inputs, accumulates)`` before each run of autograd's engine.

    It is for the gradients of ``inputs`` (none: of all leaves), which are added to their ``.grad`` if it
    ``accumulates`` or, as by ``torch.autograd.grad``, returned.
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
    """Records which gradients one forward has asked for while it ran.

    ``parameters`` are the stage's, by id.  ``asked``: those of which the forward wants gradients; ``adds``: whether it
    adds to the ``.grad`` of some, as ``backward`` does.
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
    """The parameters, ``known`` by id, among the tensors and GradientEdges that a run of autograd's engine is for."""
    if not inputs:
        return []
    leaves = (getattr(one.node, "variable", None) if isinstance(one, GradientEdge) else one for one in inputs)
    return [known[id(leaf)] for leaf in leaves if id(leaf) in known]
