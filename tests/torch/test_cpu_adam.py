"""DeepSpeed's own Adam on the CPU: what its C++ code keeps between steps makes no difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("deepspeed")

from recycle_plugin.adapters.deepspeed.cpu_adam import KERNEL, make_stateless

BETAS = 0.9, 0.999


class Kernel:
    """By the rule of csrc/includes/cpu_adam.h, and in fp32: powers of the betas are products as long as steps follow
    each other.
    """

    def __init__(self) -> None:
        self._step, self._powers = 0, [np.float32(1), np.float32(1)]
        self.used: list[tuple[np.float32, ...]] = []

    def __call__(self, chunk: int, flag: Any, lists: Any, lr: float, beta1: float, beta2: float, eps: float, step: int):
        for tensor in lists[0]:
            betas = np.float32(beta1), np.float32(beta2)
            if step == self._step + 1:
                self._powers = [power * beta for power, beta in zip(self._powers, betas)]
            elif step != self._step:
                self._powers = [np.float32(float(beta) ** step) for beta in betas]
            self._step = step
            if tensor.numel():
                self.used.append(tuple(self._powers))


def powers(begin: int, end: int, stateless: bool) -> list[tuple[np.float32, ...]]:
    part = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([part], lr=0.1)
    setattr(optimizer, KERNEL, kernel := Kernel())
    if stateless:
        make_stateless(optimizer)
    for step in range(begin, end):
        getattr(optimizer, KERNEL)(64, None, [[part], [part], [part], [part]], 0.1, *BETAS, 1e-8, step)
    return kernel.used


def test_a_process_that_begins_later_steps_by_the_same_bits():
    first, stock = powers(1, 40, stateless=True), powers(1, 40, stateless=False)
    assert len(first) == 39
    for begin in range(2, 40):
        assert first[begin - 1 :] == powers(begin, 40, stateless=True)
    others = (powers(begin, 40, stateless=False) == stock[begin - 1 :] for begin in range(2, 40))
    assert not all(others), "or nothing has to be done"


def test_other_optimizers_stay_as_they_are():
    part = torch.nn.Parameter(torch.ones(3))
    make_stateless(optimizer := torch.optim.SGD([part], lr=0.1))
    assert not hasattr(optimizer, KERNEL)
    meta = torch.optim.SGD([torch.nn.Parameter(torch.ones(3, device="meta"))], lr=0.1)
    setattr(meta, KERNEL, kernel := Kernel())
    make_stateless(meta)
    assert getattr(meta, KERNEL) is kernel, "on a GPU it keeps nothing"
