"""The stand-in accelerator: how it fails, how its sums are cut, and what waits for it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import torch

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.runtime.collectives import staging
from recycle_plugin.runtime.collectives.asked import SCRIPT, SUMS, Asked, Call
from recycle_plugin.runtime.collectives.in_flight import Flight
from recycle_plugin.runtime.devices import accelerator
from recycle_plugin.runtime.stage import block_sums
from recycle_plugin.runtime.worker.trainer import Trainer
from wrappers.trainers import TRAINERS


def break_device(rank: str, at: str) -> None:
    """The device of ``rank`` fails at its instruction ``at``, as one does that has fallen off its bus."""
    event = accelerator.Accelerator.event

    def changed(self: accelerator.Accelerator, what: object) -> accelerator.StreamEvent:
        if os.environ["RANK"] == rank and str(what) == at:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return event(self, what)

    accelerator.Accelerator.event = changed


def small_pieces(seat: str, step: int, after: int) -> None:
    """Sums go through the host in pieces of 100 numbers, and the worker at ``seat`` dies in a sum of ``step``, once
    ``after`` of them are under way or over.
    """
    begin, begun = Flight.begin, Counter()
    staging.SUM_PIECE = block_sums.SUM_PIECE = 100

    def changed(self: Flight, asked: Asked, link: str = SCRIPT) -> Call:
        now = self._session.thread.work
        if link == SUMS and str(TRAINERS[0].seat) == seat and now.step == step:
            begun[now.step] += 1
            if begun[now.step] > after:
                os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, asked, link)

    Flight.begin = changed


def watch_device(folder: str, after: int, until: int) -> None:
    """Behind step ``after``, until ``until`` is trained: what stops the host until the stand-in is done, which of the
    plugin's own waits for it there are, and whether its generators are as they were, in a file for each worker.
    """
    train, await_event = Trainer.train, accelerator.await_event
    waits: Counter[str] = Counter()
    generators = []

    def counted(event: object, what: object, timeout_s: float) -> None:
        waits["an instruction" if isinstance(what, Instruction) else str(what)] += 1
        await_event(event, what, timeout_s)

    def trained(self: Trainer) -> float:
        from tests.support import standin

        loss = train(self)
        if self.step == after:
            standin.reset_synchronisations()
            waits.clear()
            generators.append(standin.generators_digest())
        if self.step == until:
            found = {
                "synchronisations": [[*each, count] for each, count in standin.synchronisations().items()],
                "waits": waits,
                "generators": [standin.generators_digest()] == generators,
            }
            Path(folder, f"{self.seat}.json").write_text(json.dumps(found))
        return loss

    accelerator.await_event, Trainer.train = counted, trained
