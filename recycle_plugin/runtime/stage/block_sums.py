"""Exact mode's weight gradients: a sum for each block (core/vocabulary/blocks.py), and the total in block order.

The total costs what an all-reduce does: every worker gets one slice of all blocks, adds it up, and sends the result to
all. Each element is added in the same order wherever the slices are cut. So the bits depend neither on which worker has
which block nor on the number of workers. Contributions are only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Protocol, TypeVar

import torch

from recycle_plugin.core.vocabulary.blocks import Block, Blocks
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.worker_bytes import SUM_PIECE
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import on_host
from recycle_plugin.runtime.devices.kinds import device_of, write
from recycle_plugin.runtime.devices.pieces import on_the_host
from recycle_plugin.runtime.stage.gradient_store import GradientStore, Slots, empty, swapped

Part = TypeVar("Part", Block, int)  # of a sum


class SumGroup(Protocol):
    """The live workers of one stage or several (runtime.collectives.group.MemberGroup)."""

    def live_position(self) -> tuple[int, int]:
        """Return this worker's position among them, and their number."""

    def exchange(self, target: torch.Tensor, source: torch.Tensor, incoming: list[int], outgoing: list[int]) -> None:
        """Send each live worker its part of ``source``, and write what each sends to ``target``, both in their order.
        Both are 1-D; ``outgoing`` and ``incoming`` are the lengths of the parts.
        """


class Alone:
    """The group of a worker that has all of a stage's contributions by itself."""

    def live_position(self) -> tuple[int, int]:
        """Return 0, 1: the only worker."""
        return 0, 1

    def exchange(self, target: torch.Tensor, source: torch.Tensor, incoming: list[int], outgoing: list[int]) -> None:
        """Copy the worker's own part."""
        target.copy_(source)


ALONE = Alone()


class BlockSums:
    """The weight gradients of one step that this worker has contributed, summed by block (exact mode). ``gradients``:
    where a backward adds to one of these sums.
    """

    def __init__(self, gradients: GradientStore, blocks: Blocks) -> None:
        self._gradients, self._blocks = gradients, blocks
        self._sums: dict[Block, Slots] = {}
        self._counts: dict[Block, int] = {}

    @contextmanager
    def adding(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Return a context in which gradients are added to the sum of the block of ``micro_batch``. Raises
        AssertionError if it is not the micro-batch's turn in its block.
        """
        block = self._blocks.of(micro_batch)
        count = self._counts.get(block, 0)
        if count != micro_batch.index % self._blocks.size:
            raise AssertionError(
                f"the weight gradient of micro-batch {micro_batch} is not in its turn: its block has {count} so far"
            )
        with swapped(self._gradients, self._sums.setdefault(block, empty(self._gradients))):
            yield
        self._counts[block] = count + 1

    def resize(self, blocks: Blocks) -> None:
        """Use the blocks of steps with another number of micro-batches, and drop all sums."""
        self.clear()
        self._blocks = blocks

    def clear(self) -> None:
        self._sums, self._counts = {}, {}

    def of(self, block: Block) -> Slots:
        """Return the complete sum of ``block``, per parameter; None if a parameter got nothing."""
        return self._sums[block]

    def put(self, block: Block, gradients: Slots) -> None:
        """Take the complete sum of ``block`` from another worker. Raises RecycleError if it is here already."""
        if block in self._sums:
            raise RecycleError(f"the weight gradients of block {block} would be counted twice: a mistake of the plugin")
        self._sums[block], self._counts[block] = gradients, len(self._blocks.members()[block])

    def owners(self, group: SumGroup) -> list[list[Block]]:
        """Return the blocks of each live worker, by position in ``group``; costs one exchange. Raises RecycleError if a
        block is missing, incomplete, or there twice.
        """
        members, (_, live) = self._blocks.members(), group.live_position()
        mine = torch.tensor([self._counts.get(block, 0) for block in members])
        told = torch.empty(live * len(members), dtype=mine.dtype)
        group.exchange(told, mine.repeat(live), [len(members)] * live, [len(members)] * live)
        counts = told.view(live, -1)
        for block, column in zip(members, counts.T.tolist(), strict=True):
            if max(column) != len(members[block]) or sum(column) != len(members[block]):
                raise RecycleError(
                    f"the block of micro-batches {members[block][0]} to {members[block][-1]} has {column} weight "
                    "gradients on the live workers of a stage, but one worker must have all of them: "
                    "this is a mistake of the plugin; go on from the last checkpoint"
                )
        return [[block for block, count in zip(members, row) if count] for row in counts.tolist()]

    def total(self, places: list[int], owners: list[list[Block]], group: SumGroup) -> torch.Tensor:
        """Return the sum over all blocks of the gradients of the parameters numbered ``places``, concatenated."""
        mine = {
            block: torch.cat([self._gradient(block, place) for place in places])
            for block in owners[group.live_position()[0]]
        }
        parameters = [self._gradients.parameters[place] for place in places]
        length = sum(parameter.numel() for parameter in parameters)
        return fixed_order_sum(mine, owners, parameters[0].new_empty(length), group)

    def _gradient(self, block: Block, place: int) -> torch.Tensor:
        gradient = self._sums[block][place]
        if gradient is None:
            return torch.zeros_like(self._gradients.parameters[place]).view(-1)
        return gradient.reshape(-1)


def fixed_order_sum(
    mine: dict[Part, torch.Tensor], owners: list[list[Part]], result: torch.Tensor, group: SumGroup
) -> torch.Tensor:
    """Fill the 1-D ``result`` with the sum of all workers' blocks (or stages' sums), added in sorted order.

    ``mine``: this worker's, as long as ``result`` and on its device; ``owners``: the parts of each live worker of
    ``group``. Sums are computed on the host. Every worker sends and receives about ``result`` once per part that it
    has, in pieces.
    """
    parts = on_the_host([*mine.values()], SUM_PIECE, "a part of a sum") if mine else repeat(())
    for piece, here in zip(result.split(SUM_PIECE) if result.numel() else (), parts):
        total = piece if on_host(piece) else device_of(piece.device).room(piece.shape, piece.dtype)
        _sum_piece(dict(zip(mine, here)), owners, total, group)
        if total is not piece:
            write(piece, total, "a part of a sum")
    return result


def _sum_piece(mine: dict[Part, torch.Tensor], owners: list[list[Part]], result: torch.Tensor, group: SumGroup) -> None:
    position, live = group.live_position()
    cuts = [result.numel() * part // live for part in range(live + 1)]
    lengths = [end - begin for begin, end in zip(cuts, cuts[1:])]
    here = lengths[position]
    parts = [mine[block][begin:end] for begin, end in zip(cuts, cuts[1:]) for block in sorted(mine)]
    sent = next(iter(mine.values())) if len(mine) == 1 else torch.cat(parts) if parts else result.new_empty(0)
    received = result.new_empty(here * sum(map(len, owners)))
    group.exchange(
        received, sent, [here * len(theirs) for theirs in owners], [length * len(mine) for length in lengths]
    )
    rows = zip(
        [block for theirs in owners for block in sorted(theirs)],
        received.view(-1, here) if here else [received] * sum(map(len, owners)),
    )
    first, *others = [row for _, row in sorted(rows, key=lambda row: row[0])]
    for row in others:
        first += row
    group.exchange(result, first.repeat(live), lengths, [here] * live)
