"""A checkpoint is there whole or not at all, and never half of one under its name.

It is written to a folder of another name.  When the coordinator says that everybody has written (core.meeting), the lowest live rank
gives the folder its name, and then writes ``latest``.  Whoever dies before that is seen by all: they save once more, to another folder.
A late writer, given up by the others and still alive, writes to a folder that nobody uses any more.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.watch import ELSEWHERE
from recycle_plugin.runtime import folders
from recycle_plugin.runtime.loop import Loop
from recycle_plugin.runtime.session import Session

UNFINISHED = ".incomplete-"
Reach = Callable[[str], None]


class Saving:
    """Of a job's checkpoints, by the worker of ``session``.  ``reach(point)`` is where injected faults strike."""

    def __init__(self, session: Session, loop: Loop, recover: Callable[[], None], reach: Reach) -> None:
        self._session, self._loop = session, loop
        self._recover, self._reach = recover, reach

    def save(self, folder: Path, tag: str, latest: bool, write: Callable[[str], None], said: str) -> None:
        """Return when the checkpoint ``folder``/``tag`` is in place.  ``write(tag)``: this worker's files, under another tag."""
        while True:
            try:
                self._save(folder, tag, latest, write, said)
                return
            except Interrupted:
                self._recover()

    def _save(self, folder: Path, tag: str, latest: bool, write: Callable[[str], None], said: str) -> None:
        session, place = self._session, f"save_checkpoint({str(folder)!r}, {tag!r})"
        session.assure("a checkpoint")
        with session.heart.at(ELSEWHERE, "a checkpoint"), unwatched(session):
            self._reach("checkpoint.start")
            write(self.unfinished(tag))
            self._reach("checkpoint.written")
        self._loop.meet(place, {})
        if session.is_first:
            self.publish(folder, tag, self.unfinished(tag), latest, said)
        self._loop.meet(f"the end of {place}", {})

    def publish(self, folder: Path, tag: str, unfinished: str, latest: bool, said: str, **details: object) -> None:
        """All files are there."""
        session = self._session
        with session.heart.at(ELSEWHERE, "a checkpoint"):
            session.assure("a checkpoint", interruptible=False)
            self._reach("checkpoint.publish")
            folders.put_in_place(folder / unfinished, folder / tag)
            self._reach("checkpoint.named")
            if latest:
                folders.write_whole(folder / "latest", tag)
            session.note("checkpoint", f"{said} in {folder / tag}", path=str(folder / tag), **details)
            self._reach("checkpoint.latest")
            for left in folder.glob(f"*{UNFINISHED}*"):
                folders.remove(left)

    def unfinished(self, tag: str) -> str:
        """Another one for each membership."""
        return f"{tag}{UNFINISHED}{self._session.job_id}-{self._session.number}"


@contextmanager
def unwatched(session: Session) -> Iterator[None]:
    """A membership change breaks a collective instead of being dealt with in it."""
    between, session.between_steps = session.between_steps, None
    try:
        yield
    finally:
        session.between_steps = between
