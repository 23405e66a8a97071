"""The exact numbers (arithmetic.py) of a simulated worker: gradient sums, moments, and weight versions of stashes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from recycle_plugin.core.coordinator.facts.step_validation import over
from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.lab.simulator.arithmetic import (
    LEARNING_RATE,
    PRIME,
    added,
    clipped,
    compute,
    divided,
    over_tie,
    scaled,
    share,
)
from recycle_plugin.lab.simulator.scenario import Scenario

Sums = Mapping[Block, int]
MOMENTS = ("moment 0", "moment 1", "moment 2")
UNSPLIT = 1_234_567  # the part of each weight gradient that I makes


class Numbers:
    """The numbers of the worker at ``seat``.

    A stash is void once its weights are written over, as by a step that is taken back and done again; torch's graphs
    are too. The weights of all shards of a stage are equal, so one reference does for them; the moments are not.

    ``rate``: the learning rate, which the script sets. ``contributing``: the share of replicas that contribute.
    ``unchanged``: (step, moments before the script changed some for that step).
    """

    def __init__(self, scenario: Scenario, seat: Seat, shard: int = 0) -> None:
        self._scenario, self._seat = scenario, seat
        self.tie = scenario.shape.tie(seat.stage)
        self._blocks = scenario.policy.blocks(scenario.shape)
        self.rate = LEARNING_RATE
        self.contributing = LiveShare()
        self._written = 0  # how often parameters were written: torch's version count
        self._sums: dict[tuple[int, Block], int] = {}  # of weight gradients, by (step, block)
        self.moments: dict[str, int] = dict.fromkeys(MOMENTS, shard)  # optimizer state, which no other number shows
        self.unchanged: tuple[int, tuple[int, ...]] = 0, ()
        self._before: dict[str, int] = {}  # moments before the last step

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        """Return the data that LOAD, F, I, W, B or STEP makes. AssertionError if it would use a void stash. Outside
        exact mode a part of the weight gradient is in the sum from I on, as for layers whose backward is not split.
        """
        stash = Datum("stash", self._seat.chunk, instruction.micro_batch, instruction.step)
        if instruction.op in (Op.I, Op.B) and have[stash].weights != self._written:
            raise AssertionError(
                f"seat {self._seat} runs {instruction} through parameters that have changed since its forward"
            )
        rate = scaled(self.rate, self.contributing)
        made = compute(instruction, have, self._scenario.shape.stages, bool(self.tie), self._scenario.clip, rate)
        if instruction.op is Op.F:
            made[stash] = made[stash]._replace(weights=self._written)
            if self._seat.stage == self._scenario.shape.stages - 1:
                made[stash._replace(kind="loss")] = made[stash].loss
        elif instruction.op in (Op.W, Op.B):
            early = UNSPLIT if instruction.op is Op.W and not self._scenario.ordered else 0
            self._add(instruction.step, instruction.works_on, made[stash._replace(kind="wgrad")] - early)
        elif instruction.op is Op.I and not boundary_only and not self._scenario.ordered:
            self._add(instruction.step, instruction.works_on, UNSPLIT)
        elif instruction.op is Op.STEP:
            self._written += 1
            norm = have.get(of_layers("norm", self._seat, instruction.step))
            self._before = dict(self.moments)
            for name in MOMENTS:
                self.move(name, self.gradient(instruction.step, have), norm)
        return made

    def taken_back(self) -> None:
        """Restore the moments before the last step, which is taken back."""
        self._written += 1
        self.moments = self._before

    def sums(self, step: int) -> Sums:
        """Return this worker's part of the stage's gradient in ``step``, by block."""
        return {block: total for (of, block), total in self._sums.items() if of == step}

    def block(self, micro_batch: MicroBatch) -> Block:
        """Return the block that ``micro_batch`` is in."""
        return self._blocks.of(micro_batch)

    def add_sums(self, step: int, sums: Sums) -> None:
        """Add another worker's block sums of ``step``. AssertionError for a block that an exact job has already."""
        for block, value in sums.items():
            before = self._sums.get((step, block))
            if self._scenario.exact and before is not None:
                raise AssertionError(f"block {block} of step {step} would be counted twice")
            self._sums[step, block] = value if before is None else added(before, value, self._scenario.ordered)

    def forget_sums(self) -> None:
        """Drop all sums of weight gradients."""
        self._sums.clear()

    def total(self, brought: list[Sums]) -> int:
        """Return all workers' block sums, added in the blocks' order and divided by the contributing share."""
        totals = {block: total for part in brought for block, total in part.items()}
        found = reduce(lambda total, block: added(total, totals[block], self._scenario.ordered), sorted(totals), 0)
        return divided(found, self.contributing)

    def over_tie(self, by_stage: Mapping[int, int]) -> int:
        """Return the sum over the stages that share a weight, in their order."""
        return over_tie(by_stage, self._scenario.ordered)

    def gradient(self, step: int, have: StepStore) -> int:
        """Return the gradient of ``step`` that is judged and applied."""
        return have[of_layers("tied" if self.tie else "reduced", self._seat, step)]

    def share(self, step: int, have: StepStore) -> float:
        """Return this stage's share of the squared norm of ``step``; a shared weight counts in its first stage."""
        return share(self.gradient(step, have)) if not self.tie or self._seat.stage == self.tie[0] else 0.0

    def norm(self, shares: Mapping[str, float]) -> float:
        """Return the norm over all stages from the share of each."""
        return sum(shares.values()) ** 0.5

    def stepped(self, weight: int, gradient: int, norm: float | None) -> int:
        """Return the weight after a step that applies ``gradient``, clipped for ``norm``, to ``weight``."""
        return (weight - scaled(self.rate, self.contributing) * self._update(gradient, norm)) % PRIME

    def move(self, name: str, gradient: int, norm: float | None) -> None:
        """Change a moment by a step's gradient, each in its own way."""
        number = MOMENTS.index(name)
        self.moments[name] = (3 * self.moments[name] + (number + 2) * self._update(gradient, norm) + number) % PRIME

    def _update(self, gradient: int, norm: float | None) -> int:
        return clipped(gradient, norm if norm is not None and over(norm, self._scenario.clip) else None)

    def _add(self, step: int, micro_batch: MicroBatch, value: int) -> None:
        """Add to the sum of its block or, if sums round in any order, to the worker's one sum."""
        key = step, Block(self._seat.replica, 0) if self._scenario.rounds else self._blocks.of(micro_batch)
        self._sums[key] = added(self._sums.get(key, 0), value, self._scenario.ordered)
