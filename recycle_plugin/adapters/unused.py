"""Warn if a script was started through the plugin and trains without it.

Such a script makes no engine of the plugin. Hugging Face's Trainer ignores a DeepSpeed config that it has no use for,
and a script may read another config than the user thinks. It then trains as in stock until a worker is lost.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from recycle_plugin.adapters.unlaunched import AfterImport
from recycle_plugin.runtime.control.session import Session

SAID = (
    "the script's optimizer steps without the plugin so far: deepspeed.initialize was not called with a config that "
    "has a recycle section, and there is no Pipeline or Replicas of the plugin's. Unless one follows, the loss of a "
    "worker ends the job. To train without the plugin, start the script without recycle_plugin.launch"
)
SEVERAL = 3  # optimizer steps: a script may try its optimizer out before, or train a helper


def watch(session: Session) -> None:
    """Warn once, from the first worker, if optimizers step before the plugin is set up. Call before the script."""
    if session.view.is_first:
        AfterImport({"torch.optim.optimizer": partial(_watch, session)}).install()


def _watch(session: Session, module: ModuleType) -> None:
    steps = 0

    def stepped(*_: Any) -> None:  # never removed: torch iterates over its hooks at this moment
        nonlocal steps
        steps += 1
        if steps == SEVERAL and not session.configured and not session.forked:
            session.note("warning", SAID)

    module.register_optimizer_step_post_hook(stepped)
