"""Boundary tensors that stay until the commit, and what a budget lets go."""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.ids import MicroBatch
from recycle_plugin.runtime.kept import Kept

BYTES = 40  # of a tensor below


def act(index: int, step: int = 7) -> Datum:
    return Datum("act", 0, MicroBatch(0, index), step)


def tensors(value: float = 0.0) -> tuple[torch.Tensor, ...]:
    return (torch.full((10,), float(value)),)


def filled(budget_bytes: int | None, sent: int, waiting: int = 0) -> Kept:
    """``sent`` tensors that have been sent, then ``waiting`` ones that have not."""
    kept = Kept(budget_bytes)
    for index in range(sent + waiting):
        kept.put(act(index), tensors(index))
        if index < sent:
            kept.sent(act(index), kept.get(act(index)))
    return kept


def test_without_a_budget_everything_stays_until_its_step_is_committed():
    kept = filled(None, 5)
    kept.put(act(0, step=8), tensors())
    assert kept.promise() == {*map(act, range(5)), act(0, step=8)}
    assert (kept.peak_bytes, kept.dropped) == (6 * BYTES, 0)
    kept.drop(7)
    assert kept.promise() == {act(0, step=8)} and kept.peak_bytes == 6 * BYTES


@pytest.mark.parametrize("budget_bytes, stay", [(1, 0), (BYTES - 1, 0), (BYTES, 1), (3 * BYTES + 1, 3), (5 * BYTES, 5)])
def test_past_the_budget_the_oldest_go(budget_bytes, stay):
    kept = filled(budget_bytes, 5)
    assert kept.promise() == set(map(act, range(5 - stay, 5))) and kept.dropped == 5 - stay
    assert all(kept.get(datum)[0][0] == datum.micro_batch.index for datum in kept.promise())


def test_what_has_not_been_sent_stays_whatever_the_budget():
    kept = filled(1, sent=0, waiting=3)
    assert kept.promise() == set(map(act, range(3))) and kept.dropped == 0
    kept.sent(act(1), kept.get(act(1)))
    assert kept.promise() == {act(0), act(2)} and kept.dropped == 1


def test_what_is_made_again_takes_the_old_ones_place():
    kept = filled(2 * BYTES, 2)
    kept.put(act(0), tensors(9.0))
    assert kept.get(act(0))[0][0] == 9.0 and kept.peak_bytes == 2 * BYTES
    kept.put(act(2), tensors())
    kept.sent(act(2), kept.get(act(2)))
    assert kept.promise() == {act(0), act(2)}, "the first is not sent any more, so the second is the oldest that is"


def test_what_peers_have_been_told_of_stays_until_it_is_sent_once_more():
    """What was waiting takes the room of what was sent before, and recovery sends both, in any order."""
    kept = filled(2 * BYTES, sent=2, waiting=1)
    assert kept.promise() == set(map(act, range(3)))
    for index in (1, 2, 0):
        kept.sent(act(index), kept.get(act(index)))
    assert kept.promise() == {act(2), act(0)} and kept.dropped == 1


def test_it_is_the_copy_that_was_sent_and_no_graph():
    kept, made = Kept(None), torch.ones(10, requires_grad=True) * 2
    kept.put(act(0), (made,))
    assert not kept.get(act(0))[0].requires_grad
    copy = (made.detach().clone(),)
    kept.sent(act(0), copy)
    assert kept.get(act(0)) is copy


def test_a_commit_makes_room():
    kept = filled(2 * BYTES, 2)
    kept.drop(7)
    kept.put(act(5, step=8), tensors())
    kept.sent(act(5, step=8), kept.get(act(5, step=8)))
    assert kept.promise() == {act(5, step=8)} and kept.dropped == 0
