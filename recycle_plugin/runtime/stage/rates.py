"""Learning rates scaled for one step: only while the optimizer applies it.

A scheduler computes the next rates from the present ones, a script reads and sets them, and checkpoints, hashes and
newcomers get them as they are. None of these may see the factor of a step that lacks replicas
(core/vocabulary/step_batches.py): the next step's rate would have it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch


class ScaledRates:
    """Scales each step of ``optimizer`` by ``factor()``. Make it after all that records the state before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._rates: list[Any] = []  # the unscaled ones, during a step
        around_steps(optimizer, self._scale, self._put_back)

    def _scale(self) -> None:
        self._put_back()  # of a step that ended with an error
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
    optimizer: torch.optim.Optimizer,
    before: Callable[[], None],
    after: Callable[[], None] = lambda: None,
    first: bool = False,
) -> None:
    """Call ``before()`` and ``after()`` around each step of ``optimizer``; if ``first``, ``before()`` before all else.

    Uses torch's hooks, which run after a script's. The method is wrapped if ``first``, or if torch calls none, since
    the class wraps another optimizer and skips ``Optimizer.__init__``.
    """
    hooked = getattr(type(optimizer).step, "hooked", False) and "_optimizer_step_pre_hooks" in vars(optimizer)
    if hooked and not first:
        optimizer.register_step_pre_hook(lambda *_: before())
        optimizer.register_step_post_hook(lambda *_: after())
        return
    if not hasattr(optimizer.step, "calls"):
        optimizer.step = MethodType(_with_calls(optimizer.step), optimizer)  # type: ignore[method-assign]
    optimizer.step.calls.append((before, after))  # type: ignore[attr-defined]


def _with_calls(step: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[tuple[Callable[[], None], Callable[[], None]]] = []

    @wraps(step)  # keeps the mark of torch's schedulers, which warn without it
    def between(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        for before, _ in calls:
            before()
        found = step(*arguments, **named)
        for _, after in calls:
            after()
        return found

    between.calls = calls  # type: ignore[attr-defined]
    return between
