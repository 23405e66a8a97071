"""Blocks: the units in which exact mode adds gradients, so that a sum has the same bits whichever workers compute it.

Floating-point sums depend on their order. A *block* is a run of consecutive micro-batches of one logical replica on one
stage (by default all of them). One worker runs the whole block and adds its weight gradients in ascending order,
starting from nothing. Then the blocks' sums are added in the order of the blocks. Neither order depends on workers. A
larger block leaves routing less freedom. Each block beyond a worker's first costs a buffer for gradients.

Planning without exact mode uses blocks of one micro-batch, which bind nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.topology import Topology


class Block(NamedTuple):
    """Block ``number`` (from 0) of ``replica``'s micro-batches on one stage. Blocks sort in the order of their sums."""

    replica: int
    number: int


@dataclass(frozen=True)
class Blocks:
    """The blocks of a job of shape ``topology``: ``size`` consecutive micro-batches; a replica's last is the rest."""

    topology: Topology
    size: int

    def of(self, micro_batch: MicroBatch) -> Block:
        return Block(micro_batch.replica, micro_batch.index // self.size)

    def members(self) -> dict[Block, tuple[MicroBatch, ...]]:
        """Return the micro-batches of every block, in the order in which their weight gradients are added."""
        found: dict[Block, list[MicroBatch]] = {}
        for micro_batch in self.topology.batch:
            found.setdefault(self.of(micro_batch), []).append(micro_batch)
        return {block: tuple(members) for block, members in found.items()}

    def shared(self, live: int, limit: int | None) -> tuple[int, int]:
        """Return how many workers help to replay a step of a stage, and the micro-batches of the busiest one. ``live``:
        workers that are left; ``limit``: the most that may help, None for all of them.
        """
        sizes = [len(each) for each in self.members().values()]
        helpers = min(live, len(sizes) - 1, live if limit is None else limit)
        return helpers, sum(sizes[:: helpers + 1])
