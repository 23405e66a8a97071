"""Learning rates that are scaled for one step: while the optimizer applies it, and no longer.

A scheduler reads the rates of a step to make the next ones of them, a script reads and sets them, and checkpoints,
hashes and newcomers get them as they are.  None of these may see the factor of a step that lacks replicas
(core/vocabulary/step_batches.py): it would be in the next step's rate once more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch


class ScaledRates:
    """Scales what ``optimizer`` applies each step with by ``factor()``.  To be made after whatever records the state
    before a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._rates: list[Any] = []  # as they are set, during a step
        around_steps(optimizer, self._scale, self._put_back)

    def _scale(self) -> None:
        self._put_back()  # of a step that has ended with an error
        factor = self._factor()
        if factor != 1.0:
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _put_back(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates):
            group["lr"] = rate
        self._rates = []


def around_steps(
    optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None] = lambda: None
) -> None:
    """Have ``before()`` and ``after()`` called around each step of ``optimizer``.

    By torch's hooks, which come behind a script's; where torch does not call any, since the class wraps another
    optimizer and does not call ``Optimizer.__init__``, around the method.
    """
    if getattr(type(optimizer).step, "hooked", False) and "_optimizer_step_pre_hooks" in vars(optimizer):
        optimizer.register_step_pre_hook(lambda *_: before())
        optimizer.register_step_post_hook(lambda *_: after())
        return
    if not hasattr(optimizer.step, "calls"):
        optimizer.step = MethodType(_with_calls(optimizer.step), optimizer)  # type: ignore[method-assign]
    optimizer.step.calls.append((before, after))  # type: ignore[attr-defined]


def _with_calls(step: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[tuple[Callable[[], None], Callable[[], None]]] = []

    @wraps(step)  # with the mark of torch's schedulers, which warn where it is gone
    def between(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        for before, _ in calls:
            before()
        found = step(*arguments, **named)
        for _, after in calls:
            after()
        return found

    between.calls = calls  # type: ignore[attr-defined]
    return between
