"""Blocks: the units in which exact mode adds gradients, so that the sum has the same bits whoever computes.

Floating-point sums depend on their order.  A *block* is so many consecutive micro-batches of one logical replica on one
stage (all of them unless told otherwise).  One worker runs all of it and adds its weight gradients in ascending order,
from nothing; then everybody adds the blocks' sums in the blocks' order.  Neither says who does it.  A larger block
leaves routing less freedom; each block beyond a worker's first takes it one more buffer of the gradients' size.

A block of one micro-batch binds nobody: that is what planning without exact mode amounts to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.topology import Topology


class Block(NamedTuple):
    """The ``number``-th of ``replica``; sorted, blocks are in the order in which their sums are added."""

    replica: int
    number: int


@dataclass(frozen=True)
class Blocks:
    """Of a job of ``topology``: ``size`` micro-batches each, a replica's last one perhaps fewer."""

    topology: Topology
    size: int

    def of(self, micro_batch: MicroBatch) -> Block:
        return Block(micro_batch.replica, micro_batch.index // self.size)

    def before(self, micro_batch: MicroBatch) -> MicroBatch | None:
        """Whose weight gradient is added to the block's sum right before; None: it is the first."""
        return MicroBatch(micro_batch.replica, micro_batch.index - 1) if micro_batch.index % self.size else None

    def members(self) -> dict[Block, tuple[MicroBatch, ...]]:
        """Every block's micro-batches, all in the order of their sum."""
        found: dict[Block, list[MicroBatch]] = {}
        for micro_batch in self.topology.batch:
            found.setdefault(self.of(micro_batch), []).append(micro_batch)
        return {block: tuple(members) for block, members in found.items()}
