"""Checkpoints as folders of files: written under another name, and given theirs once all have written.

What is left under other names is removed with the next one, or where one can't be written: this job's own, and another
job's where nobody has written to it for an hour.  The protocol is core/worker/checkpoint_saving.py's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recycle_plugin import folders
from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.errors import NotSaved
from recycle_plugin.folders import STALE_S, UNFINISHED
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import fetch
from recycle_plugin.runtime.stage.ports import CheckpointFormat, Reach


class WrittenShare:
    """A worker's files of one checkpoint (ports.Share), written at once or, where it ``copies``, by :meth:`write`.

    ``format``: whose they are; ``turn``: this worker's among the so many ``turns`` of its stage; ``reach(point)``:
    where injected faults strike, at ``checkpoint.file`` once a file of the framework's is on the disk.
    """

    def __init__(self, format: CheckpointFormat, turn: int, turns: int, reach: Reach, copies: bool) -> None:
        self._format, self._reach, self.turn, self.turns, self.copies = format, reach, turn, turns, copies
        self._left: list[Callable[[], None]] = []  # to be written
        self._refused: NotSaved | None = None

    def save(self, path: Path, contents: Any) -> None:
        """Write ``contents`` as the file ``path``, or copy them to host memory."""
        held = copied(contents, path) if self.copies else contents
        self.add(path, partial(self._format.dump, held), self._reach)

    def add(self, path: Path, into: Callable[[Any], object], reach: Reach = lambda point: None) -> None:
        """Write what ``into(file)`` writes as the file ``path``."""
        self._left.append(partial(self._write, path, into, reach))
        if not self.copies:
            self.write_left()

    def write_left(self) -> None:
        """Write what was copied, file by file, of which each goes once it is on the disk."""
        while self._left:
            self._left.pop(0)()

    def check(self) -> None:
        """Raise NotSaved where something could not be written."""
        if self._refused is not None:
            raise self._refused

    def write(self) -> None:
        """Write what is left, in any thread.  Raises NotSaved where something could not be written."""
        self.write_left()
        self.check()

    def _write(self, path: Path, into: Callable[[Any], object], reach: Reach) -> None:
        """Write a file, unless something could not be written before; what refuses is kept, since others may wait for
        this worker in a collective of the framework's.
        """
        if self._refused is not None:
            return
        try:
            folders.make(path.parent)
            folders.write(path, into)
        except NotSaved as error:
            self._refused = error
        else:
            reach("checkpoint.file")


def copied(value: Any, path: Path) -> Any:
    """``value`` with tensors of its own, in host memory; ``path``: what they are for."""
    if torch.is_tensor(value):
        return fetch(value, f"a copy for {path}", shared=False)
    if isinstance(value, dict):
        return type(value)({key: copied(each, path) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(copied(each, path) for each in value)
    return value


def saving_place(folder: Path, tag: str) -> str:
    """The name of the barrier at which all come together to save ``folder``/``tag``."""
    return f"save_checkpoint({str(folder)!r}, {tag!r})"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of this job on its way to be ``folder``/``tag``, as core.worker.checkpoint_saving.CheckpointFiles.

    ``gather(path, copies)``: this worker's share of it; ``complete(path)``: what is made of all of them;
    ``reach(point)``: where injected faults strike; ``latest``: a file of that name gets the tag; ``said``: what the
    event calls it.
    """

    session: Session
    reach: Reach
    gather: Callable[[Path, bool], WrittenShare]
    complete: Callable[[Path], None]
    folder: Path
    tag: str
    latest: bool = True
    said: str = ""

    def path(self, number: int) -> Path:
        """Where it is written in the membership ``number``: another place in each, and in each job."""
        return self.folder / f"{self.tag}{UNFINISHED}{self.session.job_id}-{number}"

    def write(self, number: int) -> Waits[str]:
        """Write this worker's files; the value is why that can't be, or "" where it is done."""
        session = self.session
        session.waiting.for_lease("a checkpoint")
        with session.heartbeats.at(ELSEWHERE, "a checkpoint"), unwatched(session):
            self.reach("checkpoint.start")
            try:
                self.gather(self.path(number), False).write()
            except NotSaved as error:
                return self.why(error)
            self.reach("checkpoint.written")
            return ""
        yield

    def why(self, error: NotSaved) -> str:
        """An error in this worker's words, with its seat, for all workers."""
        session = self.session
        text = re.sub(rf"{re.escape(UNFINISHED)}[^/]*", "", str(error))  # a name that will be gone by then
        member = session.view.member
        assert member is not None, "who saves is a member"
        return f"seat {member.seat} (rank {session.rank}): {text}"

    def publish(self, number: int) -> Waits[str]:
        """Give it its name; the value is why that can't be, or "" where it is done."""
        return self.named(self.path(number), self.said)
        yield

    def named(self, made: Path, said: str, **details: object) -> str:
        """Give ``made``, whose files are all there, its name; returns why that can't be, or "" where it is done."""
        session, place = self.session, self.folder / self.tag
        with session.heartbeats.at(ELSEWHERE, "a checkpoint"):
            session.waiting.for_lease("a checkpoint", interruptible=False)
            self.reach("checkpoint.publish")
            try:
                self.complete(made)
                ready = folders.prepared(self.folder / "latest", self.tag) if self.latest else None
                folders.put_in_place(made, place)
                self.reach("checkpoint.named")
                if ready is not None:
                    folders.replace(ready, self.folder / "latest")
            except OSError as error:
                self.remove(made)
                return self.why(error if isinstance(error, NotSaved) else NotSaved(folders.refusal(place, error)))
            session.note("checkpoint", f"{said} in {place}", path=str(place.absolute()), **details)
            self.reach("checkpoint.latest")
            self.remove(made)
            return ""

    def discard(self, number: int) -> Iterator[Any]:
        """Remove what was written of it, and what is left of others, where nobody writes any more."""
        self.remove(self.path(number))
        return iter(())

    def remove(self, made: Path) -> None:
        """Remove ``made``, and what else nobody writes to any more: in this membership others may be at the next
        checkpoint already.
        """
        session = self.session
        with session.heartbeats.at(ELSEWHERE, "a checkpoint"):
            for left in self.folder.glob(f"*{UNFINISHED}*"):
                own = f"{UNFINISHED}{session.job_id}-" in left.name
                over = left == made or not left.name.endswith(f"{UNFINISHED}{session.job_id}-{session.view.number}")
                if (own and over) or time.time() - folders.written_last(left) > STALE_S:
                    folders.remove(left)


@contextmanager
def unwatched(session: Session) -> Iterator[None]:
    """Inside of this context a membership change breaks a collective instead of being recovered from in it."""
    between, session.hooks.between_steps = session.hooks.between_steps, None
    try:
        yield
    finally:
        session.hooks.between_steps = between
