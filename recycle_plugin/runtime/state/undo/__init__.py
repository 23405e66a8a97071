"""Taking a worker's own last step back: the stage's state (runtime/state/stage_state.py) as before the step.

Records are kept from just before the step until all stages have committed it; one record suffices
(core/vocabulary/commit_rule.py). There are three kinds:

* ``snapshot`` copies all that the step changes, before every step. Exact, for any optimizer; 12 bytes per parameter for
  Adam.
* ``host_snapshot`` puts these copies into host memory; an accelerator makes them while it computes.
* ``inverse`` inverts the update rule, after SWIFT (Zhong et al., PPoPP'23, arXiv 2302.06173, update-undo). It needs the
  applied gradient, whose sum over the workers is kept until the commit anyway, for peers that may lack it. So it takes
  no bytes of its own. It works for the optimizers in :mod:`~recycle_plugin.runtime.state.undo.rules`, up to rounding.

All of them restore hyper-parameters, step counts, learning-rate schedulers and counters exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from recycle_plugin.runtime.state.undo.inverse import Inverse
from recycle_plugin.runtime.state.undo.kept import HostCopies
from recycle_plugin.runtime.state.undo.snapshot import Snapshot


class Undo(Protocol):
    """Takes an optimizer's step back: call ``before_step()``, step, and ``restore()`` if the step must not stand."""

    exact: bool  # restore() puts back every bit

    def prepare(self) -> None:
        """Start the slow part of before_step() early; may be called repeatedly. The last step must be committed, and
        the state must not change before the next step.
        """

    def before_step(self) -> None:
        """Keep the data for restore(), over the last record. Gradients must be as applied: reduced and clipped."""

    def restore(self) -> None:
        """Take back the step since ``before_step()``, once; raises RuntimeError if there is none."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the kept tensors."""


class NoUndo:
    """Keeps nothing, for steps that are never taken back. A job with one stage needs no undo: some live worker has each
    step's sum until the commit, and the optimizer judges a step before it applies it.
    """

    exact = True
    held_bytes = 0

    def prepare(self) -> None:
        """Do nothing."""

    def before_step(self) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Raise AssertionError: this is never called."""
        raise AssertionError("a step of a job with one stage is never taken back")


KINDS: dict[str, Callable[..., Undo]] = {
    "snapshot": Snapshot,
    "host_snapshot": partial(Snapshot, copies=HostCopies),
    "inverse": Inverse,
}  # by the setting's words; all take a state and a keeper of gradients
