"""The hooks that run around an optimizer's step."""

from __future__ import annotations

from itertools import chain

import torch
from torch.optim import optimizer as optimizers


def hooks_of(optimizer: torch.optim.Optimizer) -> tuple[list[object], list[object]]:
    """Return the hooks that torch calls before and after the optimizer's step, in order, also the hooks of all
    optimizers.
    """
    before, after = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    return (
        [*chain(optimizers._global_optimizer_pre_hooks.values(), before.values())],
        [*chain(after.values(), optimizers._global_optimizer_post_hooks.values())],
    )


def is_scripts(hook: object) -> bool:
    """Return whether a hook is neither the plugin's nor a framework's."""
    return not (getattr(hook, "__module__", None) or "").startswith(("recycle_plugin.", "torch.", "deepspeed."))
