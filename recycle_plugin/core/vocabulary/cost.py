"""The cost model: what each instruction costs, in integer microseconds (or in ticks, for a schedule that is drawn)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from recycle_plugin.core.vocabulary.cut_text import shown
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Op

MOST_US, MOST_BYTES = 10**12, 10**15
"""The largest costs: the planner adds them up in 64 bits."""


@dataclass(frozen=True)
class CostModel:
    """Costs per stage, in microseconds. Each tuple has one entry per stage; a tuple with a default may be empty.

    ``forward``, ``input``, ``weight``: one micro-batch's F, I and W. ``communication``: one boundary tensor from worker
    to worker (latency plus transfer). ``reduce``, ``step``: the stage's gradient sum and optimizer step; 0 by default.
    ``tie``: the sum of tied weights' gradients over the stages that share them. ``dispatch``: fixed cost of every
    instruction. ``backward``: B, both gradients at once; input + weight by default. ``communication_across``: a
    boundary tensor between workers of different replicas; ``communication`` by default. ``slowness``: seats whose
    worker needs more (or less) time for F, I, W and B, in percent of the stage's: 150 is half as slow again.
    ``activation_bytes``, ``pending_bytes``: what one micro-batch holds from its F to its I, and from its I to its W;
    with activation checkpointing the second is larger. Raises ValueError
    for a tuple of the wrong length or a number out of range.
    """

    forward: tuple[int, ...]
    input: tuple[int, ...]
    weight: tuple[int, ...]
    communication: int = 0
    reduce: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    dispatch: int = 0
    backward: tuple[int, ...] = ()
    communication_across: int | None = None
    slowness: tuple[tuple[Seat, int], ...] = ()
    activation_bytes: tuple[int, ...] = ()
    pending_bytes: tuple[int, ...] = ()
    tie: int = 0

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name in ("reduce", "step"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * stages)
        for name in ("forward", "input", "weight", "reduce", "step", "backward", "activation_bytes", "pending_bytes"):
            values, optional = getattr(self, name), name in ("backward", "activation_bytes", "pending_bytes")
            if len(values) != stages and (values or not optional):
                raise ValueError(f"costs.{name} has {len(values)} entries for {stages} stages")
            unit, most = ("bytes", MOST_BYTES) if name.endswith("bytes") else ("microseconds", MOST_US)
            if not all(_is_whole(value, most) for value in values):
                raise ValueError(f"costs.{name} = {shown(values)}: write whole numbers of {unit}, from 0 to {most}")
        for name in ("communication", "communication_across", "dispatch", "tie"):
            value, optional = getattr(self, name), name == "communication_across"
            if not (_is_whole(value, MOST_US) or (optional and value is None)):
                raise ValueError(
                    f"costs.{name} = {shown(value)}: write a whole number of microseconds, from 0 to {MOST_US}"
                )
        if any(percent < 1 for _, percent in self.slowness):
            raise ValueError(f"costs.slowness = {self.slowness}: write percents of the stage's time, at least 1")

    def slowed(self, measured: tuple[tuple[Seat, int], ...]) -> CostModel:
        """Return a copy to which the ``measured`` slowness (seats and percent) is added; it replaces earlier values."""
        return replace(self, slowness=tuple(sorted({**dict(self.slowness), **dict(measured)}.items())))

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: int = 1,
        input: int = 1,
        weight: int = 1,
        communication: int = 0,
        reduce: int = 0,
        step: int = 0,
    ) -> CostModel:
        """Return a cost model with the same costs on all ``stages`` stages; by default the papers' F = I = W = 1."""
        return cls(
            (forward,) * stages,
            (input,) * stages,
            (weight,) * stages,
            communication,
            (reduce,) * stages,
            (step,) * stages,
        )

    @property
    def stages(self) -> int:
        return len(self.forward)

    def of(self, op: Op, stage: int, seat: Seat | None = None) -> int:
        """Return the microseconds of ``op`` on ``stage``, at ``seat``'s own speed if given; 0 for transfers."""
        match op:
            case Op.F:
                spent = self.forward[stage]
            case Op.I:
                spent = self.input[stage]
            case Op.W:
                spent = self.weight[stage]
            case Op.B:
                spent = self.backward[stage] if self.backward else self.input[stage] + self.weight[stage]
            case Op.REDUCE | Op.STEP:
                return self.dispatch + (self.reduce if op is Op.REDUCE else self.step)[stage]
            case Op.TIE:
                return self.dispatch + self.tie
            case _:
                return 0
        spent += self.dispatch
        percent = self.percent(seat) if seat is not None else 100
        return spent if percent == 100 else -(-spent * percent // 100)

    def alone_s(self, stage: int, splits: bool, micro_batches: int) -> float:
        """Return the seconds that one worker needs for a stage's step. ``splits``: split backwards."""
        ops = (Op.F, Op.I, Op.W) if splits else (Op.F, Op.B)
        return (micro_batches * sum(self.of(op, stage) for op in ops) + self.of(Op.STEP, stage)) / 1e6

    def percent(self, seat: Seat) -> int:
        """Return the time that the worker at ``seat`` takes, in percent of its stage's cost; 100 by default."""
        return self._percent.get(seat, 100)

    def transfer(self, sender: Seat, receiver: Seat) -> int:
        """Return the microseconds from when a boundary tensor is made at ``sender`` until it is at ``receiver``."""
        across = self.communication_across
        return self.communication if across is None or sender.replica == receiver.replica else across

    @cached_property
    def _percent(self) -> dict[Seat, int]:
        return dict(self.slowness)


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
