"""The plugin's own sums go in pieces, of which a bounded number is under way; two or three real processes over Gloo.

Pieces are of 100 numbers here.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.runtime.collectives import gloo, staging
from recycle_plugin.runtime.collectives.link import AllReduce, Handle
from tests.support.results import DIED
from tests.support.scenario import Script, run

PIECE, NUMBERS = 100, 1050
REDUCE = Instruction(Op.REDUCE, 0, None, 1)


class Watch:
    """Bytes of sums that this process has handed to Gloo and not had back: now, and at most."""

    def __init__(self) -> None:
        staging.HOST_PIECE = PIECE
        self.started = self.now = self.most = 0
        begin = gloo.GlooLink._begin

        def watched(link: gloo.GlooLink, operation: gloo.Operation, handle: Handle) -> None:
            assert isinstance(operation, AllReduce)
            size = sum(tensor.nbytes for tensor in operation.tensors)
            self.started, self.now = self.started + 1, self.now + size
            self.most = max(self.most, self.now)
            handle.when_over(lambda: self._over(size))
            begin(link, operation, handle)

        gloo.GlooLink._begin = watched

    def _over(self, size: int) -> None:
        self.now -= size


def summed(script: Script) -> tuple[bool, int, int, int]:
    dist.all_reduce(script.value())
    watch, own = Watch(), torch.arange(float(NUMBERS)) + script.rank
    with script.session.thread.at_work(REDUCE):
        dist.all_reduce(own)
    return torch.equal(own, 2 * torch.arange(float(NUMBERS)) + 1), watch.started, watch.most, watch.now


def test_no_more_than_four_pieces_of_a_sum_are_under_way():
    for right, started, most, left in run(summed, 2):
        assert right and started == 11 and left == 0
        assert 4 * PIECE < most <= 4 * PIECE * staging.UNDER_WAY, "several at once, and not all of them"


def into(script: Script) -> tuple[bool, int, list[int]]:
    """A mean of three parts, of which one is not contiguous, another is of two pieces and more."""
    dist.all_reduce(script.value())
    watch, numbers = Watch(), torch.arange(float(NUMBERS)) + script.rank
    parts = [numbers[:40].view(4, 10).t(), numbers[40:47], numbers[47:]]
    flat, kept = torch.full((NUMBERS,), -1.0), [part.clone() for part in parts]
    lengths, finish = [], staging.Flight.finish
    staging.Flight.finish = lambda *given: [lengths.append(int((flat != -1.0).sum())), finish(*given)]
    dist.group.WORLD.sum_into(flat, parts, 0.5)
    expected = torch.cat([part.reshape(-1) for part in parts]) - script.rank + 0.5
    right = torch.equal(flat, expected) and all(map(torch.equal, parts, kept))
    return right, watch.started, lengths


def test_each_piece_of_a_sum_is_on_its_way_before_the_next_is_copied():
    for right, started, lengths in run(into, 2):
        assert right and started == 11 and lengths[0] < NUMBERS == lengths[-1]
        assert lengths[0] == 547, "while four are under way, what the fifth needs, in parts of 100"


def torn(script: Script) -> list[float]:
    """Rank 2 dies when it has begun four of eleven pieces; the others sum what they have once more."""
    Watch()
    contribution, script.session.hooks.between_steps = script.value(NUMBERS), None  # which is so in a step
    with script.session.thread.at_work(REDUCE):
        dist.all_reduce(contribution.clone())
        if script.rank == 2:
            staging.Flight.finish = lambda *given: script.die()
        try:
            dist.all_reduce(contribution.clone())
        except Interrupted:
            script.recover()
        total = contribution.clone()
        dist.all_reduce(total)
    return total.unique().tolist()


def test_a_sum_whose_pieces_are_under_way_at_a_loss_is_made_again():
    assert run(torn, 3, loses=True) == [[3.0], [3.0], DIED]


@pytest.mark.parametrize("through_host", (True, False))
def test_a_sum_of_no_numbers_has_no_piece(through_host):
    """Also on an accelerator, whose pieces go through host memory; a stage may have a parameter without numbers."""
    flat = torch.zeros(0)
    assert list(staging._cut(flat, (), "a sum", through_host)) == []
    assert list(staging._cut(flat, (torch.zeros(0, 3),), "a sum", through_host)) == []
