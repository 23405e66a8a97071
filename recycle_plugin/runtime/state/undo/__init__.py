"""Taking a worker's own last step back: its stage's state (runtime/state/stage_state.py) as it was before the step.

Records are kept from just before the step until it is committed by all stages; one record suffices
(core/vocabulary/commit_rule.py). There are three ways behind one interface:

* ``snapshot`` copies everything that the step changes.  Exact, for any optimizer; 12 bytes a parameter for Adam,
  copied before every step.
* ``host_snapshot`` has these copies in host memory, and an accelerator makes them while it computes.
* ``inverse`` turns the update rule round, after SWIFT (Zhong et al., PPoPP'23, arXiv 2302.06173, update-undo).  It
  needs the applied gradient, whose sum over the workers is kept until the commit in any case, for peers that may lack
  it; so it takes no bytes of its own.  For the optimizers in :mod:`~recycle_plugin.runtime.state.undo.rules`; rounding
  is not taken back.

In all of them hyper-parameters, step counts, learning-rate schedulers and counters come back exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from recycle_plugin.runtime.state.undo.inverse import Inverse
from recycle_plugin.runtime.state.undo.kept import HostCopies
from recycle_plugin.runtime.state.undo.snapshot import Snapshot


class Undo(Protocol):
    """Takes an optimizer's step back: ``before_step()``, the step, and ``restore()`` if it must not have been."""

    exact: bool  # restore() puts back every bit

    def prepare(self) -> None:
        """Begin with what before_step() will keep, if it takes long: the last step is committed, and nothing that the
        next one changes is changed before it.  As often as one likes.
        """

    def before_step(self) -> None:
        """Keep what restore() needs, over what was kept for the step before.

        Called when gradients are as the step will apply them: reduced and clipped.
        """

    def restore(self) -> None:
        """Take the step since ``before_step()`` back, once; RuntimeError if there is none."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that are kept for it."""


class NoUndo:
    """Keeps nothing, for steps that are never taken back: some live worker has their sum until they are committed, and
    nobody rejects them, since there is one stage, whose optimizer judges a step before it applies it.
    """

    exact = True
    held_bytes = 0

    def prepare(self) -> None:
        """Nothing: there is nothing to keep."""

    def before_step(self) -> None:
        """Nothing: there is nothing to keep."""

    def restore(self) -> None:
        """Raise AssertionError: nobody asks for this."""
        raise AssertionError("a step of a job with one stage is never taken back")


KINDS: dict[str, Callable[..., Undo]] = {
    "snapshot": Snapshot,
    "host_snapshot": partial(Snapshot, copies=HostCopies),
    "inverse": Inverse,
}  # by the setting's words; constructed alike, of a state, and of who keeps gradients
