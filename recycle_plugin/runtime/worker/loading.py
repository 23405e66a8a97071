"""The results of loading checkpoints in a script, kept for the script of a worker that comes back in its place."""

from __future__ import annotations

from typing import Any

from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.state.stage_state import StageState


class LoadingRecord:
    """The record of the checkpoints that a script loads. It includes the counters and rates in ``state``; the rest of
    what was loaded comes with the state.
    """

    def __init__(self, session: Session, state: StageState) -> None:
        self._session, self._state, self._count = session, state, 0

    def recall(self, place: str) -> Any:
        """Return what the call ``place``, which loads a checkpoint, gave this newcomer's predecessor, and take over its
        counters and rates. Raises RecycleError if it is not kept.
        """
        assert self._session.hooks.startup is not None, "groups are made first"
        self._count += 1
        found, small = self._session.hooks.startup.recall(f"{place}, number {self._count}")
        self._state.put(small)
        return found

    def remember(self, place: str, found: Any = None) -> None:
        """Keep the result ``found`` of the call ``place``, which has loaded a checkpoint, for a newcomer."""
        self._count += 1
        small = self._state.small()
        small["optimizer"] |= {"state": {}}  # comes with the tensors, as does the rest of the optimizer's state
        del small["attributes"]
        if self._session.hooks.startup is not None:
            self._session.hooks.startup.remember(f"{place}, number {self._count}", (found, small))
