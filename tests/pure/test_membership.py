"""The coordinator's state machine: generations, commit, and what it does with late messages."""

from __future__ import annotations

import random

import pytest

from recycle_plugin.core.coordinator.facts.output import WORKERS, CoordinatorOutput
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages import from_workers
from recycle_plugin.core.messages.contributions import MEAN
from recycle_plugin.core.messages.from_coordinator import Collected, Committed, End, Generation, Resume
from recycle_plugin.core.messages.from_workers import (
    Accompanied,
    BarrierReached,
    CatchUp,
    CaughtUp,
    Contribution,
    Crashed,
    Durable,
    Exited,
    Fatal,
    Fingerprint,
    Heartbeat,
    HostGoes,
    Leaving,
    Left,
    LogBroken,
    Logged,
    Missing,
    Note,
    OutOfData,
    Post,
    ReadBoard,
    Ready,
    Replaying,
    Resized,
    Serving,
    StateHash,
    Stepped,
    StoreCall,
    SurvivorReport,
    Through,
    Unreplayable,
    Vanishing,
    WantResult,
)
from recycle_plugin.core.messages.said import WORKER, OfWorker
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from recycle_plugin.core.worker.control_view import ControlView
from tests.support.membership import agree, computes, holds, job, member, resumed, said, started, step


def test_a_step_is_committed_when_every_live_worker_has_applied_it():
    membership = started()
    assert step(membership, 0, 1, [0, 1, 2]) == []
    assert step(membership, 0, 1, [3]) == [Committed(1)]


def test_a_loss_makes_a_generation_and_everybody_goes_on_from_the_smallest_count():
    membership = started()
    step(membership, 0, 1)
    out = membership.receive(Exited(2, -9, 0.0), 0.0)
    (generation,) = said(out, Generation)
    assert [m.rank for m in generation.members] == [0, 1, 3] and generation.from_step == 0
    out = agree(membership, 1, {0: 1, 1: 1, 3: 2})
    assert resumed(out) == [(1, 1)] and not said(out, Committed)


def test_a_step_that_all_survivors_have_applied_is_committed_by_the_regrouping():
    membership = started()
    membership.receive(Exited(2, -9, 0.0), 0.0)
    out = agree(membership, 1, {0: 1, 1: 1, 3: 1})
    assert said(out, Committed) == [Committed(1)] and resumed(out) == [(1, 1)]


def test_late_messages_of_an_older_generation_change_nothing():
    membership = started()
    membership.receive(Exited(2, -9, 0.0), 0.0)
    assert step(membership, 0, 1, [0, 1, 3]) == []
    assert membership.receive(SurvivorReport(0, 0, 7, "old"), 0.0).messages == []
    out = agree(membership, 1, {0: 0, 1: 0, 3: 0})
    assert resumed(out) == [(1, 0)]


OF_LOST = (
    Stepped(2, 1, 1),
    Contribution(2, 1, "loss", {"0.0": 1.0}, 1),
    Contribution(2, 1, "share", {"1": 1e9}, 1),
    SurvivorReport(2, 1, 0, "another plan"),
    OutOfData(2, 1, 1),
    Left(2),
    Leaving(2, "SIGTERM"),
    HostGoes(2, "a notice"),
    Through(2),
    Vanishing(2, 0),
    Missing(2, 1, "a tensor", "0.0"),
    Fatal(2, "nobody answers"),
    Note(2, "checkpoint", "saved", {"path": "of nobody"}),
    Crashed(2, "KeyError: 0", "Traceback …"),
    Heartbeat(2, 1, 1, computes("1F0.0")),
    BarrierReached(2, 1, Barrier(Meets.SCRIPT, "saving"), {}),
    Fingerprint(2, 1, "unlike"),
    BarrierReached(2, 1, Barrier(Meets.LOADED), {}),
    Resized(2, 1, 2, 4, 10),
    Durable(2, 1, "a folder"),
    Logged(2, 1),
    LogBroken(2, 1, "disk full"),
    Post(2, 1, "a board", b"of nobody"),
    ReadBoard(2, 1, "a board", (0,)),
    StoreCall(2, 1, "set", ("a key",), (b"of nobody",)),
    WantResult(2, 1, 0, "a group", 1),
    CatchUp(2),
    CaughtUp(2, 1, 0, 0),
    Serving(2, WorkerId(0, 1), "nowhere"),
    StateHash(2, 1, "unlike"),
    Replaying(2, 1),
    Accompanied(2, 1),
    Unreplayable(2, "no checkpoint"),
)


@pytest.mark.parametrize("message", OF_LOST, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("agreed", [True, False], ids=["after", "while the others agree"])
def test_nothing_counts_of_what_a_lost_worker_says(message, agreed):
    """It may have been stopped, or cut off, and wakes up when the others have gone on."""
    membership = started(clipping=1.0, clip="validate")
    membership.receive(Exited(2, -9, 0.0), 0.0)
    if agreed:
        agree(membership, 1, {0: 0, 1: 0, 3: 0})
    assert membership.receive(message, 0.0) == CoordinatorOutput()
    assert membership.state.ending.checkpoint == "" and membership.state.attendance.left == set()
    assert membership.ended is None
    if not agreed:
        assert resumed(agree(membership, 1, {0: 0, 1: 0, 3: 0})) == [(1, 0)]
    assert step(membership, 1, 1, [0, 1, 3]) == [Committed(1)]


def test_every_message_of_a_member_is_among_them():
    of_workers = {kind for kind in vars(from_workers).values() if isinstance(kind, type) and issubclass(kind, OfWorker)}
    assert {type(message) for message in OF_LOST} == {kind for kind in of_workers - {OfWorker} if kind.BY == WORKER}


def test_a_report_of_a_passed_generation_does_not_stand_for_one_of_this():
    membership = started()
    membership.receive(Exited(0, -9, 0.0), 0.0)
    membership.receive(Exited(3, -9, 0.0), 0.0)
    for rank in (1, 2):
        assert membership.receive(SurvivorReport(rank, 1, 0, "plan for three"), 0.0) == CoordinatorOutput()
    assert membership.regrouping == 2 and resumed(agree(membership, 2, {1: 0, 2: 0})) == [(2, 0)]


def test_another_loss_during_regrouping_starts_it_again():
    membership = started()
    membership.receive(Exited(0, -9, 0.0), 0.0)
    membership.receive(SurvivorReport(1, 1, 0, "plan"), 0.0)
    (generation,) = said(membership.receive(Exited(3, -9, 0.0), 0.0), Generation)
    assert generation.number == 2 and [m.rank for m in generation.members] == [1, 2]
    assert said(membership.receive(SurvivorReport(2, 1, 0, "plan"), 0.0), Resume) == []
    assert resumed(agree(membership, 2, {1: 0, 2: 0})) == [(2, 0)]


def test_a_norms_share_stays_good_over_a_regrouping():
    membership = started()
    membership.receive(Contribution(2, 1, "norm", {"1": 2.0}, 2), 0.0)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    agree(membership, 1, {0: 0, 1: 0, 3: 0})
    (told,) = said(membership.receive(Contribution(1, 1, "norm", {"0": 4.0}, 2), 0.0), Collected)
    assert told.values == {"1": 2.0, "0": 4.0}


@pytest.mark.parametrize("survives", ("reduced 1@1", "wgrad 1@1", "stash 1@1", ""))
def test_a_loss_stays_over_a_regrouping_unless_it_is_computed_again(survives):
    """By somebody with a plain iterator, of other data."""
    membership = started()
    membership.receive(Contribution(2, 1, "loss", {"0.0": 2.0}, 2), 0.0)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    for rank in (0, 1, 3):
        kept = {survives: "0.0:0" * ("reduced" not in survives)} if survives and rank == 3 else {}
        membership.receive(SurvivorReport(rank, 1, 0, "plan", {**holds(rank), **kept}), 0.0)
    told = said(membership.receive(Contribution(3, 1, "loss", {"1.0": 4.0}, 2), 0.0), Collected)
    assert [each.values for each in told] == ([{MEAN: 3.0}] if survives else [])
    told += said(membership.receive(Contribution(3, 1, "loss", {"0.0": 6.0, "1.0": 4.0}, 2), 0.0), Collected)
    assert [each.values for each in told] == [{MEAN: 3.0 if survives else 5.0}]


def test_one_norm_once_told_is_the_norm_of_the_step_for_all():
    """Seat 0.1, rank 2, alone has its stage's sum; it says its share, the norm is told, and seat 0.0 steps with it.

    Then 0.1 dies, and the sum that is made again is one rounding apart: whoever has not stepped yet clips by the norm
    that 0.0 has stepped with.
    """
    membership, line = started(clipping=1.0), ControlView(1)
    membership.receive(Contribution(2, 1, "norm", {"1": 4.0}, 2), 0.0)
    (told,) = said(membership.receive(Contribution(0, 1, "norm", {"0": 2.0}, 2), 0.0), Collected)
    line.take(told)
    assert membership.receive(Contribution(1, 1, "norm", {"0": 2.0}, 2), 0.0).messages == []
    assert line.collected(1, "norm") == {"0": 2.0, "1": 4.0}, "seat 1.0 is between VALIDATE and STEP"
    membership.receive(Stepped(0, 0, 1), 0.0)
    (generation,) = said(membership.receive(Exited(2, -9, 0.0), 0.0), Generation)
    line.take(generation)
    for message in said(agree(membership, 1, {0: 1, 1: 0, 3: 0}), Resume):
        line.take(message)
    line.adopt(generation)
    for rank, share in ((3, {"1": 4.000001}), (1, {"0": 2.0})):
        for message in said(membership.receive(Contribution(rank, 1, "norm", share, 2), 0.0), Collected):
            line.take(message)
    assert line.collected(1, "norm") == {"0": 2.0, "1": 4.0}


@pytest.mark.parametrize("name, keys", [("loss", ("0.0", "1.0")), ("norm", ("0", "1"))])
def test_what_is_said_of_a_committed_step_counts_no_more(name, keys):
    """Somebody who had stepped before a failure says its losses once more, and the others were quicker."""
    membership = started()
    step(membership, 0, 1)
    membership.receive(Contribution(2, 1, name, {keys[0]: 2.0}, 2), 0.0)
    assert not any(isinstance(message, Collected) for message in step(membership, 0, 2))
    assert membership.receive(Contribution(3, 1, name, {keys[1]: 4.0}, 2), 0.0).messages == []


def test_losses_that_went_down_with_a_worker_are_not_waited_for():
    """A host dies with them under way: the step counts, its loss is that of the others, and nothing that is said again
    replaces it.
    """
    membership = started()
    membership.receive(Contribution(3, 1, "loss", {"1.0": 4.0}, 2), 0.0)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    out = agree(membership, 1, {0: 1, 1: 1, 3: 1})
    assert [type(message) for _, message in out.messages] == [Collected, Committed, Resume]
    assert said(out, Collected)[0].values == {MEAN: 4.0} and "of 1 micro-batches" in out.events[0].text


def test_losses_that_are_said_again_after_a_failure_do_not_replace_the_complete_ones():
    membership = started()
    membership.receive(Contribution(2, 1, "loss", {"0.0": 2.0}, 2), 0.0)
    assert said(membership.receive(Contribution(3, 1, "loss", {"1.0": 4.0}, 2), 0.0), Collected)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    agree(membership, 1, {0: 0, 1: 0, 3: 0})
    assert membership.receive(Contribution(3, 1, "loss", {"1.0": 4.0}, 2), 0.0).messages == []
    assert not any(isinstance(message, Collected) for message in step(membership, 1, 1, [0, 1, 3]))


def test_different_plans_end_the_job():
    membership = Membership(4)
    for rank in range(4):
        membership.receive(Ready(member(rank), 0, job()), 0.0)
    for rank in range(4):
        out = membership.receive(SurvivorReport(rank, 0, 0, "ab"[rank % 2]), 0.0)
    (end,) = said(out, End)
    assert end.failed and "different plans" in end.reason


def test_who_has_made_another_plan_than_most_goes():
    membership = started()
    membership.receive(Exited(2, -9, 0.0), 0.0)
    for rank, plan in ((0, "a"), (1, "b"), (3, "a")):
        out = membership.receive(SurvivorReport(rank, 1, 0, plan), 0.0)
    assert [event.details["rank"] for event in out.events if event.kind == "lost"] == [1] and not said(out, Resume)
    assert resumed(agree(membership, 2, {0: 0, 3: 0})) == [(2, 0)]


def test_a_stage_without_workers_ends_the_job_and_names_the_checkpoint():
    membership = started()
    membership.receive(Note(0, "checkpoint", "saved", {"path": "runs/ck/global_step10"}), 0.0)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    (end,) = said(membership.receive(Exited(3, -9, 0.0), 0.0), End)
    assert end.failed and end.reason == "stage 1 has no live worker left. Last checkpoint: runs/ck/global_step10"


def test_a_death_before_the_start_ends_the_job():
    (end,) = said(Membership(4).receive(Exited(2, 1, 0.0), 0.0), End)
    assert end.failed and end.reason == "rank 2: its process exited with code 1 before training started"


def test_a_fatal_error_is_said_once():
    membership = started()
    assert said(membership.receive(Fatal(0, "no"), 0.0), End) and not said(membership.receive(Fatal(1, "no"), 0.0), End)


def test_an_overdue_report_is_named():
    membership = started()
    membership.receive(Exited(2, -9, 0.0), 0.0)
    membership.receive(SurvivorReport(0, 1, 0, "plan"), 0.0)
    (end,) = said(membership.regroup_overdue(1.0), End)
    assert "seat 1.0 (rank 1), seat 1.1 (rank 3)" in end.reason


def test_workers_with_different_settings_do_not_start():
    membership = Membership(2)
    membership.receive(Ready(member(0), 0, job()), 0.0)
    (end,) = said(membership.receive(Ready(member(1), 0, job(run_dir="other")), 0.0), End)
    assert end.failed and "different recycle settings" in end.reason


@pytest.mark.parametrize("placement", ["deepspeed", "strict"])
def test_a_host_that_holds_a_whole_stage_is_named(placement):
    membership = Membership(4)
    for rank in range(4):
        out = membership.receive(
            Ready(member(rank, host="one" if rank < 2 else "two"), 0, job(placement=placement)), 0.0
        )
    texts = [event.text for event in out.events if "holds every replica" in event.text]
    assert bool(said(out, End)) is (placement == "strict")
    assert any("host one holds every replica of stage 0" in text for text in texts)


def test_a_worker_applies_a_step_only_when_the_one_before_is_committed():
    machine = StepMachine(0)
    machine.applied(1)
    assert not machine.may_apply(2)
    machine.commit(1)
    assert machine.may_apply(2)
    machine.applied(2)
    machine.resume(1, undo=False)
    assert (machine.stepped, machine.committed) == (2, 1)
    machine.resume(1, undo=True)
    assert (machine.stepped, machine.committed) == (1, 1)
    with pytest.raises(AssertionError):
        machine.resume(1, undo=True)


@pytest.mark.parametrize(("stepped", "committed"), [(3, 1), (1, 2), (0, 1)])
def test_a_worker_refuses_to_go_on_from_where_it_cannot(stepped, committed):
    machine = StepMachine(stepped)
    with pytest.raises(AssertionError):
        machine.resume(committed, undo=False)


@pytest.mark.parametrize("seed", range(300))
def test_random_histories_never_tear_a_step(seed):
    """Workers step, die and leave in random order: all machines obey every Resume, and commits never go back."""
    rng = random.Random(seed)
    membership = started()
    machines = {rank: StepMachine(0) for rank in range(4)}
    live, generation, committed = set(machines), 0, 0
    for _ in range(40):
        rank = rng.choice(sorted(live))
        outs: list[CoordinatorOutput] = []
        if rng.random() < 0.08:
            live.discard(rank)
            outs.append(membership.receive(Exited(rank, -9, 0.0), 0.0))
        elif machines[rank].may_apply(machines[rank].stepped + 1):
            machines[rank].applied(machines[rank].stepped + 1)
            outs.append(membership.receive(Stepped(rank, generation, machines[rank].stepped), 0.0))
        while outs:
            for whom, message in outs.pop(0).messages:
                match message:
                    case Committed():
                        assert whom == WORKERS and message.step == committed + 1
                        committed = message.step
                        for machine in (machines[r] for r in live):
                            machine.commit(message.step)
                    case Generation():
                        generation = message.number
                        order = rng.sample(sorted(live), len(live))
                        outs += [
                            membership.receive(SurvivorReport(r, generation, machines[r].stepped, "plan"), 0.0)
                            for r in order
                        ]
                    case Resume():
                        assert message.committed == committed
                        for r in sorted(live):
                            machines[r].resume(committed, undo=machines[r].stepped > committed and rng.random() < 0.3)
                            if machines[r].stepped > committed:
                                outs.append(membership.receive(Stepped(r, generation, machines[r].stepped), 0.0))
                    case End():
                        assert membership.state.attendance.empty_in(Roster(tuple(map(member, live))))
                        return


def test_nothing_is_committed_once_the_job_has_failed():
    """A norm that nobody has judged may be behind it."""
    membership = started()
    for rank in (2, 3):
        membership.receive(Exited(rank, -9, 0.0), 0.0)
    assert membership.ended.failed
    assert not any(membership.receive(Stepped(rank, 0, 1), 0.0).messages for rank in (0, 1))
    assert membership.committed == 0


@pytest.mark.parametrize("hosts", (1, 2))
def test_what_nobody_can_change_is_a_note_and_said_once(hosts):
    """All on one host is no place to spread workers over."""
    membership = Membership(4)
    for rank in range(4):
        out = membership.receive(Ready(member(rank, host=f"h{rank // 2 % hosts}"), 0, job()), 0.0)
    notes = [event.text for event in out.events if event.kind == "note"]
    assert notes == [
        "single point of failure: host h0 runs "
        + ("all workers, " if hosts == 1 else "")
        + "the coordinator; its loss ends the job"
    ]
    assert len([event for event in out.events if event.kind == "warning"]) == (0 if hosts == 1 else 2)


@pytest.mark.parametrize("replicas, log, warned", ((1, False, True), (1, True, False), (2, False, False)))
def test_a_job_that_survives_no_loss_says_so_at_its_start(replicas, log, warned):
    shape = {"replicas": replicas, "stages": 4 // replicas, "log": log}
    membership = Membership(4)
    for rank in range(4):
        out = membership.receive(Ready(member(rank, replicas=replicas), 0, job(**shape)), 0.0)
    said = [event.text for event in out.events if event.kind == "warning"]
    assert (
        said == ["each stage has one worker, so the first loss ends the job: start the job with more replicas"] * warned
    )
