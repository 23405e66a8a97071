"""Deaths at odd moments."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.log.disk import Disk, GrowingFile
from recycle_plugin.runtime.log.records import Stream
from recycle_plugin.runtime.log.writer import LogWriter, Report
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.worker.trainer import Trainer
from wrappers.trainers import DEADLINE_S, POLL_S, TRAINERS, inside


def killed_in_rotation(rank: int, number: int, segment_bytes: int) -> None:
    """Segments of logs are small, and the first process of ``rank`` dies between one that is sealed, its ``number``-th,
    and the next.
    """
    begin = LogWriter.__init__

    class Dying(Disk):
        def __init__(self) -> None:
            self._left = number

        def create(self, path: Path) -> GrowingFile:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().create(path)

    def changed(self: LogWriter, folder: Path, stream: Stream, budget: int, report: Report) -> None:
        disk = Dying() if stream.worker == WorkerId(rank, 0) else Disk()
        begin(self, folder, stream, budget, report, segment_bytes, disk)

    LogWriter.__init__ = changed


def die_within_sum(seat: str, step: int, after: int, folder: str) -> None:
    """Sums are made a parameter at a time, and the worker at ``seat`` dies in that of ``step``, once it has ``after``
    of them.  A peer whose sum is interrupted writes to folder/<seat> whether its contributions, and all that a step
    changes, are bit for bit as they were before.
    """
    one, reduce, made = Gradients._sum, Gradients.reduce, []

    def bits(trainer: Trainer) -> list:
        grads = [None if each is None else each.clone() for each in inside(trainer).framework.gradients.view()]
        return [trainer.state.digest(), grads]

    def summed(self: Gradients, bucket, of: int, *given) -> torch.Tensor:
        if str(self._store.seat) == seat and of == step and len(made) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        made.append(of)
        return one(self, bucket, of, *given)

    def watched(self: Gradients, of: int, *given) -> list | None:
        made.clear()
        (trainer,) = TRAINERS
        before = bits(trainer)
        try:
            return reduce(self, of, *given)
        except Interrupted:
            (digest, grads), (now, their) = before, bits(trainer)
            same = digest == now and all(
                (a is b is None) or torch.equal(a, b) for a, b in zip(grads, their, strict=True)
            )
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / str(self._store.seat)).write_text(f"{len(made)} {same}")
            raise

    Gradients._cut_buckets = lambda self: [[place] for place in range(len(self._gradients.parameters))]
    Gradients._sum, Gradients.reduce = summed, watched


def strike_at(moment: str, rank: int, flag: str = "") -> None:
    """At a moment before the first step or after the last one that worker, the first process of its rank, is killed;
    or, where there is a ``flag``, its number is in that file, and it waits.
    """
    owner, name, before = {
        "meeting": (torch.distributed, "init_process_group", True),
        "initialize": (Trainer, "__init__", True),
        "enrolling": (Trainer, "start", True),
        "script's end": (Trainer, "await_others", True),
        "finishing": (Trainer, "finish", True),
        "left": (Session, "leave", False),
    }[moment]
    function = getattr(owner, name)

    def strike() -> None:
        if not flag:
            os.kill(os.getpid(), signal.SIGKILL)
        Path(flag).write_text(str(os.getpid()))
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)

    def changed(*arguments: object, **named: object) -> object:
        if before:
            strike()
        result = function(*arguments, **named)
        if not before:
            strike()
        return result

    if int(os.environ["RANK"]) == rank and not int(os.environ.get("RECYCLE_INCARNATION", "0")):
        setattr(owner, name, changed)
