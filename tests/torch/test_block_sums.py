"""The sum over blocks: bit for bit that of a plain loop in the blocks' order, whoever has them and however many workers
there are.
"""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.runtime.stage import block_sums
from recycle_plugin.runtime.stage.block_sums import fixed_order_sum
from tests.support.threads import Threads
from tests.support.waiting import together

BLOCKS = [Block(replica, number) for replica in range(3) for number in range(2)]


def summed(values: dict[Block, torch.Tensor], owners: list[list[Block]]) -> list[torch.Tensor]:
    threads = Threads(len(owners))

    def work(position: int) -> torch.Tensor:
        mine = {block: values[block] for block in owners[position]}
        return fixed_order_sum(mine, owners, torch.empty_like(values[BLOCKS[0]]), threads.member(position))

    return together(work, range(len(owners)))


def in_order(values: dict[Block, torch.Tensor], order: list[Block]) -> torch.Tensor:
    result = values[order[0]].clone()
    for block in order[1:]:
        result += values[block]
    return result


OWNERS = {
    "each its own": [BLOCKS[:2], BLOCKS[2:4], BLOCKS[4:]],
    "one has all": [BLOCKS],
    "one has none": [BLOCKS[3:], [], BLOCKS[:3]],
    "mixed": [[BLOCKS[5], BLOCKS[0]], [BLOCKS[4], BLOCKS[2], BLOCKS[1]], [BLOCKS[3]], []],
}


@pytest.mark.parametrize("length", (1, 3, 1000))
@pytest.mark.parametrize("owners", OWNERS)
def test_bits_do_not_depend_on_who_has_which_block(owners, length, monkeypatch):
    monkeypatch.setattr(block_sums, "SUM_PIECE", 300)
    generator = torch.Generator().manual_seed(length)
    values = {
        block: torch.randn(length, generator=generator) * 10 ** torch.randn(length, generator=generator)
        for block in BLOCKS
    }
    before = {block: value.clone() for block, value in values.items()}
    expected = in_order(values, BLOCKS)
    assert all(torch.equal(result, expected) for result in summed(values, OWNERS[owners]))
    assert all(torch.equal(values[block], before[block]) for block in BLOCKS), "contributions have to stay as they are"
    if length == 1000:
        assert not torch.equal(in_order(values, BLOCKS[::-1]), expected), "otherwise any order would do"
