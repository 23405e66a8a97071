"""The trainer of this process, and waits: what other changes to a job use."""

from __future__ import annotations

import time
from dataclasses import dataclass

from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.ports import Framework
from recycle_plugin.runtime.worker.stepping import Stepping
from recycle_plugin.runtime.worker.trainer import Trainer

DEADLINE_S = 150.0
POLL_S = 0.002
TRAINERS: list[Trainer] = []  # of this process: one, once it is made


def _note_trainer() -> None:
    make = Trainer.__init__

    def changed(self: Trainer, *given: object) -> None:
        TRAINERS.append(self)
        make(self, *given)

    Trainer.__init__ = changed


_note_trainer()


@dataclass(frozen=True)
class Inside:
    """What a trainer has for itself."""

    session: Session
    framework: Framework
    store: StepStore
    stepping: Stepping


def inside(trainer: Trainer | None = None) -> Inside:
    of = trainer or TRAINERS[0]
    return Inside(of._session, of._framework, of._parts.store, of._parts.stepping)


def wait_until(ready, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)
