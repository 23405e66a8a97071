"""What loading a checkpoint has given a script: kept for the script of a worker that comes back in its place."""

from __future__ import annotations

from typing import Any

from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.state.stage_state import StageState


class LoadingRecord:
    """The record of the checkpoints that a script loads; its counters and rates in ``state`` belong to it, what else is
    loaded comes with the state.
    """

    def __init__(self, session: Session, state: StageState) -> None:
        self._session, self._state, self._count = session, state, 0

    def recall(self, place: str) -> Any:
        """What loading a checkpoint, by the call ``place``, gave the predecessor of this newcomer's script, whose
        counters and rates are taken over.  Raises RecycleError where it is not kept.
        """
        assert self._session.hooks.startup is not None, "groups are made first"
        self._count += 1
        found, small = self._session.hooks.startup.recall(f"{place}, number {self._count}")
        self._state.put(small)
        return found

    def remember(self, place: str, found: Any = None) -> None:
        """Keep for a newcomer what loading a checkpoint, by the call ``place``, has given the script."""
        self._count += 1
        small = self._state.small()
        small["optimizer"] |= {"state": {}}  # comes with the tensors, as what else the optimizer holds
        del small["attributes"]
        if self._session.hooks.startup is not None:
            self._session.hooks.startup.remember(f"{place}, number {self._count}", (found, small))
