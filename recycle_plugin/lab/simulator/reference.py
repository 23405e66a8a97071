"""A reference of what training comes to, worked out directly, in code that shares nothing with what it checks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.arithmetic import PRIME, added, clipped, divided, rate, sampled, scaled
from recycle_plugin.lab.simulator.arithmetic import share as share_of_norm

Data = Callable[[MicroBatch], tuple[int, int]]  # input and label of each micro-batch of a step


class Reference:
    """The run without a failure, as far as followed: weights before each step, and the last stage's losses."""

    def __init__(
        self,
        shape: Topology,
        weights: tuple[int, ...],
        clip: float = 0.0,
        block: int | None = 1,
        shards: int = 1,
        by_hand: bool = False,
    ) -> None:
        """Begin with ``weights``, one per stage. ``block``: as in core.vocabulary.plan.Policy. ``shards``: of each
        stage, all alike. ``by_hand``: the script sets the learning rate.
        """
        self._shards, self._by_hand = shards, by_hand
        self._shape, self._clip, self._exact, self._block = shape, clip, block != 1, block or shape.micro_batches
        self.weights = {1: weights}
        self.losses: dict[int, dict[str, int]] = {}

    def follow(self, step: int, data: Data | None = None, replicas: Collection[int] | None = None) -> None:
        """Train ``step`` with ``data`` or arithmetic.sampled. ``replicas``: whose micro-batches it has; None: all."""
        share = LiveShare(self._shape.replicas if replicas is None else len(replicas), self._shape.replicas)
        addressed = data or partial(sampled, step=step)
        # by stage, in the micro-batches' order
        gradients: list[list[int]] = [[] for _ in range(self._shape.stages)]
        weights, losses = self.weights[step], {}
        for micro_batch in self._shape.batch:
            if replicas is not None and micro_batch.replica not in replicas:
                continue
            inputs, label = self._forward(weights, addressed(micro_batch))
            gradient = losses[str(micro_batch)] = (inputs[-1] - label) % PRIME
            for stage in reversed(range(len(weights))):
                gradients[stage].append(gradient * inputs[stage] % PRIME)
                gradient = gradient * (weights[stage] + 2 * inputs[stage]) % PRIME
        updates = self._clipped(*self._over_ties([divided(self._sum(values), share) for values in gradients]))
        self.losses[step] = losses
        self.weights[step + 1] = tuple(
            (weight - scaled(rate(step, self._by_hand), share) * update) % PRIME
            for weight, update in zip(weights, updates)
        )

    def loss(self, step: int, data: tuple[int, int]) -> int:
        """Return the loss of one micro-batch with the weights before ``step``."""
        inputs, label = self._forward(self.weights[step], data)
        return (inputs[-1] - label) % PRIME

    @staticmethod
    def _forward(weights: tuple[int, ...], data: tuple[int, int]) -> tuple[list[int], int]:
        """Return ([each stage's input, the last output], label)."""
        inputs = [data[0]]
        for weight in weights:
            inputs.append((weight * inputs[-1] + inputs[-1] ** 2) % PRIME)
        return inputs, data[1]

    def _over_ties(self, sums: list[int]) -> tuple[list[int], list[bool]]:
        """Return the sums that each stage applies, and whether each counts in the norm."""
        counted = [True] * len(sums)
        for first, *others in self._shape.ties:
            total = added(0, sums[first], self._exact)
            for stage in others:
                total, counted[stage] = added(total, sums[stage], self._exact), False
            for stage in (first, *others):
                sums[stage] = total
        return sums, counted

    def _sum(self, values: list[int]) -> int:
        """Return the sum of the values, block by block."""
        total, micro_batches = 0, self._shape.micro_batches
        for replica in range(0, len(values), micro_batches):
            for begin in range(replica, replica + micro_batches, self._block):
                part = 0
                for value in values[begin : min(begin + self._block, replica + micro_batches)]:
                    part = added(part, value, self._exact)
                total = added(total, part, self._exact)
        return total

    def _clipped(self, gradients: list[int], counted: list[bool]) -> list[int]:
        """Return the gradients clipped as by a worker that waits for all shares of the norm before it steps."""
        norm = (
            self._shards * sum(share_of_norm(gradient) for gradient, counts in zip(gradients, counted) if counts)
        ) ** 0.5
        if not self._clip or norm + 1e-6 <= self._clip:
            return gradients
        return [clipped(gradient, norm) for gradient in gradients]
