"""Gradient norms over a whole pipeline, and their consequences: a skipped step, or clipped gradients.

The coordinator sends all stages each one's share.
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
    """Decides by a step's norm whether it is skipped or clipped; norms come from the worker's ``store``. ``gradients``:
    where the step finds them. ``limit`` 0: nothing is clipped, but a non-finite norm still skips its step.
    """

    def __init__(self, store: StepStore, gradients: GradientStore, norm: Norm, limit: float) -> None:
        self._store, self._gradients, self._norm, self._limit = store, gradients, norm, limit

    def share(self) -> float:
        """Return this stage's share of the squared norm. Its workers hold the same gradients, so they agree."""
        found = zip(self._gradients.parameters, self._gradients.view(), strict=True)
        return self._norm.share({parameter: gradient for parameter, gradient in found if gradient is not None})

    def norm_of(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Return the norm over all stages, from the share of each."""
        return self._norm.total(shares)

    def norm(self, step: int) -> torch.Tensor | None:
        """Return the norm of ``step``; None if it is not known (yet)."""
        found = self._store.get(self._store.of_layers("norm", step))
        return None if found is None else torch.as_tensor(found)

    def skips(self, step: int) -> bool:
        """Return whether ``step`` must not be applied."""
        norm = self.norm(step)
        return norm is not None and not math.isfinite(norm)

    def coefficient(self, step: int) -> torch.Tensor | None:
        """Return the factor for the gradients of ``step``, whose norm is finite or not known; None if it is 1, so that
        they can stay in place.
        """
        norm = self.norm(step)
        if norm is None or self._limit <= 0:
            return None
        found = coefficient(norm, self._limit)
        return None if found.item() == 1.0 else found


class TrueNorm:
    """The Euclidean norm of all gradients (ports.Norm). ``elsewhere``: parameters that another stage counts."""

    def __init__(self, elsewhere: AbstractSet[torch.Tensor] = frozenset()) -> None:
        self._elsewhere = elsewhere

    def share(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> float:
        """Return the sum of the squared elements of this stage's gradients."""
        return squared_norm([gradient for one, gradient in gradients.items() if one not in self._elsewhere])

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Return the norm over all stages, a scalar tensor, from the squared shares."""
        return torch.tensor(math.sqrt(math.fsum(shares.values())))


def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the sum of squared elements, computed in fp32 as DeepSpeed's clip_grad_norm_, but with imaginary parts."""
    parts = (torch.view_as_real(each.detach()) if each.is_complex() else each.detach() for each in gradients)
    norms = [torch.linalg.vector_norm(each.float()) for each in parts]
    return fetch(torch.stack(norms).pow(2.0).sum().float(), "a norm").item() if norms else 0.0


def coefficient(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return min(1, limit / norm) in the dtype of ``norm``, as DeepSpeed does: a scalar on the host."""
    return torch.min(torch.tensor(1.0), torch.tensor(float(limit), dtype=norm.dtype) / (norm + 1e-6))
