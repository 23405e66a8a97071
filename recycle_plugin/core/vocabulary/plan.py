"""A plan: the whole schedule of one step, frozen and hashed. Workers compare the hash before they run it."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from functools import cached_property

from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.program import Packed, Programs, Route
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology

ONE_F_ONE_B = "1f1b"


@dataclass(frozen=True)
class Policy:
    """Which of ReCycle's techniques are on, and how much memory a worker may use.

    ``activation_cap``: micro-batches whose activations or pending weight gradients one worker may hold at once: one
    number, one per stage, "1f1b" for what 1F1B holds (one for each stage still ahead), or None for the number of stages
    (what 1F1B holds at its first stage). ``stagger_optimizer``: a stage steps once it has its gradients, and begins the
    next step; off: no stage steps before all have theirs. ``validate``: the step waits for the gradient norm over all
    stages (gradient clipping), so it is not staggered. ``block``: so many consecutive micro-batches of a replica stay
    together (core/vocabulary/blocks.py); None: all of them. ``shrinks``: while a replica is out nobody computes its
    micro-batches (core/vocabulary/step_batches.py); no step is staggered then. Raises ValueError for a bad number.
    """

    split_backward: bool = True
    stagger_optimizer: bool = True
    reroute: bool = True
    activation_cap: int | tuple[int, ...] | str | None = None
    validate: bool = False
    block: int | None = 1
    shrinks: bool = False

    def __post_init__(self) -> None:
        cap = self.activation_cap
        if isinstance(cap, str) and cap != ONE_F_ONE_B:
            raise ValueError(f'activation_cap is {cap!r}: a number of micro-batches, one per stage, or "{ONE_F_ONE_B}"')
        if isinstance(cap, (int, tuple)) and min(cap if isinstance(cap, tuple) else (cap,), default=0) < 1:
            raise ValueError(f"activation_cap is {cap}: a worker has to hold at least 1 micro-batch")
        if self.block is not None and self.block < 1:
            raise ValueError(f"block is {self.block}: it has at least 1 micro-batch")

    @property
    def together(self) -> bool:
        """Whether no stage steps before all have their gradients: all meet in a VALIDATE before their STEPs."""
        return self.validate or self.shrinks or not self.stagger_optimizer

    def closing(self, tied: bool) -> tuple[Op, ...]:
        """Return the ops that every program of a stage ends with, in order. ``tied``: the stage shares weights."""
        return (Op.REDUCE, *[Op.TIE] * tied, *[Op.VALIDATE] * self.together, Op.STEP)

    def cap(self, stage: int, stages: int) -> int:
        """Return how many micro-batches a worker of ``stage`` (of ``stages``) may hold at once. Raises ValueError if
        ``activation_cap`` has another number of entries.
        """
        cap = self.activation_cap
        if cap == ONE_F_ONE_B or (cap is None and not (self.split_backward or self.reroute)):
            return stages - stage
        if isinstance(cap, tuple):
            if len(cap) != stages:
                raise ValueError(f"activation_cap has {len(cap)} entries for {stages} stages")
            return cap[stage]
        assert not isinstance(cap, str), f"{cap} has no number of micro-batches yet"
        return stages if cap is None else cap

    def replicas(self, view: ClusterView) -> tuple[int, ...]:
        """Return the replicas whose micro-batches are part of a step in ``view``."""
        return view.whole if self.shrinks else tuple(range(view.topology.replicas))

    def blocks(self, topology: Topology) -> Blocks:
        return Blocks(
            topology, topology.micro_batches if self.block is None else min(self.block, topology.micro_batches)
        )


@dataclass(frozen=True)
class Plan:
    """The programs of every live seat for one step (template, step 0), with what the planner expects of them.

    ``route[stage, micro_batch]`` is the seat that runs it, or would if the step had it. ``starts``: each instruction's
    planned start in microseconds, aligned with ``programs``. ``period_us``: steady-state time per step; ``bound_us``:
    no schedule of this routing and memory is faster; ``span_us``: first start to last end. The mappings are packed into
    arrays (core/vocabulary/program.py). Raises ValueError unless the programs are those of the live seats.
    """

    view: ClusterView
    policy: Policy
    route: Route
    programs: Programs
    starts: Packed = field(compare=False)
    period_us: int = field(compare=False)
    bound_us: int = field(compare=False)
    span_us: int = field(compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.route, Route):
            object.__setattr__(self, "route", Route.of(self.view.topology, self.route))
        if not isinstance(self.programs, Programs):
            object.__setattr__(self, "programs", Programs.of(self.programs))
        if not isinstance(self.starts, Packed):
            object.__setattr__(self, "starts", Packed.of(self.starts))
        if set(self.programs.seats) != self.view.live:
            raise ValueError("a plan has one program for each live seat, and no other")

    @property
    def stages(self) -> int:
        return self.view.topology.stages

    @cached_property
    def batch(self) -> tuple[MicroBatch, ...]:
        replicas = frozenset(self.policy.replicas(self.view))
        return tuple(one for one in self.view.topology.batch if one.replica in replicas)

    @property
    def gap(self) -> float:
        """How far the period lies above its lower bound, as a fraction of the bound."""
        return self.period_us / self.bound_us - 1 if self.bound_us else 0.0

    def own(self, seat: Seat) -> tuple[MicroBatch, ...]:
        """Return the micro-batches that ``seat`` runs, in canonical order."""
        if seat.stage not in self._owned:
            self._owned[seat.stage] = self.route.owned(seat.stage, self.policy.replicas(self.view))
        return self._owned[seat.stage].get(seat.replica, ())

    @cached_property
    def templates(self) -> dict[Seat, tuple[Instruction, ...]]:
        """Programs with loads and transfers, by seat, as far as they were asked for (planner/lower.py)."""
        return {}

    @cached_property
    def _owned(self) -> dict[int, dict[int, tuple[MicroBatch, ...]]]:
        return {}

    def program(self, seat: Seat, step: int) -> tuple[Instruction, ...]:
        return tuple(instruction.at(step) for instruction in self.programs[seat])

    @cached_property
    def digest(self) -> str:
        """A hash of everything that workers have to agree on: 16 hex digits."""
        seats = array(
            "q", (number for seat, end in zip(self.programs.seats, self.programs.ends) for number in (*seat, end))
        )
        return hashlib.sha256(seats.tobytes() + self.programs.data).hexdigest()[:16]
