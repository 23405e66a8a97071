"""A plan: the whole schedule of one step, frozen and hashed.  Workers compare the hash before they run it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Mapping

from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.instruction import Instruction
from recycle_plugin.core.topology import ClusterView


@dataclass(frozen=True)
class Policy:
    """Which of ReCycle's techniques are on, and how much memory a worker may use.

    ``activation_cap``: micro-batches whose activations or pending weight gradients one worker may hold
    at once, or None for the number of stages (what 1F1B holds at its first stage).
    ``validate``: the step waits for the gradient norm over all stages (gradient clipping).
    """

    split_backward: bool = True
    stagger_optimizer: bool = True
    reroute: bool = True
    activation_cap: int | None = None
    validate: bool = False

    def __post_init__(self) -> None:
        if self.activation_cap is not None and self.activation_cap < 1:
            raise ValueError(f"activation_cap is {self.activation_cap}: a worker has to hold at least 1 micro-batch")

    def cap(self, stage: int, stages: int) -> int:
        """Micro-batches that a worker of ``stage`` may hold.  1F1B's own is one for each stage still ahead."""
        if self.activation_cap is not None:
            return self.activation_cap
        return stages if self.split_backward or self.reroute else stages - stage


@dataclass(frozen=True)
class Plan:
    """Programs of every live seat for one step (template, step 0), with what the planner expects of them.

    ``route[stage, micro_batch]`` is the seat that runs it.  ``starts`` gives each instruction's planned
    start in microseconds, aligned with ``programs``.  ``period_us``: steady-state time per step;
    ``bound_us``: no schedule of this routing and memory is faster; ``span_us``: first start to last end.
    """

    view: ClusterView
    policy: Policy
    route: Mapping[tuple[int, MicroBatch], Seat]
    programs: Mapping[Seat, tuple[Instruction, ...]]
    starts: Mapping[Seat, tuple[int, ...]] = field(compare=False)
    period_us: int = field(compare=False)
    bound_us: int = field(compare=False)
    span_us: int = field(compare=False)

    def __post_init__(self) -> None:
        for name in ("route", "programs", "starts"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if set(self.programs) != set(self.view.live):
            raise ValueError("a plan has one program for each live seat, and no other")

    @property
    def stages(self) -> int:
        return self.view.topology.stages

    def own(self, seat: Seat) -> tuple[MicroBatch, ...]:
        """The micro-batches that ``seat`` runs, in canonical order."""
        return tuple(mb for mb in self.view.topology.batch if self.route[seat.stage, mb] == seat)

    def program(self, seat: Seat, step: int) -> tuple[Instruction, ...]:
        """``seat``'s instructions, bound to ``step``."""
        return tuple(instruction.at(step) for instruction in self.programs[seat])

    @cached_property
    def digest(self) -> str:
        """Hash of everything that workers have to agree on: 16 hex digits."""
        text = "\n".join(f"{seat}: {' '.join(map(str, program))}" for seat, program in sorted(self.programs.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
