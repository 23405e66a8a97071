"""What instructions cost, in integer microseconds (or in ticks, where a schedule is drawn)."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.instruction import Op


@dataclass(frozen=True)
class CostModel:
    """Costs per stage, in microseconds.  All tuples have one entry per stage.

    ``forward``, ``input``, ``weight``: one micro-batch's F, I and W (B costs input + weight).
    ``communication``: one boundary tensor from worker to worker (latency plus transfer).
    ``reduce``, ``step``: the stage's gradient sum and optimizer step.
    ``dispatch``: fixed cost of every instruction, whatever it does.
    """

    forward: tuple[int, ...]
    input: tuple[int, ...]
    weight: tuple[int, ...]
    communication: int = 0
    reduce: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    dispatch: int = 0

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name in ("reduce", "step"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * stages)
        for name in ("forward", "input", "weight", "reduce", "step"):
            values = getattr(self, name)
            if len(values) != stages:
                raise ValueError(f"costs.{name} has {len(values)} entries for {stages} stages")
            if any(value < 0 or value != int(value) for value in values):
                raise ValueError(f"costs.{name} = {values}: whole numbers of microseconds, none negative")

    @classmethod
    def uniform(
        cls, stages: int, forward: int = 1, input: int = 1, weight: int = 1, communication: int = 0, reduce: int = 0, step: int = 0
    ) -> CostModel:
        """The same costs on every stage; the default is the papers' F = I = W = 1."""
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages, communication, (reduce,) * stages, (step,) * stages)

    @property
    def stages(self) -> int:
        return len(self.forward)

    def of(self, op: Op, stage: int) -> int:
        """Microseconds that ``op`` occupies its worker on ``stage``; transfers occupy nobody."""
        return self.dispatch + {
            Op.F: self.forward[stage],
            Op.I: self.input[stage],
            Op.W: self.weight[stage],
            Op.B: self.input[stage] + self.weight[stage],
            Op.REDUCE: self.reduce[stage],
            Op.STEP: self.step[stage],
        }.get(op, -self.dispatch)
