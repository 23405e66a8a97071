"""Inverses of optimizers' update rules: from a step's results to what it found.

``p``, ``m``, ``v``, ``b`` are the values after the step, ``g`` the applied gradient. The formulas are those of SWIFT's
update-undo (Zhong et al., PPoPP'23, arXiv 2302.06173). Added are Nesterov, dampening, LAMB (You et al., ICLR'20, arXiv
1904.00962, algorithm 2), and a clamp of second moments.

Why the clamp: if v was 0, or small beside (1 − β2)·g², rounding decides its old value. Unclamped, half of these are
negative, and the next step's square root makes NaN. Clamped at zero, the next step divides the rounding left in m by
eps alone, and throws the parameter away. So v is clamped at the rounding of the value it is computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from recycle_plugin.errors import RecycleError


@dataclass(frozen=True)
class AppliedStep:
    """One parameter's share of an applied step; ``parameter`` and the moments in ``state`` are inverted in place. First
    steps are inverted like others; the moments that they created are dropped afterwards.
    """

    parameter: torch.Tensor
    state: dict[str, Any]  # as the step left it
    gradient: torch.Tensor  # as applied; negated if the group maximizes
    group: Mapping[str, Any]  # the hyper-parameters used
    count: int  # of the parameter's steps, this one included

    @property
    def decay(self) -> float:
        """The share of the parameter that weight decay subtracted (for LAMB: times the trust ratio)."""
        return float(self.group["lr"]) * float(self.group["weight_decay"])


class UpdateRule(Protocol):
    """An optimizer's update rule, with its inverse."""

    moments: tuple[str, ...]  # state tensors that are inverted; others are restored from copies
    needs: tuple[str, ...]  # keys of a stepped parameter's state
    settings: tuple[str, ...]  # keys of a group

    def counts(self, states: list[dict[str, Any]]) -> list[int]:
        """Return the number of steps, the last one included, of each of a group's stepped parameters."""

    def invert(self, step: AppliedStep) -> None:
        """Restore the parameter and its moments from before the step, in place."""


class Sgd:
    """The rule of torch.optim.SGD: plain, with momentum (and dampening), Nesterov. Momentum's first step sets b to the
    gradient without dampening, but moves the parameter along b as usual.
    """

    moments: tuple[str, ...] = ("momentum_buffer",)
    needs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ("lr", "momentum", "dampening", "nesterov", "weight_decay")

    def counts(self, states: list[dict[str, Any]]) -> list[int]:
        """Return zeros: all steps are alike."""
        return [0] * len(states)

    def invert(self, step: AppliedStep) -> None:
        """Restore parameter and momentum, in place."""
        group, p, g = step.group, step.parameter, step.gradient
        lr, momentum = float(group["lr"]), group["momentum"]
        if momentum == 0:
            p.add_(g, alpha=lr).div_(1 - step.decay)
            return
        b = step.state["momentum_buffer"]
        if group["nesterov"]:
            p.add_(g.add(b, alpha=momentum), alpha=lr).div_(1 - step.decay)
        else:
            p.add_(b, alpha=lr)
        _take_out(b, _with_decay(g, p, group), momentum, 1 - group["dampening"])


class Adam:
    """The rule of Adam and AdamW. ``decoupled``: weight decay acts on the parameter; None: the group says."""

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    needs: tuple[str, ...] = ("step", *moments)
    settings: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay")

    def __init__(self, decoupled: bool | None) -> None:
        self._decoupled = decoupled

    def counts(self, states: list[dict[str, Any]]) -> list[int]:
        return [int(state["step"]) for state in states]

    def invert(self, step: AppliedStep) -> None:
        """Restore the parameter and both moments, in place."""
        decoupled = step.group.get("decoupled_weight_decay", False) if self._decoupled is None else self._decoupled
        m, v = (step.state[name] for name in self.moments)
        step_size, denominator = _adam(step, v)
        p = step.parameter.addcdiv_(m, denominator, value=step_size)
        if decoupled:
            p.div_(1 - step.decay)
        _invert_moments(step, step.gradient if decoupled else _with_decay(step.gradient, p, step.group))


class FusedAdam(Adam):
    """The rule of DeepSpeed's FusedAdam, which uses the last stepped parameter's count for its whole group."""

    def counts(self, states: list[dict[str, Any]]) -> list[int]:
        """Return the last parameter's count for all."""
        return [int(states[-1]["step"])] * len(states) if states else []


class Lamb(Adam):
    """The rule of LAMB as published (You et al., ICLR'20, arXiv 1904.00962, algorithm 2). The trust ratio cannot be
    computed from the results: the step leaves it in each parameter's state.
    """

    needs: tuple[str, ...] = (*Adam.needs, "trust_ratio")

    def __init__(self) -> None:
        super().__init__(decoupled=True)

    def invert(self, step: AppliedStep) -> None:
        """Restore the parameter and both moments, in place."""
        ratio = float(step.state["trust_ratio"])
        m, v = (step.state[name] for name in self.moments)
        step_size, denominator = _adam(step, v)
        step.parameter.addcdiv_(m, denominator, value=step_size * ratio).div_(1 - ratio * step.decay)
        _invert_moments(step, step.gradient)


RULES: dict[str, Callable[[Any], UpdateRule]] = {
    "torch.optim.sgd.SGD": lambda optimizer: Sgd(),
    "torch.optim.adam.Adam": lambda optimizer: Adam(None),
    "torch.optim.adamw.AdamW": lambda optimizer: Adam(decoupled=True),
    "deepspeed.ops.adam.fused_adam.FusedAdam": lambda optimizer: FusedAdam(bool(optimizer.adam_w_mode)),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": lambda optimizer: Adam(bool(optimizer.adam_w_mode)),
}
DECLARED: dict[str, Callable[[], UpdateRule]] = {
    "sgd": Sgd,
    "adam": lambda: Adam(False),
    "adamw": lambda: Adam(True),
    "lamb": Lamb,
}


def of(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return the rule of an optimizer of exactly this class; a subclass may compute something else.

    A class can declare its rule in its body, such as ``undo_rule = "lamb"``: torch's SGD, Adam or AdamW with their
    names in state and groups, or published LAMB with Adam's names and ``trust_ratio``. Raises RecycleError for any
    other, also for DeepSpeed's FusedLamb, whose update is not the published one.
    """
    kind = type(optimizer)
    known = RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    if known is not None:
        return known(optimizer)
    declared = DECLARED.get(vars(kind).get("undo_rule", ""))
    if declared is not None:
        return declared()
    raise RecycleError(
        f'recycle.undo: "inverse" cannot take a step of {kind.__name__} back; write "snapshot", or use SGD, Adam or '
        "AdamW of torch.optim "
        f"(LAMB and other classes: undo_rule = one of {', '.join(DECLARED)} in the class)"
    )


def _adam(step: AppliedStep, v: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return (size, √v̂ + eps), computed in torch's order: the step moved the parameter by -size · m / (√v̂ + eps)."""
    beta1, beta2 = step.group["betas"]
    corrected = step.group.get("bias_correction", True)
    correction1, correction2 = (1 - beta**step.count if corrected else 1.0 for beta in (beta1, beta2))
    return float(step.group["lr"]) / correction1, v.sqrt().div_(correction2**0.5).add_(step.group["eps"])


def _invert_moments(step: AppliedStep, gradient: torch.Tensor) -> None:
    (beta1, beta2), (m, v) = step.group["betas"], (step.state[name] for name in Adam.moments)
    rounding = v * torch.finfo(v.dtype).eps
    _take_out(m, gradient, beta1, 1 - beta1)
    _take_out(v, gradient, beta2, 1 - beta2, square=True)
    v.clamp_(min=rounding)


def _with_decay(gradient: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    return gradient.add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else gradient


def _take_out(average: torch.Tensor, new: torch.Tensor, kept: float, share: float, square: bool = False) -> None:
    """Invert ``average`` = kept · old + share · new (or its square) in place; 0, never read, if nothing was kept."""
    if kept == 0:
        average.zero_()
    elif square:
        average.addcmul_(new, new, value=-share).div_(kept)
    else:
        average.sub_(new, alpha=share).div_(kept)
