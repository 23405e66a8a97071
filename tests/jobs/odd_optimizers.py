"""Optimizers and schedulers that keep something where torch's own do not, as scripts and libraries have them."""

from __future__ import annotations

import collections
import enum
import itertools
import math
from collections.abc import Callable

import numpy as np
import torch


class Lookahead(torch.optim.Optimizer):
    """Zhang et al., NeurIPS'19: a counter and slow weights as attributes; ``every`` steps they meet."""

    def __init__(self, inner: torch.optim.Optimizer, every: int) -> None:
        self.inner, self.every, self.count = inner, every, 0
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.slow = [[one.detach().clone() for one in group["params"]] for group in inner.param_groups]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for fast, kept in zip(group["params"], slow):
                    kept.lerp_(fast, 0.5)
                    fast.copy_(kept)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.inner.load_state_dict(state)
        self.state = self.inner.state


class Wrapper(torch.optim.Optimizer):
    """As timm's Lookahead: the state is the inner optimizer's, and its own is empty; no ``Optimizer.__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._base, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = collections.defaultdict(dict)

    def step(self, closure=None) -> None:
        self._base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base.zero_grad(set_to_none)

    def state_dict(self) -> dict:
        return self._base.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._base.load_state_dict(state)


class Bare(torch.optim.Optimizer):
    """No ``Optimizer.__init__``, no ``state``, and every parameter has to have a gradient."""

    def __init__(self, parameters, lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]
        self.velocity = [torch.zeros_like(one) for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter, velocity in zip(self.param_groups[0]["params"], self.velocity):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.add_(velocity, alpha=-self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict:
        return {"state": {}, "param_groups": [{"lr": self.param_groups[0]["lr"]}]}

    def load_state_dict(self, state: dict) -> None:
        self.param_groups[0]["lr"] = state["param_groups"][0]["lr"]


class Iterating(torch.optim.SGD):
    """Counts by what nobody can read."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.01)
        self.numbers = itertools.count()


class Mode(enum.Enum):
    WARM = 1
    COLD = 2


class Projector:
    """As GaLore's: an object for each parameter, made in the first step."""

    def __init__(self) -> None:
        self.matrix, self.updates = None, 0

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.updates % 7 == 0:
            self.matrix = gradient.sign().mul_(0.5).add_(1.0)
        self.updates += 1
        return gradient * self.matrix


class Hoarder(torch.optim.SGD):
    """A deque, a defaultdict, an enum and numpy's numbers in groups and state, and objects of its own."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, lr=np.float64(lr), momentum=0.9)
        for group in self.param_groups:
            group |= {"mode": Mode.WARM, "norms": collections.deque(maxlen=3), "seen": collections.defaultdict(int)}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                projector = state.setdefault("projector", Projector())
                parameter.grad = projector.project(parameter.grad)
                state.setdefault("last", collections.deque(maxlen=2)).append(np.float32(parameter.grad.norm().item()))
                group["norms"].append(np.float64(parameter.grad.norm().item()))
                group["seen"][tuple(parameter.shape)] += 1
            calm = len(group["norms"]) < 3 or sum(group["norms"]) < 3.0
            group["mode"] = Mode.WARM if calm else Mode.COLD
            group["momentum"] = 0.9 if group["mode"] is Mode.WARM else 0.8 + 1e-3 * math.log1p(len(group["seen"]))
        super().step()


class Wave:
    """A scheduler that counts as it likes, and whose state_dict has nothing of that."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps, self.base = optimizer, 0, [group["lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        self.steps += 1
        for group, base in zip(self.optimizer.param_groups, self.base):
            group["lr"] = base * (1.5 + np.cos(self.steps / 5))

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass

    def get_last_lr(self) -> list:
        return [group["lr"] for group in self.optimizer.param_groups]


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


MADE: dict[str, Callable] = {
    "wrapper": lambda parameters: Wrapper(adamw(parameters)),
    "lookahead5": lambda parameters: Lookahead(adamw(parameters), 5),
    "lookahead70": lambda parameters: Lookahead(adamw(parameters), 70),
    "bare": lambda parameters: Bare(parameters, 0.01),
    "hoarder": lambda parameters: Hoarder(parameters, 0.01),
    "numpy": adamw,
}
REFUSED: dict[str, Callable] = {"iterating": Iterating}
SCHEDULERS: dict[str, Callable] = {
    "numpy": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 100)),
    "hoarder": Wave,
}
