"""The virtual world with exact numbers: integers modulo a prime, so that sums don't depend on their order.

Stage p with weight w maps x to w x + x^2; the loss is half the squared difference to the label. Neither is linear, so a
wrong stash, stale parameters, or a dropped or doubled micro-batch change the weights. In exact jobs
(core/vocabulary/blocks.py) sums do depend on their order, as floating-point sums do.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, NamedTuple

from recycle_plugin.core.coordinator.facts.step_validation import over
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers, provides
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import Draw
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.lab.simulator.virtual import VirtualState, VirtualWorld

PRIME = 2**61 - 1


class ExactStash(NamedTuple):
    """What an F leaves: its input, the last stage's loss, and the version of its weights (lab/simulator/numbers.py)."""

    x: int
    loss: int | None
    weights: int = 0


class Batch(NamedTuple):
    """A batch of an iterator: input and label. ``draw``: which call gave it in its step (None in an evaluation).
    ``number``: its place in the iterator, from 1. ``iterator``: which iterator of the script.
    """

    data: tuple[int, int]
    draw: Draw | None = None
    number: int = 0
    iterator: int = 1

    @property
    def drawn(self) -> Draw:
        """The draw of a step's batch; AssertionError for a batch of an evaluation."""
        assert self.draw is not None, "it is read for an evaluation"
        return self.draw


class Sample(NamedTuple):
    """Sample ``number``, from 1, of those that a replica's scripts draw, the same on all its ranks."""

    replica: int
    number: int

    @property
    def data(self) -> tuple[int, int]:
        return sampled(MicroBatch(self.replica, self.number), 0)

    def __str__(self) -> str:
        return f"sample {self.number} of replica {self.replica}"


LEARNING_RATE = 1_000_003


def rate(step: int, by_hand: bool) -> int:
    """Return the learning rate of ``step``; ``by_hand``: the script sets one for each."""
    return LEARNING_RATE + 1000 * (step % 5) * by_hand


def divided(total: int, share: LiveShare) -> int:
    """Return a sum divided by the share of the replicas that contributed."""
    return total * share.total * pow(share.live, -1, PRIME) % PRIME


def scaled(rate: int, share: LiveShare) -> int:
    """Return the learning rate scaled for the contributing share: any number that differs for each share."""
    return rate if share.whole else rate * (share.live + 7 * share.total) % PRIME


def sample(micro_batch: MicroBatch, step: int, salt: int) -> int:
    """Return the input (``salt`` 1) or label (2) of a micro-batch: any number, different for each."""
    return pow(1 + salt + 5 * micro_batch.index + 1009 * micro_batch.replica + 1_000_033 * step, 7, PRIME)


def sampled(micro_batch: MicroBatch, step: int) -> tuple[int, int]:
    """Return the input and the label of a micro-batch in ``step``."""
    return sample(micro_batch, step, 1), sample(micro_batch, step, 2)


def added(total: int, value: int, exact: bool) -> int:
    """Return the sum of two numbers. In exact mode any other order or grouping gives another result."""
    return (31 * total + value + 1) % PRIME if exact else (total + value) % PRIME


def share(reduced: int) -> float:
    """Return a stage's share of a stand-in for the norm: it differs between steps, and is sometimes infinite."""
    return inf if reduced % 23 == 0 else float(reduced % 1009)


def clipped(reduced: int, norm: float | None) -> int:
    """Return the applied part of a gradient: all without ``norm``, 0 if that is not finite, else some other number."""
    return reduced if norm is None else reduced * (2 + int(1000 * norm)) % PRIME if isfinite(norm) else 0


def over_tie(by_stage: Mapping[int, int], exact: bool) -> int:
    """Return the sum over the stages that share a weight, in their order."""
    total = 0
    for stage in sorted(by_stage):
        total = added(total, by_stage[stage], exact)
    return total


def compute(
    instruction: Instruction,
    have: StepStore,
    stages: int,
    tied: bool = False,
    limit: float = 0.0,
    rate: int = LEARNING_RATE,
) -> dict[Datum, Any]:
    """Return the data that ``instruction``, other than REDUCE or TIE, makes of a worker's data. ``tied``: the stage
    shares its weight. ``limit``: of the norm. ``rate``: of a STEP.
    """
    stage, micro_batch, step = instruction.stage, instruction.micro_batch, instruction.step
    params = have.get(Datum("params", stage, None, step)) if step >= 0 else _latest(have)

    def here(kind: str) -> Datum:
        return Datum(kind, stage, micro_batch, step)

    match instruction.op:
        case Op.LOAD:
            drawn = have.get(here("drawn"))
            return {here("data"): drawn.data if drawn is not None else sampled(instruction.works_on, step)}
        case Op.F:
            x = have[here("data")][0] if stage == 0 else have[Datum("act", stage - 1, micro_batch, step)]
            made = (params * x + x * x) % PRIME
            loss = (made - have[here("data")][1]) % PRIME if stage == stages - 1 else None
            return {here("act"): made, here("stash"): ExactStash(x, loss)}
        case Op.I | Op.B:
            x, loss, _ = have[here("stash")]
            incoming = loss if loss is not None else have[Datum("grad", stage + 1, micro_batch, step)]
            grad = {here("grad"): incoming * (params + 2 * x) % PRIME}
            return grad | (
                {here("inner"): (x, incoming)} if instruction.op is Op.I else {here("wgrad"): incoming * x % PRIME}
            )
        case Op.W:
            x, incoming = have[here("inner")]
            return {here("wgrad"): incoming * x % PRIME}
        case Op.STEP:
            gradient = have[here("tied" if tied else "reduced")]
            norm = have.get(here("norm"))
            update = clipped(gradient, norm if norm is not None and over(norm, limit) else None)
            return {Datum("params", stage, None, step + 1): (params - rate * update) % PRIME}
        case _:
            return dict.fromkeys(provides(instruction))


def _latest(have: StepStore) -> int:
    """Return the weights that an evaluation uses."""
    return max((datum.step, have[datum]) for datum in have if datum.kind == "params")[1]


class ExactWorld(VirtualWorld):
    """A virtual world with exact numbers. A seat's parameters are one number, equal within a stage and within a tie."""

    def contribute(self, seat: Seat, instruction: Instruction) -> tuple[bool, int]:
        """Return the part of ``seat`` in a REDUCE or TIE: whether that is its stage's whole sum, and the number."""
        reduced = Datum("reduced", instruction.stage, None, instruction.step)
        if reduced in self.store[seat]:
            return True, self.store[seat][reduced]
        return False, sum(self.store[seat].of("wgrad", instruction.step).values())

    def compute(self, seat: Seat, instruction: Instruction) -> dict[Datum, Any]:
        """Return the data that ``instruction`` makes at ``seat``, with its numbers."""
        if instruction.op is Op.TIE:
            parts = {peer.stage: total for peer, (_, total) in self.contributions(self.joint(instruction)).items()}
            return {Datum("tied", instruction.stage, None, instruction.step): over_tie(parts, exact=False)}
        if instruction.op is not Op.REDUCE:
            return compute(
                instruction, self.store[seat], self.plan.stages, bool(self.plan.view.topology.tie(seat.stage))
            )
        brought = [
            each
            for peer, each in self.contributions(self.joint(instruction)).items()
            if peer.stage == instruction.stage
        ]
        whole = [value for is_whole, value in brought if is_whole]
        reduced = whole[0] if whole else sum(value for _, value in brought) % PRIME
        return {Datum("reduced", instruction.stage, None, instruction.step): reduced}

    def final(self) -> dict[Seat, int]:
        """Return the weight of every live seat after the last step."""
        return {seat: have[of_layers("params", seat, self.steps.stop)] for seat, have in sorted(self.store.items())}


def train(plan: Plan, costs: CostModel, weights: tuple[int, ...], steps: int = 1, step: int = 0) -> dict[Seat, int]:
    """Return the weight of every live seat after ``steps`` steps of ``plan`` from ``weights`` (one per stage)."""
    world = ExactWorld(
        plan,
        costs,
        steps,
        step,
        state=VirtualState.fresh(plan, step, {seat: weights[seat.stage] for seat in plan.programs}),
    )
    world.run()
    return world.final()
