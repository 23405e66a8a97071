"""Where logs are, and when checkpoints are made."""

from __future__ import annotations

from pathlib import Path

from recycle_plugin.core.worker.checkpoint_interval import CheckpointInterval
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.worker.checkpoints import JobCheckpoints
from recycle_plugin.runtime.worker.stage_log import StageLog
from recycle_plugin.runtime.worker.trainer import Trainer


def log_apart(by: str) -> None:
    """Each worker's log is in a folder of its rank's, of its host's, or of all."""
    begin = StageLog.__init__

    def changed(self: StageLog, session: Session, framework, settings, run_dir: str) -> None:
        whose = {"rank": f"rank{session.rank}", "host": session.host}.get(by, by)
        begin(self, session, framework, settings.model_copy(update={"folder": f"{run_dir}/log-of-{whose}"}), run_dir)

    StageLog.__init__ = changed


def checkpoint_every(steps: int, concludes: bool = False) -> None:
    """Automatic checkpoints come every so many steps, whatever they cost.  ``concludes``: each is whole before the next
    one is due, however slow the disk.
    """
    made, make_if_due = CheckpointInterval.made, JobCheckpoints.make_if_due

    def changed(self: CheckpointInterval, begun: int, costs, free: int) -> None:
        made(self, begun, costs, free)
        self.every, self.due = steps, max(begun + steps, free)

    def after_the_last(self: JobCheckpoints, step: int) -> None:
        if step % steps == 0:
            self.conclude()
        make_if_due(self, step)

    CheckpointInterval.made = changed
    if concludes:
        JobCheckpoints.make_if_due = after_the_last


def save_each(folder: str, steps: int) -> None:
    """A checkpoint every ``steps`` steps; who has saved one notes its step in folder/seat<replica.stage>.txt."""
    train = Trainer.train

    def changed(self: Trainer) -> float:
        loss = train(self)
        if self.step % steps == 0:
            self.save(Path(folder), f"step{self.step}")
            with (Path(folder) / f"seat{self.seat}.txt").open("a") as file:
                file.write(f"{self.step}\n")
        return loss

    Trainer.train = changed
