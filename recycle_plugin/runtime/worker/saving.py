"""Checkpoints as folders of files: written under another name, and given theirs once all have written (core/saving.py)."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

from recycle_plugin.core.watch import ELSEWHERE
from recycle_plugin.runtime import folders
from recycle_plugin.runtime.loop import Loop
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.worker.ports import Reach

UNFINISHED = ".incomplete-"


class Saving:
    """Of a job's checkpoints, by the worker of ``session``.  ``reach(point)`` is where injected faults strike."""

    def __init__(self, session: Session, loop: Loop, reach: Reach) -> None:
        self._session, self._loop, self._reach = session, loop, reach

    def save(self, folder: Path, tag: str, latest: bool, write: Callable[[str], None], said: str) -> None:
        """Return when the checkpoint ``folder``/``tag`` is in place.  ``write(tag)``: this worker's files, under another tag."""
        self._loop.save(f"save_checkpoint({str(folder)!r}, {tag!r})", _Folder(self, folder, tag, latest, write, said))

    def write(self, unfinished: str, write: Callable[[str], None]) -> None:
        session = self._session
        session.assure("a checkpoint")
        with session.heart.at(ELSEWHERE, "a checkpoint"), unwatched(session):
            self._reach("checkpoint.start")
            write(unfinished)
            self._reach("checkpoint.written")

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

    def unfinished(self, tag: str, number: int) -> str:
        """Another name in each membership, ``number``, and in each job."""
        return f"{tag}{UNFINISHED}{self._session.job_id}-{number}"


@dataclass(frozen=True)
class _Folder:
    """As core.saving.Files."""

    saving: Saving
    folder: Path
    tag: str
    latest: bool
    write_files: Callable[[str], None]
    said: str

    def write(self, number: int) -> Iterator[Any]:
        self.saving.write(self.saving.unfinished(self.tag, number), self.write_files)
        return iter(())

    def publish(self, number: int) -> Iterator[Any]:
        self.saving.publish(self.folder, self.tag, self.saving.unfinished(self.tag, number), self.latest, self.said)
        return iter(())


@contextmanager
def unwatched(session: Session) -> Iterator[None]:
    """A membership change breaks a collective instead of being dealt with in it."""
    between, session.between_steps = session.between_steps, None
    try:
        yield
    finally:
        session.between_steps = between
