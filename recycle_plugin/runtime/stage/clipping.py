"""Gradient norms over a whole pipeline, and what is done about them: skip a step, or clip its gradients.

The coordinator tells all stages the share of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import torch

from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.devices.kinds import fetch
from recycle_plugin.runtime.stage.gradient_store import GradientStore
from recycle_plugin.runtime.stage.ports import Norm


class Clipping:
    """Decides by a step's norm whether the step is skipped or clipped; norms come from the worker's ``store``.

    ``gradients``: where the step finds them; ``limit`` 0: nothing is clipped, but a norm that is not finite still skips
    its step.
    """

    def __init__(self, store: StepStore, gradients: GradientStore, norm: Norm, limit: float) -> None:
        self._store, self._gradients, self._norm, self._limit = store, gradients, norm, limit

    def share(self) -> float:
        """This stage's share of the squared norm, of which its workers hold the same gradients and find the same."""
        found = zip(self._gradients.parameters, self._gradients.view(), strict=True)
        return self._norm.share({parameter: gradient for parameter, gradient in found if gradient is not None})

    def norm_of(self, shares: Mapping[str, float]) -> torch.Tensor:
        """The norm over all stages, from the share of each."""
        return self._norm.total(shares)

    def norm(self, step: int) -> torch.Tensor | None:
        """The norm of ``step``; None where it is not known, or not yet."""
        found = self._store.get(self._store.of_layers("norm", step))
        return None if found is None else torch.as_tensor(found)

    def skips(self, step: int) -> bool:
        """Whether ``step`` must not be applied."""
        norm = self.norm(step)
        return norm is not None and not bool(torch.isfinite(norm))

    def coefficient(self, step: int) -> torch.Tensor | None:
        """What the gradients of ``step`` are multiplied by; None where that is 1, and they stay as and where they
        are.
        """
        norm = self.norm(step)
        if norm is None or self._limit <= 0 or self.skips(step):
            return None
        found = coefficient(norm, self._limit)
        return None if found.item() == 1.0 else found

    def clips(self, step: int) -> bool:
        """Whether ``step`` is applied with gradients of its own, scaled down."""
        return self.coefficient(step) is not None


class TrueNorm:
    """The Euclidean norm of all gradients over all stages (ports.Norm).

    ``elsewhere``: parameters that are another stage's too, which counts them.
    """

    def __init__(self, elsewhere: AbstractSet[torch.Tensor] = frozenset()) -> None:
        self._elsewhere = elsewhere

    def share(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> float:
        """Sum of the squared elements of this stage's gradients."""
        return squared_norm([gradient for one, gradient in gradients.items() if one not in self._elsewhere])

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        """The norm over all stages, a scalar tensor, from the squared shares."""
        return torch.tensor(math.sqrt(math.fsum(shares.values())))


def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Sum of the squared elements of all gradients, computed as DeepSpeed's clip_grad_norm_ does (which forgets
    imaginary parts).
    """
    parts = (torch.view_as_real(each.detach()) if each.is_complex() else each.detach() for each in gradients)
    norms = [each.float().norm(2.0) for each in parts]
    return fetch(torch.stack(norms).pow(2.0).sum().float(), "a norm").item() if norms else 0.0


def coefficient(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """min(1, limit / norm) in the dtype of ``norm``, in fp32 as DeepSpeed does: a scalar on the host, which goes to
    kernels by itself.
    """
    return torch.min(torch.tensor(1.0), torch.tensor(float(limit), dtype=norm.dtype) / (norm + 1e-6))


def scaled(gradient: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return a new tensor, ``gradient`` times a coefficient."""
    return gradient * by
