"""Taking a worker's own last step back: its stage's state (runtime/state/stage_state.py) as it was before the step.

Records are kept from just before the step until it is committed by all stages; one record suffices
(core/vocabulary/commit_rule.py). There are two ways behind one interface:

* ``snapshot`` copies everything that the step changes.  Exact, for any optimizer; 12 bytes a parameter for Adam in
  fp32, copied before every step.
* ``inverse`` keeps the applied gradient and turns the update rule round, after SWIFT (Zhong et al., PPoPP'23, arXiv
  2302.06173, update-undo).  4 bytes a parameter in fp32, for the optimizers in
  :mod:`~recycle_plugin.runtime.state.undo.rules`; rounding is not taken back.  It gains nothing over a snapshot for SGD
  without momentum, whose only state is the parameter.

In both ways hyper-parameters, step counts, learning-rate schedulers and counters come back exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.state.undo.inverse import Inverse
from recycle_plugin.runtime.state.undo.snapshot import Snapshot


class Undo(Protocol):
    """Takes an optimizer's step back: ``before_step()``, the step, and ``restore()`` if it must not have been."""

    exact: bool  # restore() puts back every bit

    def before_step(self) -> None:
        """Keep what restore() needs, over what was kept for the step before.

        Called when gradients are as the step will apply them: reduced and clipped.
        """

    def restore(self) -> None:
        """Take the step since ``before_step()`` back, once; RuntimeError if there is none."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that are kept for it."""


KINDS: dict[str, Callable[[StageState], Undo]] = {
    "snapshot": Snapshot,
    "inverse": Inverse,
}  # by the setting's words; constructed alike
