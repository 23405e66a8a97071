"""Optimizers whose steps are taken back, and one set of parameters under them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from recycle_plugin.runtime.state.stage_state import OptimizerState, StageState, StatePart, of_parameters
from recycle_plugin.runtime.state.undo import KINDS


class Lamb(torch.optim.Optimizer):
    """As published (You et al., ICLR'20, arXiv 1904.00962, algorithm 2): torch has none, and DeepSpeed's needs a GPU.

    φ is the identity; a ratio with a zero in it is 1.  The applied ratio stays in state["trust_ratio"].
    """

    undo_rule = "lamb"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        m = state["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        m_hat, v_hat = m / (1 - beta1 ** state["step"]), v / (1 - beta2 ** state["step"])
        update = (m_hat / (v_hat.sqrt() + group["eps"])).add_(parameter, alpha=group["weight_decay"])
        weight, length = parameter.norm(), update.norm()
        state["trust_ratio"] = (weight / length).item() if weight > 0 and length > 0 else 1.0
        parameter.add_(update, alpha=-group["lr"] * state["trust_ratio"])


class Restless(torch.optim.Optimizer):
    """Its tensors come, go and grow, and some of its state is of no parameter."""

    def __init__(self, params, lr=1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        shared = self.state.setdefault("all", {"steps": torch.zeros(())})
        shared["steps"] += 1
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                state["seen"] = torch.cat([state.get("seen", torch.zeros(0)), shared["steps"].view(1)])
                if "held" in state:
                    parameter.add_(state.pop("held"), alpha=-group["lr"] * state["seen"].sum().item())
                else:
                    state["held"] = parameter.grad.clone()


Make = Callable[[list], torch.optim.Optimizer]  # from parameters or groups

INVERTIBLE: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd with decay": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1, maximize=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "nesterov, foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "momentum, fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam with decay": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1, maximize=True),
    "adam, foreach": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, fused=True),
    "adam without memory": lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.0, 0.9)),
    "lamb": lambda ps: Lamb(ps, lr=0.01, weight_decay=0.1),
}

OTHERS: dict[str, Make] = {
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "restless": lambda ps: Restless(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
}


def stage_state(
    parameters: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *others: StatePart,
    step: Callable[[], int] = lambda: 0,
) -> StageState:
    called = {str(place): parameter for place, parameter in enumerate(parameters)}
    weights = of_parameters("weights", called)
    return StageState(
        step,
        OptimizerState(optimizer, {parameter: name for name, parameter in called.items()}),
        [weights, *others],
    )


class Subject:
    """``parameters`` under an optimizer, with a scheduler, a counter and an undo of ``kind``."""

    def __init__(self, make: Make, kind: str = "snapshot", parameters: list[torch.nn.Parameter] | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = parameters or [
            torch.nn.Parameter(torch.randn(5, 3, generator=generator)),
            torch.nn.Parameter(torch.randn(4, dtype=torch.float64, generator=generator)),
        ]
        self.optimizer = make(self.parameters)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.count = 0
        counters = StatePart("counters", get=self._counters, set=self._set)
        self.stage_state = stage_state(self.parameters, self.optimizer, counters)
        self.undo = KINDS[kind](self.stage_state)

    def _counters(self) -> dict[str, Any]:
        return copy.deepcopy({"scheduler": self.scheduler.state_dict(), "count": self.count})

    def _set(self, counters: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(counters["scheduler"])
        self.count = counters["count"]

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        """With ``before_step``; p.grad is a copy, and zeroed afterwards, as a script may do."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self.undo.before_step()
        self.optimizer.step()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.scheduler.step()
        self.count += 1

    def random(self, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [scale * torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in self.parameters]

    def state(self) -> dict[str, Any]:
        """A copy of everything that a step changes."""
        optimizer = self.optimizer.state_dict()
        return copy.deepcopy({"parameters": [p.data for p in self.parameters], **optimizer, **self._counters()})


def same(a: object, b: object) -> bool:
    """Equal to the last bit, tensors and what holds them."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) is type(b) and a is not b and getattr(a, "__dict__", None):
        return same(vars(a), vars(b))
    return a == b
