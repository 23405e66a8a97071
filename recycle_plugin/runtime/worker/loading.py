"""The results of loading checkpoints in a script, kept for the script of a worker that comes back in its place."""

from __future__ import annotations

from typing import Any

from recycle_plugin.runtime.collectives.callers import calling_line
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.state.stage_state import StageState


class LoadingRecord:
    """The record of the checkpoints that a script loads. It includes the counters and rates in ``state``; the rest of
    what was loaded comes with the state.
    """

    def __init__(self, session: Session, state: StageState) -> None:
        self._session, self._state, self._count = session, state, 0

    def recall(self, place: str, folder: str, nothing: Any = None) -> Any:
        """Return what the call ``place``, which loads a checkpoint of ``folder``, gave this newcomer's predecessor, and
        take over its counters and rates; ``nothing`` if it loaded none. By now the call may name a later checkpoint of
        the folder. Raises RecycleError if the result is not kept, or the predecessor loaded from another folder.
        """
        startup = self._session.hooks.startup
        assert startup is not None, "groups are made first"
        self._count += 1
        if startup.left_out(_named(self._count)):
            note_later_checkpoint(self._session, place)
            return nothing
        before, found, small = startup.recall(_named(self._count))
        if before != folder:
            raise self._session.hooks.refusal(
                f"{place}, called at {calling_line()}: this worker's predecessor loaded from {before!r} there; let the "
                'script begin as it did then, or set recycle.rejoin to "never"'
            )
        self._state.put(small)
        return found

    def remember(self, folder: str, found: Any = None) -> None:
        """Keep the result ``found`` of a call that has loaded a checkpoint of ``folder``, for a newcomer."""
        self._count += 1
        small = self._state.small()
        small["optimizer"] |= {"state": {}}  # comes with the tensors, as does the rest of the optimizer's state
        del small["attributes"]
        if self._session.hooks.startup is not None:
            self._session.hooks.startup.remember(_named(self._count), (folder, found, small))


def note_later_checkpoint(session: Session, place: str) -> None:
    """Report that the call ``place`` of a newcomer's script loads nothing."""
    session.note(
        "warning",
        f"rank {session.rank}, which has come back, calls {place} at {calling_line()}: this job began without that, so "
        "nothing is loaded, and its state comes from its peers",
    )


def _named(number: int) -> str:
    """Return the name of a script's call number ``number`` that loads a checkpoint."""
    return f"loading a checkpoint, number {number}"
