"""DeepSpeed's Adam by the formulas of its compiled kernels (deepspeed/ops/csrc/includes/cpu_adam.h), which spares the
compiler.
"""

from __future__ import annotations

import pytest


def formula(p, g, m, v, lr, beta1, beta2, eps, step, decoupled, bias_correction, decay) -> None:
    if not decoupled:
        g = g + decay * p
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    correction1, correction2 = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
    if decoupled:
        p.mul_(1 - lr * decay)
    p.addcdiv_(m, (v.sqrt() / correction2**0.5).add_(eps), value=-lr / correction1)


class Kernels:
    """What DeepSpeed's op builders load."""

    def __init__(self) -> None:
        self._decoupled: dict[int, bool] = {}

    def load(self) -> Kernels:
        return self

    def multi_tensor_adam(
        self, chunk_size, flag, lists, lr, beta1, beta2, eps, step, mode, bias_correction, decay
    ) -> None:
        for g, p, m, v in zip(*lists):
            formula(p, g, m, v, lr, beta1, beta2, eps, step, mode == 1, bias_correction, decay)

    def create_adam(self, number, lr, beta1, beta2, eps, decay, decoupled, log) -> None:
        self._decoupled[number] = decoupled

    def destroy_adam(self, number) -> None:
        del self._decoupled[number]

    def adam_update(self, number, step, lr, beta1, beta2, eps, decay, bias_correction, p, g, m, v) -> None:
        formula(p, g, m, v, lr, beta1, beta2, eps, step, self._decoupled[number], bias_correction, decay)


def use_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    for builder in ("fused_adam.FusedAdamBuilder", "cpu_adam.CPUAdamBuilder"):
        monkeypatch.setattr(f"deepspeed.ops.adam.{builder}", Kernels)
