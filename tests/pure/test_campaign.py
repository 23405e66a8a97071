"""Recovery under seeded failures: the production code in virtual time, with exact numbers, and checks that would
notice.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from recycle_plugin import cli
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator import campaign, seeded
from recycle_plugin.lab.simulator.exercised import OF_TAKEOVERS, ProtocolRule
from recycle_plugin.lab.simulator.message_delays import UNEVEN
from recycle_plugin.lab.simulator.reference import Reference
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario, Trouble
from tests.mistakes import (  # noqa: F401  add their own
    MISTAKES,
    between,
    confused,
    joining,
    pushing,
    recovering,
    replay,
    shrinking,
    slow,
    suspicion,
    together,
)
from tests.mistakes.recovering import believed_of_many, evaluations_bound_too_low, void_is_not_heard_again

CONFUSED_SEEDS = 8
FOUND_WITHIN = 2000  # seeds, by every mistake, and every rule is needed in one; most need a few
# whose failures need rules that few others do
RARE = (65, 114, 123, 147, 166, 236, 262, 302, 359, 504, 542, 585, 690, 750, 858, 1623)


def assert_clean(report: campaign.CampaignReport) -> None:
    assert not report.violations, "\n".join(
        f"recycle campaign {one.name}: {one.violations}" for one in report.violations
    )


@pytest.mark.timeout(900)  # a whole campaign, on a machine that may do other things beside
def test_random_failures_need_every_rule_and_break_none(request) -> None:
    seeds = request.config.getoption("--campaign-seeds")
    report = campaign.campaign(range(seeds))
    assert_clean(report)
    assert report.seeds == seeds and report.faults > seeds
    assert list(report.exercised) == list(ProtocolRule) and not unneeded(report.exercised, seeds)
    jobs = [seeded.scenario(seed) for seed in range(seeds)]
    assert sum(len(given.troubles) + len(given.faults) > 1 for given in jobs) >= seeds / 3
    assert sum(given.exact for given in jobs) > seeds / 4
    assert (
        min(
            sum(map(bool, each))
            for each in zip(*((given.iterators, given.between, given.rebalances) for given in jobs))
        )
        > seeds / 14
    )
    assert sum(given.pushes for given in jobs) > seeds / 14
    tied = [given for given in jobs if given.shape.ties]
    assert len(tied) > seeds / 5 and report.hits["kill", Op.TIE] >= seeds / 100


def unneeded(exercised: Counter, seeds: int) -> list[str]:
    """Rules that neither these failures nor others need, which are looked for as long as there is such a rule; those of
    takeovers are tests/pure/test_takeovers.py's.
    """
    exercised = Counter({rule: count for rule, count in exercised.items() if rule not in OF_TAKEOVERS})
    for seed in (*RARE, *range(seeds, FOUND_WITHIN)):
        if all(exercised.values()):
            break
        outcome = campaign.run_seed(seed)
        assert not outcome.violations, f"recycle campaign {outcome.name}: {outcome.violations}"
        exercised.update(outcome.exercised)
    return [rule.value for rule, count in exercised.items() if not count]


@pytest.mark.parametrize(
    "seed",
    (
        pytest.param(532, id="a returned replica's script has begun another iterator since"),
        pytest.param(1011, id="data has ended as a newcomer came in, which was told behind its report"),
        pytest.param(2992, id="who comes back in the midst of a step draws on from its first batch"),
        pytest.param(226, id="a newcomer's source has gone before it served"),
        pytest.param(1078, id="the last line to a newcomer breaks, and another has broken before"),
        pytest.param(3206, id="a newcomer's source is told twice to serve it"),
        pytest.param(3216, id="a source has said much before its newcomer has come"),
        pytest.param(4524, id="a newcomer has heard before all others that its source is lost"),
        pytest.param(9110, id="a newcomer's source leaves as planned"),
    ),
)
def test_what_a_seed_has_found_once_stays_mended(seed) -> None:
    assert not campaign.run_seed(seed).violations


def test_every_worker_killed_around_its_instructions() -> None:
    """A sample; all of them with ``recycle campaign --every-instant``.

    What is run again is what the lost worker had done.
    """
    report = campaign.every_instant(campaign.LOSS, every=73)
    assert_clean(report)
    assert report.seeds > 12 and 0 < report.redone_share < 1 / len(campaign.LOSS.job.shape.seats) / 2


def test_every_worker_killed_while_another_comes_back() -> None:
    """A sample, of workers, newcomer and points of a regrouping; all of them with ``recycle campaign --every-return``.

    Without a kill it comes back within the steps in which others are killed.
    """
    report = campaign.every_instant(campaign.RETURN, every=397)
    assert_clean(report)
    assert report.seeds > 6 and report.faults == 2 * report.seeds
    steps, told = campaign.RETURN.steps, {"newcomer": 0, "rejoined": 0}
    for line in campaign.run("x", campaign.RETURN.job).story:
        kind, _, text = line.partition(" ms  ")[2].partition(": ")
        if kind in told:
            told[kind] = int(text.split("step ")[1].split()[0])
    assert steps.start <= told["newcomer"] < told["rejoined"] < steps.stop


def test_every_worker_killed_while_a_stage_is_replayed() -> None:
    """A sample, of instructions that are replayed and others; all of them with ``recycle campaign --every-replay``."""
    report = campaign.every_instant(campaign.REPLAY, every=37)
    assert_clean(report)
    assert report.seeds > 10 and report.exercised[ProtocolRule.REPLAYED] > report.seeds
    moments = campaign.REPLAY.moments()
    assert {"kill 0.1#1 after 1W0.3@3", "kill 0.0 at recovery.parked:1", "kill 0.2 before 2STEP@4"} <= set(moments)


def test_a_newcomers_only_source_killed_at_each_point_of_serving_it(monkeypatch) -> None:
    assert not campaign.every_instant(campaign.SOURCE).violations
    joining.deserted(monkeypatch)
    said = campaign.SOURCE.run("kill 0.1 at serving.told:1").violations
    assert any("it is not let in: seat 1.1" in text for text in said)


def test_every_worker_killed_while_a_batch_is_smaller() -> None:
    """A sample, with a replica out, and coming back; all of them with ``recycle campaign --every-shrink``."""
    report = campaign.every_instant(campaign.SHRINK, every=331)
    assert_clean(report)
    assert report.seeds > 15 and report.exercised[ProtocolRule.SHRUNK] > report.seeds
    assert report.exercised[ProtocolRule.MADE_VOID] and report.exercised[ProtocolRule.WHOLE_RETURNED]


def test_every_rank_killed_while_scripts_push_micro_batches() -> None:
    """A sample, with a replica out, and coming back; all of them with ``recycle campaign --every-push``."""
    report = campaign.every_instant(campaign.PUSH, every=67)
    assert_clean(report)
    assert report.seeds > 5 and report.exercised[ProtocolRule.PUSHED_RETURNED] >= report.seeds
    assert report.exercised[ProtocolRule.BOUNDARY_MOVED]


def test_the_same_seed_is_the_same_story() -> None:
    one, two = (campaign.run("x", seeded.scenario(14)) for _ in range(2))
    assert one == two and one.story and one.spans


def test_several_processes_find_what_one_does(monkeypatch) -> None:
    MISTAKES["a weight gradient is left out"](monkeypatch)
    alone, shared = (campaign.campaign(range(24), jobs) for jobs in (1, 2))
    assert alone.violations and replace(shared, seconds=alone.seconds) == alone


@pytest.mark.parametrize("ties", ((), ((0, 2),), ((0, 1, 2),)), ids=str)
def test_the_reference_is_what_the_fault_free_run_computes(ties) -> None:
    from recycle_plugin.lab.simulator import train
    from recycle_plugin.planner import plan

    shape, costs = Topology(2, 3, 4, ties), CostModel.uniform(3)
    weights = campaign.initial_weights(shape)
    trained = train(plan(shape.full(), costs, Policy()), costs, weights, 2, step=1)
    reference = Reference(shape, weights)
    for step in (1, 2):
        reference.follow(step)
    expected = reference.weights[3]
    assert {seat.stage: value for seat, value in trained.items()} == dict(enumerate(expected))
    assert all(len({expected[stage] for stage in tie}) == 1 for tie in ties)


def one_norm_at_risk(torn: int) -> Scenario:
    """Who clips by what, where a stage's sum is made again one rounding apart.

    In step 2 seat 0.1 dies when stage 1 has its sum, which so gets to 2.1, and, as ``torn`` has it, not to 1.1; 2.1
    says its share, all stages' norm is told, and 2.1 dies too.  What 2.0 has said of step 1 comes late, so all others
    wait for the commit of that before they step; the news finds 1.0 and 2.0 in time, and 0.0, which knows the norm,
    only together with the deaths, so that it judges once more.
    """
    costs, policy = CostModel.uniform(2, 5_000, 5_000, 5_000, 500, 3_000, 2_000), Policy(validate=True)
    calm = Scenario(Topology(3, 2, 4), costs, policy, 3, clip=1.0, rounds=True)
    ends = {str(span.instruction): span.end_us for span in campaign.run("x", calm).spans}
    stepped, told = ends["0STEP@1"], ends["0VALIDATE@2"]
    troubles = (
        Trouble("mute", stepped - 1, (Seat(2, 0),), for_us=told - stepped + MILLISECOND // 2),
        Trouble("deaf", told + 100, (Seat(0, 0),), for_us=60 * MILLISECOND),
    )
    faults = tuple(map(Fault.parse, ("kill 0.1 after 1REDUCE@2", "kill 2.1 before 1STEP@2")))
    return replace(calm, troubles=troubles, faults=faults, torn=torn)


def test_one_norm_is_that_of_the_step_for_all_where_a_sum_is_made_again_one_rounding_apart(monkeypatch) -> None:
    runs = [one_norm_at_risk(torn) for torn in range(10)]
    assert not any(campaign.run("x", given).violations for given in runs)
    MISTAKES["a norm is made again after a failure, as if nobody had stepped with the first"](monkeypatch)
    said = [text for given in runs for text in campaign.run("x", given).violations]
    assert any(text.startswith("step 2 is clipped by") for text in said)


@pytest.mark.parametrize("step", (1, 2))
def test_a_death_in_what_all_do_after_the_last_step_before_a_planned_end(step, monkeypatch) -> None:
    """That is step 2.

    The survivors save, or evaluate, once more: nobody waits in vain, or goes on with the losses of those who are left.
    """
    costs = CostModel.uniform(2, 5_000, 5_000, 5_000, 500)
    end = Trouble("end", 1, (Seat(0, 0),))
    given = Scenario(Topology(2, 2, 2), costs, Policy(), 6, (end,), between=((step, "evaluate"), (step, "save")))
    for fault in ("kill 1.1 before 1F1.0@-1", "kill 1.0 at checkpoint.written"):
        outcome = campaign.run("x", replace(given, faults=(Fault.parse(fault),)))
        assert not outcome.violations and any("lost: seat 1." in line for line in outcome.story)
    MISTAKES["nobody needs anybody any more at a planned end"](monkeypatch)
    assert bool(campaign.run("x", replace(given, faults=(Fault.parse("kill 1.1 before 1F1.0@-1"),))).violations) == (
        step == 2
    )


def judged_by_oneself() -> Scenario:
    """Who finds a share that is not finite knows the verdict, and skips the step at once.

    In step 3 seat 0.0 does, far from the coordinator, and two of three replicas die before the news of the rejection
    reaches it: a newer membership overtakes that, in which all have the step as it stays.
    """
    costs = CostModel((5_000, 7_000, 3_000), (4_000, 9_000, 8_000), (9_000, 4_000, 6_000), 500)
    lost = tuple(Seat(replica, stage) for replica in (1, 2) for stage in range(3))
    return Scenario(
        Topology(3, 3, 2),
        costs,
        Policy(activation_cap=6, block=2),
        6,
        (Trouble("kill", 803_888, lost),),
        torn=538,
        budget=2,
        clip=25.0,
        weather=UNEVEN,
    )


def test_who_has_judged_a_step_itself_hears_that_what_the_others_have_computed_since_is_void(monkeypatch) -> None:
    assert not campaign.run("x", judged_by_oneself()).violations
    void_is_not_heard_again(monkeypatch)
    assert any("waits in vain" in text for text in campaign.run("x", judged_by_oneself()).violations), (
        "the others are in another era than 0.0, and take nothing of it"
    )


def hears_nobody(seat: Seat) -> Scenario:
    """... from the first step on, and can't tell that from peers that send nothing."""
    return Scenario(
        Topology(2, 2, 4),
        CostModel.uniform(2, 5_000, 5_000, 5_000, 500),
        Policy(),
        4,
        (Trouble("walled", MILLISECOND, (seat,)),),
    )


@pytest.mark.parametrize("seat", Topology(2, 2, 4).seats, ids=str)
def test_who_hears_nobody_and_can_t_tell_costs_one_peer_and_then_goes_itself(seat, monkeypatch) -> None:
    outcome = campaign.run("x", hears_nobody(seat))
    assert not outcome.violations and len([line for line in outcome.story if " lost: seat" in line]) == 2
    believed_of_many(monkeypatch)
    assert any("since another hears nobody" in text for text in campaign.run("x", hears_nobody(seat)).violations)


def two_that_go_at_a_planned_end() -> Scenario:
    """Stages 0 and 1 share weights.

    Both workers of stage 0 die where they should say goodbye, and those of stage 1 before, one after the other.
    """
    costs = CostModel((8_000, 5_000), (5_000, 8_000), (6_000, 5_000), 500, tie=4_000)
    one, other, *rest = (Seat(replica, stage) for stage in (0, 1) for replica in (0, 1))
    asked = (
        Trouble("end", 561_758, (one,)),
        Trouble("leave", 106_738, (one,)),
        Trouble("leave", 486_044, (rest[1],)),
        Trouble("rude", 0, (one, other)),
    )
    pauses = tuple((step, "pause") for step in (2, 4, 6))
    dies = Trouble("kill", 1_100_000, (rest[0],))
    return Scenario(
        Topology(2, 2, 2, ((0, 1),)),
        costs,
        Policy(block=2),
        6,
        (dies, *asked),
        (Fault.parse("kill 1.1 after 1TIE@4"),),
        torn=4829,
        weather=UNEVEN,
        between=pauses,
    )


def test_who_knows_that_all_is_committed_at_a_planned_end_reports_for_no_change(monkeypatch) -> None:
    assert not campaign.run("x", two_that_go_at_a_planned_end()).violations
    between.reports_for_a_change_that_nobody_needs(monkeypatch)
    said = campaign.run("x", two_that_go_at_a_planned_end()).violations
    assert any(text.startswith("the job has failed at its planned end, with all steps committed") for text in said)


def test_movers_refuse_nothing_of_an_evaluation_that_a_peer_can_have_sent(monkeypatch) -> None:
    """Of evaluations in a row, where the word that one is over comes late to some."""
    costs, thrice = CostModel.uniform(2, 5_000, 5_000, 5_000, 500), ((1, "evaluate"),) * 3
    given = Scenario(Topology(2, 2, 2), costs, Policy(), 3, between=thrice, torn=4, weather=UNEVEN)
    assert not campaign.run("x", given).violations
    evaluations_bound_too_low(monkeypatch)
    assert any("would refuse act" in text and "step -2" in text for text in campaign.run("x", given).violations)


def stage_lost_at_a_planned_end() -> Scenario:
    """All is committed up to a planned end, and scripts do something of their own before they come to that.

    Then 1.1 dies, for which the others are to meet, and before they do so 0.1 too, so that nobody can.
    """
    costs = CostModel.uniform(2, 5_000, 5_000, 5_000, 500)
    calm = Scenario(Topology(2, 2, 2), costs, Policy(), 6, (Trouble("end", 1, (Seat(0, 0),)),), between=((2, "pause"),))
    spans = campaign.run("x", calm).spans
    stepped = {
        span.seat: span.end_us for span in spans if span.instruction.op is Op.STEP and span.instruction.step == 2
    }
    longer = {Seat(0, 0): 10_000, Seat(1, 0): 30_000}  # so both take 45 s, and nobody is through while others meet
    pauses = tuple(Trouble("slow", stepped[seat] - 1, (seat,), percent=percent) for seat, percent in longer.items())
    first, second = (max(stepped.values()) + after * MILLISECOND for after in (5, 35))
    dies = Trouble("kill", first, (Seat(1, 1),)), Trouble("kill", second, (Seat(0, 1),))
    return replace(calm, troubles=(*calm.troubles, *pauses, *dies))


def test_nobody_waits_at_a_planned_end_for_a_change_that_nobody_needs_any_more(monkeypatch) -> None:
    outcome = campaign.run("x", stage_lost_at_a_planned_end())
    assert not outcome.violations and sum(" lost: seat" in line for line in outcome.story) == 2
    between.waits_for_a_change_that_nobody_needs(monkeypatch)
    said = campaign.run("x", stage_lost_at_a_planned_end()).violations
    assert any(text.startswith("the job has failed at its planned end, with all steps committed") for text in said)


def one_shard_later_than_the_other() -> Scenario:
    """Seat 0.1, of two shards, comes back, and what the first of them says is held up when it has caught up."""
    troubles = (
        Trouble("kill", 300 * MILLISECOND, (Seat(0, 1),)),
        Trouble("mute", 1_400 * MILLISECOND, (Seat(0, 1),), for_us=400 * MILLISECOND),
    )
    costs = CostModel.uniform(2, 5_000, 5_000, 5_000, 500)
    return Scenario(Topology(2, 2, 2), costs, Policy(), 60, troubles, rejoin="always", shards=2)


def test_a_seat_comes_back_when_all_its_shards_have_caught_up(monkeypatch) -> None:
    outcome = campaign.run("x", one_shard_later_than_the_other())
    assert not outcome.violations and outcome.exercised[ProtocolRule.SEAT_RETURNED] == 2
    together.half_a_seat_is_admitted(monkeypatch)
    said = campaign.run("x", one_shard_later_than_the_other()).violations
    assert any(text.endswith("has a part of seat 0.1, which comes back whole") for text in said)


def test_confused_workers_cost_only_themselves() -> None:
    """A few; more of them with ``recycle campaign --confused``."""
    report = campaign.campaign(range(CONFUSED_SEEDS), run_one=campaign.run_confused)
    assert_clean(report)
    assert report.exercised[ProtocolRule.REFUSED_WORD] and report.exercised[ProtocolRule.CONFUSED]


# --- mistakes that it has to find ---------------------------------------------------------------------


@pytest.mark.timeout(900)  # a scenario that shows it no longer, once jobs have changed, is looked for anew
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, monkeypatch) -> None:
    job, said = MISTAKES.shown_by(mistake, monkeypatch, seeded.scenario)
    assert not campaign.run("x", job).violations
    # not that the mistake itself calls, or asks for, what there is not
    assert not any(re.match(r"TypeError.*argument|AttributeError: '(?!NoneType)", text) for text in said), said


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mistake", confused.CONFUSED)
def test_a_mistake_about_whose_word_counts_is_found(mistake, monkeypatch) -> None:
    job, _ = confused.CONFUSED.shown_by(mistake, monkeypatch, seeded.with_confusion)
    assert not campaign.run("x", job).violations


def test_there_are_enough_mistakes_and_the_campaign_is_clean_without() -> None:
    assert len(MISTAKES) >= 15 and len(set(MISTAKES.values())) == len(MISTAKES)


# --- the command ----------------------------------------------------------------------------------------


def test_command(capsys) -> None:
    assert cli.main(["campaign", "--seeds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exercised"].keys() == {rule.value for rule in ProtocolRule}
    assert found["seeds"] == 3 and found["faults"] >= 3 and found["violations"] == [] and found["seconds"] > 0
    assert found["redone_share"] >= 0


def test_a_violation_prints_what_runs_it_again_and_the_grid(capsys, monkeypatch) -> None:
    MISTAKES["a weight gradient is left out"](monkeypatch)
    wrong = next(seed for seed in range(FOUND_WITHIN) if campaign.run("x", seeded.scenario(seed)).violations)
    assert cli.main(["campaign", "--first", str(wrong), "--seeds", "1"]) == 1
    printed = capsys.readouterr().out
    assert f"recycle campaign --seed {wrong}  #" in printed and "0.0 |" in printed
    assert cli.main(["campaign", "--seed", str(wrong)]) == 1
    assert "VIOLATION" in (story := capsys.readouterr().out) and "lost: seat" in story


@pytest.mark.parametrize(
    "wrong",
    (
        ["--seeds", "0"],
        ["--stride", "0", "--every-instant"],
        ["--seed", "-1"],
        ["--kill", "kill nobody"],
        ["--confused", "--every-push"],
        ["--kill", "kill 0.0 before 0STEP@2", "--seed", "3"],
        ["--kill", "kill 0.0 before 0STEP@2", "--seeds", "3"],
    ),
)
def test_bad_input_is_one_line(capsys, wrong) -> None:
    assert cli.main(["campaign", *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
