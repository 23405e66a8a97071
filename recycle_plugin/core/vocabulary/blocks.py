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
    """Block ``number`` (from 0) of ``replica``'s micro-batches on one stage.  Sorted, blocks are in the order in which
    their sums are added.
    """

    replica: int
    number: int


@dataclass(frozen=True)
class Blocks:
    """The blocks of a job of shape ``topology``: ``size`` consecutive micro-batches each, a replica's last one perhaps
    fewer.
    """

    topology: Topology
    size: int

    def of(self, micro_batch: MicroBatch) -> Block:
        """The block that ``micro_batch`` belongs to."""
        return Block(micro_batch.replica, micro_batch.index // self.size)

    def before(self, micro_batch: MicroBatch) -> MicroBatch | None:
        """The micro-batch whose weight gradient is added to the block's sum right before this one's; None for a block's
        first.
        """
        return MicroBatch(micro_batch.replica, micro_batch.index - 1) if micro_batch.index % self.size else None

    def members(self) -> dict[Block, tuple[MicroBatch, ...]]:
        """The micro-batches of every block, in the order in which their weight gradients are added.  Costs time in
        proportion to the micro-batches of a step.
        """
        found: dict[Block, list[MicroBatch]] = {}
        for micro_batch in self.topology.batch:
            found.setdefault(self.of(micro_batch), []).append(micro_batch)
        return {block: tuple(members) for block, members in found.items()}
