"""The machine by which a real worker replays its stage beside its state (core/worker/companion.py).

The replay runs on the stage's own layers and optimizer, whose state is in host memory meanwhile: so it is the same
computation, of whatever framework, and an accelerator needs no room for a second stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.core.messages.from_coordinator import Replay
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.devices.kinds import fetch
from recycle_plugin.runtime.devices.port import COPY_S
from recycle_plugin.runtime.state.contents import form_of
from recycle_plugin.runtime.state.surroundings import ScriptsValues
from recycle_plugin.runtime.worker.replay_machine import ReplayMachine

DRIFT = 0.25  # of what the replayed steps have changed: by how much it may come out otherwise where sums have no order
KEPT = "the state of a stage that is replayed along"


@dataclass(frozen=True)
class KeptState:
    """What a worker's stage had: the state's ``tensors``, in host memory, what goes by value, and the ``scripts``
    values.
    """

    tensors: Mapping[str, torch.Tensor]
    small: Mapping[str, Any]
    scripts: ScriptsValues


class TorchCompanion(ReplayMachine):
    """The machine of a live worker that replays its stage along.  ``at_work``: it does so now."""

    at_work = False

    def keep_state(self) -> KeptState:
        """A copy of the state of this worker's stage, and of all else that a replay changes."""
        self.at_work, self._changed = True, 0.0
        with self.session.heartbeats.at(ELSEWHERE, KEPT):
            tensors, device = self.state.tensors(following=False), self.framework.model.device
            copies = device.to_host(tuple(tensors.values()), KEPT, shared=False).wait(COPY_S)
            self._kept = KeptState(dict(zip(tensors, copies, strict=True)), self.state.small(), self.scripted.now())
        return self._kept

    def restore(self, replay: Replay) -> Waits[int]:
        """Take the state of this worker's stage from a checkpoint; returns its bytes.  A generator that never yields.

        Raises CantReplay.
        """
        size = yield from super().restore(replay)
        self._changed = self._apart(self._kept)
        return size

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Nothing: a real worker's instruction takes its time by itself."""
        self._parts.world.reach("before", self.framework.seat, instruction)
        return super().spend(instruction)

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """What LOAD, F, I, W, B or STEP makes.  Raises CantReplay where the layers fail."""
        with self.session.heartbeats.at(ELSEWHERE, f"{instruction} of a replay"):
            return super().compute(instruction, have, boundary_only)

    def otherwise(self, kept: KeptState) -> str:
        """In what the state is another one than was ``kept``, in words: with ``exact`` in any bit, else by more than
        the order of sums explains, of the weights, against what the replayed steps have changed in them.
        """
        if not self._parts.settings.exact:
            apart = self._apart(kept)
            return (
                f"its weights differ by {apart:.3g}, and the replayed steps have changed them by {self._changed:.3g}"
                if apart > DRIFT * self._changed
                else ""
            )
        for name, tensor in self.state.tensors(following=False).items():
            before = kept.tensors.get(name)
            if before is None or form_of(before)[:2] != form_of(tensor)[:2] or not torch.equal(_host(tensor), before):
                return f"{name} has other bits"
        return ""

    @torch.no_grad()
    def put_back(self, kept: KeptState) -> None:
        """Have what was ``kept`` again."""
        with self.session.heartbeats.at(ELSEWHERE, KEPT):
            self.state.put(kept.small)
            present = self.state.tensors(following=False)
            for name, before in kept.tensors.items():
                present[name].copy_(before)
            self.state.rewritten()
            self.scripted.put_back(kept.scripts)
            self._parts.stepping.rewritten()
        self.at_work = False

    @torch.no_grad()
    def _apart(self, kept: KeptState) -> float:
        """How far the weights are from those that were ``kept``: the norm of the difference."""
        present = self.state.tensors()
        names = [name for name in kept.tensors if name.startswith("masters/")]
        names = names or [name for name in kept.tensors if name.startswith("weights/")]
        apart = (_host(present[name]).double() - kept.tensors[name].double() for name in names)
        return math.sqrt(sum(float(each.square().sum()) for each in apart))


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return fetch(tensor.detach(), KEPT)
