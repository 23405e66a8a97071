"""A running job's checkpoints: those that the script saves, automatic ones, and one at an end that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from recycle_plugin.core.messages.from_coordinator import BarrierPassed
from recycle_plugin.core.worker.checkpoint_interval import CheckpointInterval
from recycle_plugin.errors import NotSaved
from recycle_plugin.runtime.stage.ports import CheckpointFormat
from recycle_plugin.runtime.worker.background import Background
from recycle_plugin.runtime.worker.blocking_loop import BlockingLoop
from recycle_plugin.runtime.worker.brought import by_rank
from recycle_plugin.runtime.worker.checkpoint_files import Checkpoint, Latest, WrittenShare, saving_call
from recycle_plugin.runtime.worker.log_choice import LogChoice
from recycle_plugin.runtime.worker.parts import Parts

WriteFile = Callable[[Path, Callable[[Any], object]], None]


class JobCheckpoints:
    """The checkpoints of the worker that has ``parts`` and trains by ``loop``.

    ``recover()`` is called after a membership change between steps. ``write_place(add, path)`` adds files to the
    checkpoint ``path`` with the position of the worker's plain iterator, if it has one. ``valid_from()``: the
    generation from which the worker's data is valid. ``choice``: which boundaries are logged, None if nothing is.
    """

    def __init__(
        self,
        parts: Parts,
        loop: BlockingLoop,
        recover: Callable[[], None],
        write_place: Callable[[WriteFile, Path], None],
        valid_from: Callable[[], int],
        choice: LogChoice | None,
    ) -> None:
        settings, self._session, self._format = parts.settings, parts.session, parts.framework.checkpoints
        self._state, self._write_place, self._reach = parts.state, write_place, parts.world.reach
        self._loop = loop
        self._folder = Path(settings.checkpoint_dir) if settings.checkpoint_dir else None
        self._runs = Path(parts.run_dir) / "checkpoint"
        self._saved_to: Path | None = None  # the last save's folder, as far as this worker knows
        self._unsaved = ""  # why the script's last save failed, until it trains on
        self._background: Background | None = None
        if settings.checkpoint is not None:
            logs = choice is not None
            first = logs and not parts.session.view.newcomer
            chosen = settings.checkpoint
            interval = CheckpointInterval(chosen.overhead, loop.machine.stepped, first, chosen.every)
            if parts.session.view.newcomer:
                interval.joined(parts.session.view.changed_behind)
            made, keep = partial(self._checkpoint, self._format, self.folder), settings.checkpoint.keep
            since = valid_from if logs else None
            self._background = Background(parts.session, loop, made, interval, keep, recover, since, choice)

    def save(self, folder: Path, tag: str, latest: bool | Latest, files: CheckpointFormat | None, step: int) -> None:
        """Save the checkpoint of ``step``; see Trainer.save. Raises NotSaved."""
        self._saved_to, call = folder, saving_call(folder, tag)
        made = self._checkpoint(files or self._format, folder, tag, latest, f"checkpoint of step {step}")
        if why := self._loop.save(call, made):
            self._unsaved = f"{call} has failed: {why}"
            raise NotSaved(self._unsaved)

    def _checkpoint(self, format: CheckpointFormat, folder: Path, tag: str, *more: Any) -> Checkpoint:
        gather = partial(self._gathered, format)
        return Checkpoint(self._session, self._reach, gather, format.complete, folder, tag, *more)

    def _gathered(self, format: CheckpointFormat, path: Path, copies: bool) -> WrittenShare:
        session = self._session
        own = session.view.member
        assert own is not None, "who saves is a member"
        alike = session.view.roster.alike(own)
        share = WrittenShare(format, alike.index(own), len(alike), self._reach, copies)
        format.gather(self._state, path, share)
        self._write_place(share.add, path)
        return share

    @property
    def folder(self) -> Path:
        """The folder for checkpoints for which the script has named none."""
        return self._folder or self._saved_to or self._runs

    def agree_on_folder(self, barrier: Callable[[str, dict[str, Any]], BarrierPassed]) -> Path:
        """Return the folder of the job's last checkpoint, the same on all workers, which meet at ``barrier``. A worker
        that has come back does not know where its script has saved before.
        """
        if self._folder is not None:
            return self._folder
        known = {str(self._session.rank): str(self._saved_to)} if self._saved_to is not None else {}
        folders = by_rank(str, barrier("the choice of the last checkpoint's folder", known))
        return Path(folders[min(folders)]) if folders else self._runs

    def make_if_due(self, step: int) -> None:
        """Make an automatic checkpoint before ``step`` if due. Warn if the script trains on after a failed save."""
        if self._unsaved and self._session.view.is_first:
            self._session.note("warning", f"{self._unsaved}; the script goes on without it")
        self._unsaved = ""
        if self._background is not None:
            self._background.before(step)

    def conclude(self) -> None:
        """Wait until no checkpoint is being written any more."""
        if self._background is not None:
            self._background.conclude()

    def loaded(self, step: int) -> None:
        """Count from ``step``, the step of the checkpoint that all have loaded."""
        if self._background is not None:
            self._background.loaded(step)
