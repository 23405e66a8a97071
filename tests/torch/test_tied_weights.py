"""The gradient of a weight that stages share: the same bits for every copy, whoever is alive, and once in the norm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, Roster
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.stage.clipping import Clipping, TrueNorm
from recycle_plugin.runtime.stage.gradient_store import TorchGradients
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.stage.tied import TiedWeight
from tests.support.threads import Threads
from tests.support.waiting import together

STAGES, REPLICAS = (0, 1, 3), 3
SUMS = {stage: torch.randn(5, 7, generator=torch.Generator().manual_seed(stage)) * 10**stage for stage in STAGES}
EXPECTED = (SUMS[0] + SUMS[1]) + SUMS[3]


def totals(lost: set[Seat]) -> list[torch.Tensor]:
    """What each live worker of the stages gets; ranks go through the replicas of a stage, and stage 2 has nothing to do
    with it.
    """
    seats = [seat for stage in range(4) for seat in (Seat(replica, stage) for replica in range(REPLICAS))]
    members = tuple(Member(rank, seat, "", "") for rank, seat in enumerate(seats) if seat not in lost)
    sharing = [member for member in members if member.seat.stage in STAGES]
    threads = Threads(len(sharing))

    def work(position: int) -> torch.Tensor:
        member = sharing[position]
        view = SimpleNamespace(roster=Roster(members))
        own = SUMS[member.seat.stage].clone()
        weight = TiedWeight("embedding.weight", torch.nn.Parameter(own), STAGES, threads.member(position), view)
        total = weight.total(own)
        assert torch.equal(own, SUMS[member.seat.stage]), "what is brought is only read"
        return total

    return together(work, range(len(sharing)))


@pytest.mark.parametrize(
    "lost",
    [
        set(),
        {Seat(0, 0)},
        {Seat(0, 3), Seat(1, 1), Seat(0, 2)},
        {Seat(replica, stage) for replica in (0, 2) for stage in STAGES},
    ],
    ids=("nobody", "the first stage's first", "one of two stages", "all but one of each"),
)
def test_every_copy_gets_the_same_bits_whoever_is_alive(lost):
    assert not torch.equal((SUMS[3] + SUMS[1]) + SUMS[0], EXPECTED), "the order matters"
    made = totals(lost)
    assert len(made) == REPLICAS * len(STAGES) - len({seat for seat in lost if seat.stage in STAGES})
    assert all(torch.equal(one, EXPECTED) for one in made)


def test_a_single_number_may_be_shared_and_summed_again():
    number, store = torch.nn.Parameter(torch.tensor(2.0)), StepStore(Seat(0, 0), 4)
    weight: Any = SimpleNamespace(parameter=number, name="temperature", total=torch.clone)
    buckets: Any = SimpleNamespace(limit=1)
    gradients = Gradients(buckets, store, TorchGradients([number]), None, [weight])
    store.put(store.of_layers("reduced", 1), [torch.tensor(0.5)])
    store.put(store.of_layers("tied", 1), gradients.tie(1))
    assert gradients.tie(1) == {0: torch.tensor(0.5)}


def test_only_one_stage_counts_it_in_the_norm():
    own, shared = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    own.grad, shared.grad = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([3.0, 4.0])
    shares = [
        Clipping(StepStore(Seat(0, stage), 4), TorchGradients([shared, own]), TrueNorm(elsewhere), 1.0).share()
        for stage, elsewhere in ((0, set()), (3, {shared}))
    ]
    assert shares == pytest.approx([34.0, 9.0])
