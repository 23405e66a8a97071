"""Gradient norms over a pipeline, each stage's share known to all through the coordinator, and what is done about
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.device import fetch
from recycle_plugin.runtime.worker.ports import Norm, Parameters


class Clipping:
    """Of the worker whose ``store`` it is, where norms are as soon as they are known.

    ``limit`` 0: nothing is clipped, but a norm that is not finite still skips its step.
    """

    def __init__(self, store: StepStore, parameters: Parameters, norm: Norm, limit: float) -> None:
        self._store, self._stage = store, store.seat.stage
        self._parameters, self._norm, self._limit = parameters, norm, limit

    def share(self) -> float:
        """The stage's, of what ``parameter.grad`` is; its workers hold the same gradients and find the same."""
        return self._norm.share(self._parameters)

    def norm_of(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Over all stages."""
        return self._norm.total(shares)

    def norm(self, step: int) -> torch.Tensor | None:
        """None where it is not known, or not yet."""
        found = self._store.get(Datum("norm", self._stage, None, step))
        return None if found is None else torch.as_tensor(found)

    def skips(self, step: int) -> bool:
        """Whether ``step`` must not be applied."""
        norm = self.norm(step)
        return norm is not None and not bool(torch.isfinite(norm))

    def clips(self, step: int) -> bool:
        """Whether :meth:`clip` puts gradients of its own in place."""
        return self._limit > 0 and self.norm(step) is not None and not self.skips(step)

    def clip(self, step: int) -> None:
        norm = self.norm(step)
        if self.clips(step) and norm is not None:
            clip(self._parameters, norm, self._limit)


class TrueNorm:
    """Over all stages (ports.Norm).  ``elsewhere``: parameters that are another stage's too, which counts them."""

    def __init__(self, elsewhere: AbstractSet[torch.nn.Parameter] = frozenset()) -> None:
        self._elsewhere = elsewhere

    def share(self, parameters: Parameters) -> float:
        return squared_norm([parameter for parameter in parameters if parameter not in self._elsewhere])

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        return torch.tensor(math.sqrt(math.fsum(shares.values())))


def squared_norm(parameters: Parameters) -> float:
    """Sum of the squared elements of all gradients, in the arithmetic of DeepSpeed's clip_grad_norm_ (which forgets
    imaginary parts).
    """
    gradients = (parameter.grad.detach() for parameter in parameters if parameter.grad is not None)
    norms = [(torch.view_as_real(each) if each.is_complex() else each).float().norm(2.0) for each in gradients]
    return fetch(torch.stack(norms).pow(2.0).sum().float(), "a norm").item() if norms else 0.0


def clip(parameters: Parameters, norm: torch.Tensor, limit: float) -> None:
    """Replace all gradients by min(1, limit / norm) times themselves, as DeepSpeed does; what they were stays for peers
    that lack it.
    """
    coefficient = torch.min(torch.tensor([1.0]), torch.tensor([float(limit)]) / (norm + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * coefficient.to(parameter.grad.device)
