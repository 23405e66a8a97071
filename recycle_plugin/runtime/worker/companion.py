"""The machine by which a live worker replays its stage as a companion (core/worker/companion.py).

The replay runs on the stage's own layers and optimizer, while their state is kept in host memory. So it is the same
computation for any framework, and an accelerator needs no room for a second stage.
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

DRIFT = 0.25  # of the replayed steps' change: the result may differ by so much if sums have no order
KEPT = "the state of a stage that is replayed along"


@dataclass(frozen=True)
class KeptState:
    """A stage's former state: ``tensors``, in host memory, ``small`` parts, and the values set by ``scripts``."""

    tensors: Mapping[str, torch.Tensor]
    small: Mapping[str, Any]
    scripts: ScriptsValues


class TorchCompanion(ReplayMachine):
    """The machine of a live worker that replays its stage. ``at_work``: a replay is under way."""

    at_work = False

    def keep_state(self) -> KeptState:
        """Copy the state of this worker's stage, and all else that a replay changes, to host memory."""
        self.at_work, self._changed = True, 0.0
        with self.session.heartbeats.at(ELSEWHERE, KEPT):
            tensors, device = self.state.tensors(following=False), self.framework.model.device
            copies = device.to_host(tuple(tensors.values()), KEPT, shared=False).wait(COPY_S)
            self._kept = KeptState(dict(zip(tensors, copies, strict=True)), self.state.small(), self.scripted.now())
        return self._kept

    def restore(self, replay: Replay) -> Waits[int]:
        """Load this worker's stage state from a checkpoint. Returns its bytes; never yields. Raises CantReplay."""
        size = yield from super().restore(replay)
        self._changed = self._apart(self._kept)
        return size

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Let an injected fault strike. A real worker's instruction takes its time by itself."""
        self._parts.world.reach("before", self.framework.seat, instruction)
        return super().spend(instruction)

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Return what LOAD, F, I, W, B or STEP makes. Raises CantReplay if the layers fail."""
        with self.session.heartbeats.at(ELSEWHERE, f"{instruction} of a replay"):
            return super().compute(instruction, have, boundary_only)

    def otherwise(self, kept: KeptState) -> str:
        """Return how the state differs from ``kept``, in words; "" if it does not. With ``exact`` any bit counts. Else
        weights may differ by as much as the order of sums explains, as a share of what the replayed steps have changed.
        """
        if not self._parts.settings.exact:
            apart = self._apart(kept)
            return (
                f"its weights differ by {apart:.3g}, and the replayed steps have changed them by {self._changed:.3g}"
                if not apart <= DRIFT * self._changed  # neither if it is not a number
                else ""
            )
        for name, tensor in self.state.tensors(following=False).items():
            before = kept.tensors.get(name)
            if before is None or form_of(before)[:2] != form_of(tensor)[:2] or not torch.equal(_host(tensor), before):
                return f"{name} has other bits"
        return ""

    @torch.no_grad()
    def put_back(self, kept: KeptState) -> None:
        """Restore ``kept``."""
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
        present = self.state.tensors()
        names = [name for name in kept.tensors if name.startswith("masters/")]
        names = names or [name for name in kept.tensors if name.startswith("weights/")]
        pairs = ((_host(present[name]).double(), kept.tensors[name].double()) for name in names)
        return math.sqrt(sum(float((here - there)[~_same(here, there)].square().sum()) for here, there in pairs))


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where both have the same number, or none."""
    return (one == other) | (one.isnan() & other.isnan())


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return fetch(tensor.detach(), KEPT)
