"""A look at what a script's first ``compute()`` calls ``backward`` of: usually the loss that it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from recycle_plugin.runtime.stage.ports import Compute

CLOSE = 1e-3  # relative, as for sums in another order


class _Roots(TorchFunctionMode):
    """Sums up the tensors whose ``backward`` is called in this context: ``total``, None if none is."""

    total: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward and args[0].numel() == 1:
            root = args[0].detach().double().sum()
            self.total = root if self.total is None else self.total + root
        return func(*args, **(kwargs or {}))


def watched(compute: Compute, warn: Callable[[str], None]) -> Compute:
    """Return ``compute``, whose first call warns if it calls ``backward`` of something else than it returns, as with a
    GradScaler or a division by the number of micro-batches: gradients would be off by that factor in silence.
    """
    looked = False

    def computed(step: int, replica: int, micro_batch: int) -> torch.Tensor:
        nonlocal looked
        if looked:
            return compute(step, replica, micro_batch)
        looked = True
        with _Roots() as roots:
            loss = compute(step, replica, micro_batch)
        if roots.total is not None and torch.is_tensor(loss) and loss.numel() == 1:
            root, returned = roots.total.item(), loss.detach().double().sum().item()
            if abs(root - returned) > CLOSE * max(abs(root), abs(returned)):
                warn(
                    f"compute({step}, {replica}, {micro_batch}) returns a loss of {returned:g}, but calls backward() "
                    f"on {root:g}, which is then trained: call it on the loss itself. The plugin averages over "
                    "micro-batches, and a GradScaler's factor would stay in the gradients"
                )
        return loss

    return computed
