"""What all do together outside a step: met by all or by nobody, and the way back to a checkpoint's step."""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.from_coordinator import BarrierPassed, Committed, End, Generation, Over, Resume
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    Exited,
    Leaving,
    Left,
    Resized,
    SurvivorReport,
    Terminate,
)
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.worker.control_view import ControlView, JobEnded
from recycle_plugin.core.worker.executor import Interrupted
from tests.support.membership import agree, holds, resumed, said, started, step

HERE, LAST = Barrier(Meets.SCRIPT, "here"), Barrier(Meets.SCRIPT, "the last save")


def arrive(membership, generation: int, ranks, barrier: Barrier = HERE) -> list[BarrierPassed]:
    reached = [BarrierReached(rank, generation, barrier, {str(rank): rank}) for rank in ranks]
    return [met for each in reached for met in said(membership.receive(each, 0.0), BarrierPassed)]


def from_checkpoint(rank: int) -> BarrierReached:
    return BarrierReached(rank, 0, Barrier(Meets.LOADED), {})


def test_all_meet_when_the_last_one_arrives_and_know_what_each_has_brought():
    membership = started()
    step(membership, 0, 1)
    assert arrive(membership, 0, [2, 0, 1]) == []
    assert arrive(membership, 0, [3]) == [BarrierPassed(HERE, {"0": 0, "1": 1, "2": 2, "3": 3}, 4)]
    assert arrive(membership, 0, [0, 1, 2]) == []  # the next one at the same place needs all again


def at_its_end():
    """A membership that has committed all steps up to a planned end, and the three that wait for rank 2 to save the
    last one.
    """
    membership = started()
    (end,) = said(membership.receive(Terminate(0, "SIGTERM"), 0.0), End)
    for number in range(1, end.step):
        step(membership, 0, number)
    assert arrive(membership, 0, [0, 1, 3], LAST) == []
    return membership, end.step - 1


def test_a_death_in_the_last_save_before_a_planned_end_makes_everybody_save_once_more():
    membership, last = at_its_end()
    (generation,) = said(membership.receive(Exited(2, -9, 0.0), 0.0), Generation)
    agree(membership, generation.number, dict.fromkeys((0, 1, 3), last))
    assert [met.values.keys() for met in arrive(membership, generation.number, [0, 1, 3], LAST)] == [{"0", "1", "3"}]
    for rank in (0, 1, 3):
        out = membership.receive(Left(rank), 0.0)
    assert said(out, Over) == [Over(0)]


def test_a_stage_lost_in_the_last_save_before_a_planned_end_ends_the_job_and_says_what_is_missing():
    membership, _ = at_its_end()
    membership.receive(Exited(2, -9, 0.0), 0.0)
    (end,) = said(membership.receive(Exited(3, -9, 0.0), 0.0), End)
    assert end.failed and end.reason.startswith("stage 1 has no live worker left")


def test_who_comes_to_save_when_a_stage_is_lost_at_a_planned_end_does_not_wait_for_it():
    membership = started()
    (end,) = said(membership.receive(Terminate(0, "SIGTERM"), 0.0), End)
    for number in range(1, end.step):
        step(membership, 0, number)
    for rank in (2, 3):
        assert not said(membership.receive(Exited(rank, -9, 0.0), 0.0), End), "they may have nothing more to do"
    out = membership.receive(BarrierReached(0, membership.generation, LAST, {}), 0.0)
    assert [each.reason for each in said(out, End)] == ["stage 1 has no live worker left. No checkpoint was saved"]


def test_places_do_not_mix():
    membership = started()
    assert arrive(membership, 0, [0, 1], HERE) + arrive(membership, 0, [2, 3], LAST) == []
    assert [met.barrier for met in arrive(membership, 0, [0, 1], LAST)] == [LAST]


def test_a_death_before_all_have_arrived_makes_everybody_arrive_once_more():
    membership = started()
    arrive(membership, 0, [0, 1, 3])
    membership.receive(Exited(2, -9, 0.0), 0.0)
    assert arrive(membership, 0, [2, 0, 1, 3]) == []  # of the old generation
    agree(membership, 1, dict.fromkeys((0, 1, 3), 0))
    assert arrive(membership, 1, [0, 1]) == []
    assert len(arrive(membership, 1, [3])) == 1


@pytest.mark.parametrize("order", ("met", "generation"))
def test_a_worker_hears_of_the_meeting_or_of_the_change_whichever_came_first(order):
    line, met, generation = (
        ControlView(0),
        BarrierPassed(HERE, {}, 4),
        Generation(1, (), 0, "loss", 0.0),
    )
    assert line.barrier_passed(HERE, 0) is None
    for message in (met, generation) if order == "met" else (generation,):
        line.take(message)
    assert line.barrier_passed(HERE, 0) == (met if order == "met" else False)
    assert line.barrier_passed(HERE, 0) is False
    with pytest.raises(Interrupted):
        line.check()


def test_a_newcomer_is_not_through_what_the_members_have_met_at_before_it_was_one():
    """Scripts come to a place of the same name again."""
    newcomer, generation = ControlView(0, 1), Generation(1, (), 0, "return", 0.0)
    for message in (BarrierPassed(HERE, {}, 4), generation, Resume(1, 4)):
        newcomer.take(message)
    newcomer.adopt(generation)
    assert newcomer.barrier_passed(HERE, 1) is None
    newcomer.take(BarrierPassed(HERE, {}, 5))
    assert newcomer.barrier_passed(HERE, 1) == BarrierPassed(HERE, {}, 5)


@pytest.mark.parametrize("loaded", (1, 2, 9))
def test_everybody_goes_on_from_a_checkpoint_earlier_or_later(loaded):
    membership = started()
    for number in (1, 2, 3):
        step(membership, 0, number)
    for rank in (0, 1, 2):
        assert membership.receive(from_checkpoint(rank), 0.0).messages == []
    (generation,) = said(membership.receive(from_checkpoint(3), 0.0), Generation)
    for rank in range(4):
        out = membership.receive(SurvivorReport(rank, 1, loaded, "plan", holds(rank), {}, True), 0.0)
    assert resumed(out) == [(generation.number, loaded)] and not said(out, Committed)
    assert step(membership, 1, loaded + 1) == [Committed(loaded + 1)]


def test_a_death_while_loading_changes_nothing_of_that():
    membership = started()
    step(membership, 0, 1)
    membership.receive(from_checkpoint(0), 0.0)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    for rank in (0, 1, 3):
        out = membership.receive(SurvivorReport(rank, 1, 7, "plan", holds(rank), {}, True), 0.0)
    assert resumed(out) == [(1, 7)]
    assert step(membership, 1, 8, [0, 1, 3]) == [Committed(8)]


@pytest.mark.parametrize("others", ((8, True), (0, False)))
def test_different_checkpoints_end_the_job(others):
    membership = started()
    for rank in range(4):
        membership.receive(from_checkpoint(rank), 0.0)
    for rank in range(4):
        stepped, loaded = others if rank > 1 else (7, True)
        out = membership.receive(SurvivorReport(rank, 1, stepped, "plan", {}, {}, loaded), 0.0)
    (end,) = said(out, End)
    assert end.failed and "checkpoints of different steps" in end.reason and not said(out, Resume)


def test_who_has_loaded_another_checkpoint_than_most_goes():
    membership = started()
    for rank in range(4):
        membership.receive(from_checkpoint(rank), 0.0)
    for rank in range(4):
        out = membership.receive(SurvivorReport(rank, 1, 8 if rank == 3 else 7, "plan", {}, {}, True), 0.0)
    (lost,) = [event for event in out.events if event.kind == "lost"]
    assert lost.details["rank"] == 3 and lost.details["cause"] == "confused" and membership.ended is None
    assert "it has loaded a checkpoint of step 8, and most others a checkpoint of step 7" in lost.text


def test_a_checkpoint_cannot_be_loaded_in_the_middle_of_a_step():
    machine = StepMachine(4)
    machine.rewind(2)
    assert (machine.stepped, machine.committed) == (2, 2)
    machine.applied(3)
    with pytest.raises(AssertionError, match="step 3 is applied and not committed"):
        machine.rewind(2)


def test_a_rewound_line_knows_nothing_of_later_steps():
    line = ControlView(0)
    line.take(Committed(5))
    line.rewind(2)
    assert line.is_committed(2) and not line.is_committed(3)
    line.take(End(0, "over", False))
    with pytest.raises(JobEnded):
        line.check_end()


@pytest.mark.parametrize("first", ("workers", "supervisors"))
def test_sigterm_to_everything_at_once_ends_the_job_as_planned(first):
    """In either order: those who were to leave are among those who end."""
    membership, ranks = started(), range(4)
    messages = [Leaving(rank, "SIGTERM") for rank in ranks[:3]], [Terminate(rank, "SIGTERM") for rank in ranks]
    for message in (message for group in (messages if first == "workers" else messages[::-1]) for message in group):
        out = membership.receive(message, 0.0)
        assert first == "workers" or not said(out, Generation), "everybody ends anyway"
    assert membership.ended is not None and not membership.ended.failed
    for number in (1, 2):
        step(membership, 0, number)
    outs = [membership.receive(Left(rank), 0.0) for rank in ranks]
    assert not any(said(out, End) or said(out, Generation) for out in outs)
    assert said(outs[-1], Over) == [Over(0)]


# --- another batch size -----------------------------------------------------------------------------


def meet(membership: Membership, generation: int) -> None:
    """All come to a barrier, behind which they plan for another size."""
    for rank in range(4):
        membership.receive(BarrierReached(rank, generation, Barrier(Meets.SCRIPT, "set_train_batch_size()"), {}), 0.0)


def test_all_plan_for_another_batch_size_before_anybody_goes_on():
    membership = started()
    step(membership, 0, 1)
    assert not membership.receive(Resized(0, 0, 5, 20, 77), 0.0).events, "they have not met"
    meet(membership, 0)
    outs = [membership.receive(Resized(rank, 0, 5, 20, 77), 0.0) for rank in range(4)]
    assert [bool(said(out, Generation)) for out in outs] == [False, False, False, True]
    (event,) = [event for out in outs for event in out.events if event.kind == "batch"]
    assert event.details == {"step": 2, "batch": 20, "micro_batches": 5}
    for rank in range(4):
        out = membership.receive(SurvivorReport(rank, 1, 1, "plan", holds(rank), {}, False, 154), 0.0)
    assert resumed(out) == [(1, 1)] and step(membership, 1, 2) == [Committed(2)]
    meet(membership, 1)
    assert not membership.receive(Resized(0, 0, 1, 4, 77), 0.0).events, "that is what it has said before"


@pytest.mark.parametrize("meets", [Meets.RESIZED, Meets.LOADED])
def test_a_scripts_barrier_is_another_one_than_those_at_which_all_regroup_whatever_its_name(meets):
    membership = started()
    step(membership, 0, 1)
    assert arrive(membership, 0, [0, 1, 3], Barrier(Meets.SCRIPT, meets)) == []
    for message in (Resized(2, 0, 5, 20, 77), from_checkpoint(2)):
        assert not said(membership.receive(message, 0.0), Generation)


def test_a_death_meanwhile_leaves_the_new_size_to_the_others():
    """They have met, so that each of them plans for it; the throughput is that of its own plan with everybody there."""
    membership = started()
    step(membership, 0, 1)
    meet(membership, 0)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    for rank in (0, 1, 3):
        assert not said(membership.receive(Resized(rank, 0, 5, 20, 77), 0.0), Generation)
        out = membership.receive(SurvivorReport(rank, 1, 1, "plan", holds(rank), {}, False, 154), 0.0)
    assert resumed(out) == [(1, 1)] and membership.state.attendance.view(membership.roster).topology.micro_batches == 5
    assert membership.state.throughput.share(154) == 0.5


def test_who_has_come_to_one_beside_its_training_is_still_there_behind_another_one():
    """As with a checkpoint that some still write while all evaluate: nobody says twice that it has written."""
    membership = started()
    step(membership, 0, 1)

    def written(rank: int) -> list[BarrierPassed]:
        reached = BarrierReached(rank, 0, Barrier(Meets.WRITTEN, "automatic_step3"), {})
        return said(membership.receive(reached, 0.0), BarrierPassed)

    assert not any(map(written, (0, 1, 3)))
    assert len(arrive(membership, 0, [0, 1, 2, 3], HERE)) == 1
    assert len(written(2)) == 1
