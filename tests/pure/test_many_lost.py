"""Among many members, losses that come together are told together, and none costs a look at all others."""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator import generations
from recycle_plugin.core.coordinator.facts.output import WORKERS
from recycle_plugin.core.coordinator.facts.regrouping import Regrouping
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.switchboard import Switchboard
from recycle_plugin.core.messages.from_coordinator import Generation, Resume
from recycle_plugin.core.messages.from_workers import Exited, Hello, Leaving, Left, SurvivorReport
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.lab.simulator import campaign
from tests.support.control_cost import STAGES, instructions, job

REPLICAS = generations.MANY // STAGES + 4
LOST = range(8, 16)


def told(outputs) -> list[object]:
    return [message for output in outputs for whom, message in output.messages if whom == WORKERS]


def lose(membership: Membership, ranks) -> list[object]:
    return told([membership.receive(Exited(rank, -9, 2.0), 2.0) for rank in ranks])


def test_losses_that_come_together_make_two_generations():
    membership = job(REPLICAS)
    first = lose(membership, LOST)
    assert [len(each.members) for each in first] == [REPLICAS * STAGES - 1]
    (second,) = told([membership.tick(2.0 + TICK_S)])
    assert isinstance(second, Generation) and not second.roster.ranks & set(LOST)
    assert second.number == first[0].number + 1 and len(second.members) == REPLICAS * STAGES - len(LOST)
    assert second.cause == "loss of 2.1; loss of 2.2; loss of 2.3; 4 more"
    assert not told([membership.tick(2.0 + 2 * TICK_S)])


def test_leaves_that_come_together_make_two_planned_generations():
    membership = job(REPLICAS)
    (first,) = told([membership.receive(Leaving(rank, "asked"), 2.0) for rank in LOST])
    (second,) = told([membership.tick(2.0 + TICK_S)])
    assert first.from_step == second.from_step and len(first.members) - len(second.members) == len(LOST) - 1
    assert not told([membership.tick(2.0 + 2 * TICK_S)])


def test_among_few_each_loss_is_told_at_once():
    assert len(lose(job(8), LOST)) == len(LOST)


def test_nobody_goes_on_in_a_generation_that_has_lost_another_member():
    membership = job(REPLICAS)
    lose(membership, LOST[:2])
    number = membership.generation
    survivors = sorted(membership.roster.ranks)
    for generation in (number, number + 1):
        said = [membership.receive(SurvivorReport(rank, generation, 1, "plan"), 2.0) for rank in survivors]
        resumed = [each for each in told(said) if isinstance(each, Resume)]
        assert len(resumed) == (generation > number)
        if generation == number:
            membership.tick(2.0 + TICK_S)
    assert membership.state.regrouping.in_force == number + 1


def test_a_loss_costs_the_same_among_more():
    def costs(replicas: int) -> int:
        membership = job(replicas)
        lose(membership, [5])
        return instructions(lambda: lose(membership, [9]))

    few, many = costs(REPLICAS), costs(3 * REPLICAS)
    assert many - few < 20 * 2 * REPLICAS * STAGES  # its own stage's members are looked at, a few times


def test_the_end_of_a_script_costs_the_same_among_more():
    def costs(replicas: int) -> int:
        membership = job(replicas)
        membership.receive(Left(0, 0, False, 2), 2.0)
        assert membership.state.ending.ended is None
        return instructions(lambda: membership.receive(Left(6, 0, False, 2), 2.0))

    assert costs(REPLICAS) == costs(3 * REPLICAS)


def test_a_supervisor_that_goes_costs_the_same_among_more():
    def costs(ranks: int) -> int:
        board = Switchboard(ranks, "job", 0.0)
        numbers = [board.opened(Hello(rank, "supervisor", rank, "host"), "it", 0.0, Effects()) for rank in range(ranks)]
        return instructions(lambda: board.closed(numbers[3], 1.0, Effects()))

    assert costs(8) == costs(64)


@pytest.mark.parametrize("run", [campaign.run_seed, campaign.run_takeover], ids=["losses", "takeovers"])
def test_the_campaign_finds_nothing_where_losses_are_put_off(run, monkeypatch):
    put_off = []
    publish = Regrouping.put_off
    monkeypatch.setattr(generations, "MANY", 2)
    monkeypatch.setattr(Regrouping, "put_off", lambda self, cause: (put_off.append(cause), publish(self, cause)))
    assert [seed for seed in range(40, 70) if run(seed).violations] == []
    assert put_off
