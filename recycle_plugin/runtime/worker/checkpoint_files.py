"""Checkpoints as folders of files: written under another name, and renamed once all workers have written.

Folders left under other names are removed with the next checkpoint, or with one that can't be written: this job's own,
and another job's if nobody has written to it for an hour. The protocol is in core/worker/checkpoint_saving.py.
"""

from __future__ import annotations

import copy
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

Latest = tuple[str, str]
"""The name and the text of a file that names the newest checkpoint of its folder."""


class WrittenShare:
    """A worker's files of one checkpoint (ports.CheckpointShare), written at once or, if it ``copies``, by
    :meth:`write`. ``turn``: this worker's number among the ``turns`` workers of its stage. ``reach(point)``: injected
    faults strike there; ``checkpoint.file`` is reached when a file of the framework's is on the disk.
    """

    def __init__(self, format: CheckpointFormat, turn: int, turns: int, reach: Reach, copies: bool) -> None:
        self._format, self._reach, self.turn, self.turns, self.copies = format, reach, turn, turns, copies
        self._left: list[Callable[[], None]] = []  # still to be written
        self._refused: NotSaved | None = None

    def save(self, path: Path, contents: Any) -> None:
        """Write ``contents`` as the file ``path``, or copy them to host memory for later."""
        held = copied(contents, path) if self.copies else contents
        self.add(path, partial(self._format.dump, held), self._reach)

    def add(self, path: Path, into: Callable[[Any], object], reach: Reach = lambda point: None) -> None:
        """Write the file ``path`` by ``into(file)``."""
        self._left.append(partial(self._write, path, into, reach))
        if not self.copies:
            self.write_left()

    def write_left(self) -> None:
        """Write the copies that are left; each is freed when its file is on the disk."""
        while self._left:
            self._left.pop(0)()

    def check(self) -> None:
        """Raise NotSaved if a file could not be written."""
        if self._refused is not None:
            raise self._refused

    def write(self) -> None:
        """Write what is left, on any thread. Raises NotSaved if a file could not be written."""
        self.write_left()
        self.check()

    def _write(self, path: Path, into: Callable[[Any], object], reach: Reach) -> None:
        """Write a file, unless one failed before; keep the error, since others may wait for this worker."""
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
    """Return ``value`` with its tensors copied to host memory; ``path``: the file they are for."""
    if torch.is_tensor(value):
        return fetch(value, f"a copy for {path}", shared=False)
    if isinstance(value, dict):
        made = copy.copy(value)  # with what else it has, such as a default_factory, or a state dict's versions
        for key, each in value.items():
            made[key] = copied(each, path)
        return made
    if isinstance(value, (list, tuple)):
        make = list if isinstance(value, list) else getattr(type(value), "_make", tuple)
        return make(copied(each, path) for each in value)
    return value


def saving_call(folder: Path, tag: str) -> str:
    """Return the call of the scripts that saves ``folder``/``tag``, which all make."""
    return f"save_checkpoint({str(folder)!r}, {tag!r})"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of this job that is to become ``folder``/``tag`` (core.worker.checkpoint_saving.CheckpointFiles).

    ``gather(path, copies)``: returns this worker's share. ``complete(path)``: writes what is derived from all shares.
    ``reach(point)``: injected faults strike there. ``latest``: whether the file ``latest`` gets the tag, or the
    name and text of another file for that. ``said``: what the event calls it.
    """

    session: Session
    reach: Reach
    gather: Callable[[Path, bool], WrittenShare]
    complete: Callable[[Path], None]
    folder: Path
    tag: str
    latest: bool | Latest = True
    said: str = ""

    def path(self, number: int) -> Path:
        """Return the folder in which it is written in generation ``number``, different in each generation and job."""
        return self.folder / f"{self.tag}{UNFINISHED}{self.session.job_id}-{number}"

    def write(self, number: int) -> Waits[str]:
        """Write this worker's files. Returns why it failed, or ""."""
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
        """Return an error's text for all workers, with this worker's seat."""
        session = self.session
        text = re.sub(rf"{re.escape(UNFINISHED)}[^/]*", "", str(error))  # this name will be gone by then
        member = session.view.member
        assert member is not None, "who saves is a member"
        return f"seat {member.seat} (rank {session.rank}): {text}"

    def publish(self, number: int) -> Waits[str]:
        """Put the checkpoint in place. Returns why it failed, or ""."""
        return self.named(self.path(number), self.said)
        yield

    def named(self, made: Path, said: str, **details: object) -> str:
        """Put ``made``, which has all its files, in place. Returns why it failed, or ""."""
        session, place = self.session, self.folder / self.tag
        with session.heartbeats.at(ELSEWHERE, "a checkpoint"):
            session.waiting.for_lease("a checkpoint", interruptible=False)
            self.reach("checkpoint.publish")
            try:
                self.complete(made)
                name, text = self.latest if isinstance(self.latest, tuple) else ("latest", self.tag)
                ready = folders.prepared(self.folder / name, text) if self.latest else None
                folders.put_in_place(made, place)
                self.reach("checkpoint.named")
                if ready is not None:
                    folders.replace(ready, self.folder / name)
            except OSError as error:
                self.remove(made)
                return self.why(error if isinstance(error, NotSaved) else NotSaved(folders.refusal(place, error)))
            session.note("checkpoint", f"{said} in {place}", path=str(place.absolute()), **details)
            self.reach("checkpoint.latest")
            self.remove(made)
            return ""

    def discard(self, number: int) -> Iterator[Any]:
        """Remove this checkpoint's files, and other unfinished folders that no process writes to any more."""
        self.remove(self.path(number))
        return iter(())

    def remove(self, made: Path) -> None:
        """Remove ``made``, and other unfinished folders that nobody writes to any more. In this generation other
        workers may already write the next checkpoint.
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
    """A context in which a membership change breaks a collective instead of being recovered from inside it."""
    between, session.hooks.between_steps = session.hooks.between_steps, None
    try:
        yield
    finally:
        session.hooks.between_steps = between
