"""Changes to a plain job from outside of it: what its script does with weights between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import touching

from recycle_plugin.adapters.plain import Pipeline
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.runtime.devices import accelerator

SCRIPT = touching.Script(
    Pipeline,
    "step",
    lambda pipeline: pipeline.steps,
    lambda pipeline: pipeline.optimizer,
    lambda pipeline: torch.float32,
)
touch_weights = partial(touching.touch_weights, SCRIPT)


def watch_device() -> Callable[[], dict]:
    """From now on, until the result is called: what stops the host until the stand-in is done, which of the plugin's
    own waits there are, and whether its generators are as they were.
    """
    from tests.support import standin

    standin.reset_synchronisations()
    generators, waits, stock = standin.generators_digest(), Counter(), accelerator.await_event

    def await_event(event: object, what: object, timeout_s: float) -> None:
        waits["an instruction" if isinstance(what, Instruction) else str(what)] += 1
        stock(event, what, timeout_s)

    accelerator.await_event = await_event
    return lambda: {
        "synchronisations": [*standin.synchronisations().items()],
        "waits": dict(waits),
        "generators": standin.generators_digest() == generators,
    }
