"""Which boundaries a job logs: what the setting says, what is counted on, and what each worker keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator.facts.logs import Logs
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.from_coordinator import Generation, LogOnly
from recycle_plugin.core.messages.from_workers import Durable, Ready
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.log_boundaries import at_start, groups, in_words, stage_hosts
from recycle_plugin.core.vocabulary.log_figures import LogFigures, StageFigures
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.step_log import StepLog
from recycle_plugin.lab.simulator import seeded
from recycle_plugin.lab.simulator.campaign import REPLAY, run
from recycle_plugin.planner.log_line import STORAGE_BYTES_PER_S, measured
from tests.mistakes import changed
from tests.support import membership as played
from tests.support.membership import agree, job, member, said
from tests.support.replaying import Kept, logging, lose

# --- what the setting says ----------------------------------------------------------------------------


def roster(*hosts: tuple[str, ...]) -> Roster:
    seats = [(Seat(replica, stage), host) for stage, of in enumerate(hosts) for replica, host in enumerate(of)]
    return Roster(tuple(Member(rank, seat, "", host) for rank, (seat, host) in enumerate(seats)))


@pytest.mark.parametrize(
    "hosts, boundaries",
    [
        ((("a",), ("a",), ("b",), ("c",)), (1, 2)),
        ((("a", "b"), ("a", "b"), ("a", "b")), ()),
        ((("a", "b"), ("b", "a")), (0,)),
    ],
    ids=("of one replica", "each replica on a host", "crossed"),
)
def test_a_boundary_is_between_hosts_where_any_replica_crosses_it(hosts, boundaries):
    assert at_start("hosts", stage_hosts(roster(*hosts))) == boundaries


def test_what_is_logged_at_the_start():
    four = ("h",) * 4
    assert at_start("all", four) == at_start("auto", four) == (0, 1, 2)
    assert at_start((2, 0, 2), four) == (0, 2) and at_start((), four) == at_start("hosts", four) == ()
    for wrong, why in (((1,), "2 stages have only 0"), ((0, 4), "there is no boundary 4: 5 stages have 0 to 3")):
        with pytest.raises(ValueError, match=why):
            at_start(wrong, ("h",) * int(why.partition(" stages")[0][-1]))
    with pytest.raises(ValueError, match="one stage has none"):
        at_start((0,), ("h",))


def test_groups_are_the_stages_between_logged_boundaries():
    assert groups((0, 2), 4) == ((0, 1), (1, 3), (3, 4)) and groups((), 3) == ((0, 3),)
    assert in_words((0, 2), 4) == "logged: 0|1, 2|3; stages 1 to 2 replay together"
    assert in_words((), 1) == "logged: no boundary; each stage replays alone"


# --- what is counted on ---------------------------------------------------------------------------------


def durable(step: int, *boundaries: int) -> Durable:
    return Durable(0, step, "a folder", boundaries=boundaries)


def test_what_goes_from_the_choice_counts_no_more_at_once():
    logs = Logs(True, stages=4)
    assert logs.boundaries == {0, 1, 2}
    logs.durable(durable(1, 1))
    assert logs.boundaries == {1} and logs.told == LogOnly((1,))


def test_what_comes_to_the_choice_counts_from_the_next_checkpoint_on():
    """Of the steps behind this one its log lacks what was made before all have heard of it."""
    logs = Logs(True, 4, (1,))
    logs.durable(durable(1, 0, 1))
    assert logs.boundaries == {1} and logs.told == LogOnly((0, 1))
    logs.durable(durable(2, 0, 2))
    assert logs.boundaries == {0} and logs.told == LogOnly((0, 2))
    logs.durable(Durable(0, 3, "a folder"))
    assert logs.boundaries == {0, 2} and logs.told == LogOnly((0, 2))


def test_a_checkpoint_that_comes_late_changes_no_choice():
    logs = Logs(True, 4)
    logs.durable(durable(5, 0, 1))
    assert not logs.durable(durable(3)) and logs.told == LogOnly((0, 1)) and logs.boundaries == {0, 1}


def test_only_a_boundary_beside_what_is_replayed_has_to_be_logged():
    """What is on its other side replays along, and what that one needs in the same way."""
    logs = Logs(True, 4, (1,))
    logs.durable(durable(1, 1))
    assert logs.along(4, (2, 3)) == logs.along(4, (0, 1)) == {}
    assert logs.along(4, (2,)) == {3: "the boundary 2|3 is not logged"}
    assert logs.along(4, (1, 2, 3)) == {0: "the boundary 0|1 is not logged"}
    assert list(Logs(True, 4, ()).along(4, (1,))) == [0, 2, 3]


LINE = {"replicas": 1, "stages": 4, "boundaries": (2, 0), "log": True, "rejoin": "always"}


def test_all_are_told_what_to_log_before_they_begin_and_whenever_that_changes():
    membership = Membership(4)
    for rank in range(4):
        out = membership.receive(Ready(member(rank, replicas=1), 0, job(**LINE)), 0.0)
    kinds = [type(message) for _, message in out.messages]
    assert said(out, LogOnly) == [LogOnly((0, 2))] and kinds.index(LogOnly) < kinds.index(Generation)
    assert membership.state.logs.boundaries == {0, 2}
    agree(membership, 0, dict.fromkeys(range(4), 0))
    for number in range(1, 5):
        played.step(membership, 0, number)
    assert said(membership.receive(durable(3, 0), 1.0), LogOnly) == [LogOnly((0,))]
    assert not said(membership.receive(durable(4, 0), 1.0), LogOnly)


def test_who_comes_back_is_told_too():
    membership = logging(**LINE)
    membership.receive(durable(2, 0), 1.0)
    lose(membership, 0)
    membership.identify(WorkerId(0, 1))
    membership.greet(WorkerId(0, 1), "h")
    out = membership.receive(Ready(replace(member(0, replicas=1), incarnation=1), 0, job(**LINE)), 1.0)
    assert (WorkerId(0, 1), LogOnly((0,))) in out.messages


@pytest.mark.parametrize("given", ({}, {"log": True}, {"log": True, "boundaries": "auto"}))
def test_a_job_that_logs_nothing_or_all_hears_nothing_of_it(given):
    membership = Membership(4)
    for rank in range(4):
        out = membership.receive(Ready(member(rank), 0, job(**given)), 0.0)
    assert not said(out, LogOnly)


# --- what a worker keeps --------------------------------------------------------------------------------


def sent(kind: str, stage: int, step: int = 1) -> Datum:
    return Datum(kind, stage, MicroBatch(0, 0), step)


def test_a_worker_keeps_what_crosses_the_boundaries_that_it_was_told():
    """Of stage 1, whose activations go down over boundary 1, and gradients up over boundary 0."""
    kept = Kept()
    log, view = StepLog(kept, range(3)), ControlView(0)
    for step, told in ((1, None), (2, (1,)), (3, (0,)), (4, ())):
        if told is not None:
            view.logged = frozenset(told)
            log.committed(view, 0)
        log.kept(sent("act", 1, step), "act", 0)
        log.kept(sent("grad", 1, step), "grad", 0)
        log.kept(Datum("drawn", 1, MicroBatch(0, 0), step), "drawn", 0)
    found = " ".join(f"{datum.step}{datum.kind}" for _, datum, *_ in kept.calls)
    assert found == "1act 1grad 1drawn 2act 2drawn 3grad 3drawn 4drawn"


def test_it_measures_what_it_does_not_log_too_and_once():
    log = StepLog(Kept(), [1], weigh=len)
    for _ in range(2):
        log.kept(sent("act", 1), "12345", 0)
        log.kept(sent("grad", 1), "123", 0)
    for text, took in (("1F0.0@1", 300_000), ("1STEP@1", 50_000), ("1REDUCE@1", 9), ("1F0.0@-1", 9)):
        log.meter.ran(Span(Seat(0, 1), Instruction.parse(text), 1000, 1000 + took))
    log.applied(1, None)
    assert log.meter.total == LogFigures(1, 0.35, down=5, up=3, logged=5)
    before = log.meter.total
    log.applied(2, None)
    assert log.meter.total.since(before) == LogFigures(1)


def test_a_worker_does_what_it_was_told_before_its_next_step():
    view = ControlView(0)
    assert view.logged is None
    view.take(LogOnly((2, 0)))
    assert view.logged == {0, 2}


# --- what was measured ----------------------------------------------------------------------------------


def test_the_line_is_the_sum_of_what_all_have_measured():
    """Two workers of stage 0, one of which has done more than its share, and one of stage 1; four steps."""
    figures = [
        StageFigures(0, 500, LogFigures(4, 8.0, down=400)),
        StageFigures(1, 900, LogFigures(4, 2.0, up=800)),
        StageFigures(0, 500, LogFigures(4, 12.0, down=600)),
    ]
    line = measured(figures, ("a", "b"), every=7)
    assert line is not None and line == measured(figures[::-1], ("a", "b"), 7), "in any order"
    assert line.recompute_s == (5.0, 0.5) and line.boundary_bytes == (450,)
    assert line.load_s == 900 / STORAGE_BYTES_PER_S and line.every == 7 and line.failure == (0.5, 0.5)


def test_of_too_few_steps_nothing_follows():
    two = StageFigures(0, 0, LogFigures(2))
    assert measured([two, StageFigures(1, 0, LogFigures(9))], ("a", "b"), 7) is None
    assert measured([], ("a", "b"), 7) is None


# --- in the simulator -----------------------------------------------------------------------------------

CHOICES = ((0, 1), (0,), (0, 1), (1,), (0, 1))
CALM = replace(REPLAY.job, faults=(), steps=14, between=tuple((step, "save") for step in range(2, 13, 2)))


def grown_at_once(self, before, message):
    later = before(self, message)
    self.boundaries = self._told
    return later


def told_first(self, before, message):
    counted = self.boundaries
    later = before(self, message)
    self.boundaries = counted
    return later


def test_nobody_logs_less_than_what_is_counted_on_while_the_choice_changes():
    outcome = run("", replace(CALM, log_choices=CHOICES))
    assert not outcome.violations, outcome.violations


@pytest.mark.parametrize("mistake", (grown_at_once, told_first))
def test_a_mistake_in_what_is_counted_on_is_found(monkeypatch, mistake):
    changed(monkeypatch, Logs, "durable", mistake)
    outcome = run("", replace(CALM, log_choices=CHOICES))
    assert any("which is counted on" in each for each in outcome.violations), outcome.violations


@pytest.mark.parametrize("choices, alone", [(((0, 1),), True), (((0,), (0, 1), (0, 1)), True), (((0,),), False)])
def test_a_stage_is_replayed_alone_only_where_both_boundaries_beside_it_count(choices, alone):
    """Stage 1 of three is lost behind the checkpoints of steps 0 and 1."""
    outcome = run("", replace(REPLAY.job, log_choices=choices))
    assert not outcome.violations, outcome.violations
    said = [line for line in outcome.story if "recovery: " in line]
    assert len(said) == 1 and "replayed from the logs" in said[0]
    assert alone == ("with stage 2 (the boundary 1|2 is not logged)" not in said[0])


def test_seeded_jobs_draw_choices(monkeypatch):
    drawn = [bool(given.log_choices) for seed in range(400) if (given := seeded.scenario(seed)).logs]
    assert any(drawn) and not all(drawn)
    monkeypatch.setattr(seeded, "CHOOSES", 1.0)
    jobs = {seed: given for seed in range(400) if (given := seeded.scenario(seed)).logs}
    assert all(given.log_choices for given in jobs.values())
    wrong = {seed: found for seed, given in list(jobs.items())[:20] if (found := run("", given).violations)}
    assert not wrong
