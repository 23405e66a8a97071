"""Scripts that call os._exit(0) between two steps: where all are through it is their end, and a loss in mid-job."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from recycle_plugin.core.coordinator import departures, handlers, vanishing
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.from_coordinator import Over
from recycle_plugin.core.messages.from_workers import BarrierReached, Exited, Heartbeat, Left, Vanishing
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.drawn_troubles import CALM_US
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario, Trouble
from recycle_plugin.lab.simulator.seeded import scenario
from tests.support.membership import said, started, step
from tests.support.replaying import decisions, logging

SEEDS = 4


def vanish(membership, *ranks: int) -> list[CoordinatorOutput]:
    """Their scripts do so after step 2, and their processes are gone."""
    outs = []
    for rank in ranks:
        outs.append(membership.receive(Vanishing(rank, 2), 1.0))
        outs.append(membership.connection_lost(WorkerId(rank), 1.0))
        outs.append(membership.receive(Exited(rank, 0, 1.0), 1.0))
    return outs


def told(outs: list[CoordinatorOutput]) -> list[str]:
    return [event.kind for out in outs for event in out.events]


def trained(log: bool):
    if log:
        return logging()
    membership = started()
    for number in (1, 2):
        step(membership, 0, number)
    return membership


@pytest.mark.parametrize("log", (False, True))
def test_where_all_vanish_after_the_same_step_the_job_has_come_to_its_end(log):
    outs = vanish(trained(log), 3, 0, 2, 1)
    assert [message for out in outs for message in said(out, Over)] == [Over(0)]
    assert not {"lost", "end", "recovery"} & {*told(outs)} and told(outs).count("left") == 4
    assert outs[-3].events[-1].text == "all workers have left after step 2"


def test_some_may_end_otherwise():
    membership = trained(False)
    outs = vanish(membership, 3, 0)
    assert not told(outs)
    outs.append(membership.receive(Left(2, 0, False, 2), 1.0))
    assert told(outs) == ["left"] * 3
    outs += vanish(membership, 1)
    assert told(outs)[-2:] == ["left", "finished"]


@pytest.mark.parametrize("how", ("a step", "a wait", "a loss"))
def test_where_others_go_on_it_is_a_loss(how):
    membership = trained(False)
    outs = vanish(membership, 3)
    membership.receive(Heartbeat(0, 1, 1, Activity(WAITS, "others"), 2), 1.0)
    assert not told(outs)
    if how == "a step":
        outs.append(membership.receive(Heartbeat(0, 2, 1, Activity(WAITS, "others"), 3), 1.0))
    elif how == "a wait":
        for beat in range(2, 20):
            now = 1.0 + beat / 4
            outs += [
                membership.receive(Heartbeat(rank, beat, 1, Activity(WAITS, "others"), 2), now) for rank in range(3)
            ]
            outs.append(membership.tick(now))
    else:
        outs.append(membership.receive(Exited(0, -9, 1.0), 1.0))
    lost = [event.details["rank"] for out in outs for event in out.events if event.kind == "lost"]
    assert sorted(lost) == ([0, 3] if how == "a loss" else [3])
    assert "confirmed" in told(outs) and 3 not in {member.rank for member in membership.roster}


def test_the_only_worker_of_a_stage_that_vanishes_in_mid_job_is_a_loss_that_is_replayed():
    membership = logging(replicas=1, stages=4)
    outs = vanish(membership, 3)
    assert not told(outs)
    (decision,) = decisions(membership.receive(Heartbeat(0, 1, 1, Activity(WAITS, "others"), 3), 1.0))
    assert decision.details["way"] == "replay"


def test_who_comes_to_a_barrier_goes_on():
    membership = trained(False)
    outs = vanish(membership, 3)
    outs.append(membership.receive(BarrierReached(0, 0, Barrier(Meets.SCRIPT, "saving"), {}), 1.0))
    assert not said(outs[-1], Over)
    outs.append(membership.receive(Heartbeat(0, 2, 1, Activity(WAITS, "others"), 3), 1.0))
    assert "lost" in told(outs)


# --- simulated ----------------------------------------------------------------------------------------

CALM = replace(campaign.LOSS.job, faults=(), steps=6)  # three replicas of four stages
ONE = replace(CALM, troubles=(Trouble("vanish", 300 * MILLISECOND, (Seat(1, 2),)),))


def kinds(outcome: campaign.ScenarioOutcome) -> list[str]:
    return [line.split("ms  ")[1].partition(":")[0] for line in outcome.story if "ms  " in line]


def test_all_that_vanish_behind_the_last_step_are_through():
    outcome = campaign.run("x", replace(CALM, troubles=(Trouble("vanish", 0, tuple(CALM.shape.seats)),)))
    assert not outcome.violations and kinds(outcome).count("left") == 12 and "lost" not in kinds(outcome)


def test_one_that_vanishes_in_mid_job_is_lost_and_the_others_train_on():
    outcome = campaign.run("x", ONE)
    assert not outcome.violations and kinds(outcome).count("lost") == 1 and "finished" in kinds(outcome)


@pytest.mark.parametrize("mistake", ("that is always an end", "nobody sees that others go on"))
def test_a_mistake_is_found(monkeypatch, mistake):
    if mistake == "that is always an end":

        def vanish(state: JobState, message: Vanishing) -> None:
            departures.goodbye(state, Left(message.rank, 0, False, message.step))

        monkeypatch.setitem(handlers.OF_MEMBERS, Vanishing, vanish)
    else:
        monkeypatch.setattr(vanishing, "_goes_on", lambda state, worker: False)
    assert campaign.run("x", ONE).violations


def with_vanishing(seed: int) -> Scenario:
    """Return a seed's scenario in which scripts vanish, at the end or any time; every second has no other trouble."""
    given, random = scenario(seed), Random(f"vanishing in {seed}")
    if random.random() < 0.5:
        given = replace(given, troubles=(), faults=(), heavy=())
    seats = given.shape.seats
    at = 0 if random.random() < 0.7 else random.randrange(1, CALM_US // 2)
    most = len(seats) - (at > 0)  # if all vanish in mid-job, the job ends
    some = tuple(seats) if not at and random.random() < 0.5 else tuple(random.sample(seats, random.randint(1, most)))
    return replace(given, troubles=(*given.troubles, Trouble("vanish", at, some)), pushes=False)


def test_drawn_jobs_in_which_scripts_vanish():
    for seed in range(SEEDS):
        outcome = campaign.run(f"seed {seed}", with_vanishing(seed))
        assert not outcome.violations, (seed, outcome.faults, outcome.violations)
