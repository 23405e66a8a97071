"""Layers that would train otherwise than without the plugin, or not the same whoever computes them, whatever framework they are in."""

from __future__ import annotations

import torch

from recycle_plugin.runtime.errors import RecycleError


def check_layers(module: torch.nn.Module) -> None:
    """RecycleError, which names the layer and says what to use instead."""
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise RecycleError(
                f"{name} keeps running statistics, which a forward that is run again would count twice; "
                "use a normalisation without them (LayerNorm, GroupNorm), or track_running_stats=False"
            )
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            raise RecycleError(f"{name} has sparse gradients, which are not summed over replicas yet; build it with sparse=False")
        if getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule":
            raise RecycleError(f"{name} is compiled: layers whose backward is split, and run again by peers, cannot be yet; leave torch.compile out")
