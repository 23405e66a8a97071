"""Long jobs from step times: against the instruction-level simulation, caching, traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.planner.machine_costs import LOCAL, by_name
from recycle_plugin.lab.planner.profile import Wire
from recycle_plugin.lab.simulator import traces
from recycle_plugin.lab.simulator.history import (
    MembershipChange,
    SimulatedHistory,
    SimulatedTrainer,
    StepPeriods,
    pattern,
)
from recycle_plugin.lab.simulator.replay_cost import SimulatedLog
from recycle_plugin.lab.simulator.simulated_job import SimulatedJob

SHAPE = Topology(3, 3, 4)
COSTS = CostModel.uniform(3, 10_000, 10_000, 10_000, 1_000, 2_000, 3_000)
FREE = by_name("free")


def trainer(machine=FREE, **more) -> SimulatedTrainer:
    return SimulatedTrainer(SHAPE, COSTS, Policy(activation_cap=6), machine, **more)


def test_without_failures_steps_follow_each_other() -> None:
    history = trainer().run([], 100)
    assert history.steps == 1 + int((100e6 - history.full.first_us) // history.full.period_us)
    assert history.transitions == [] and history.fraction == pytest.approx(1, abs=0.01)


def late(
    shape: Topology, lost: tuple[Seat, ...], machine, instants: int = 24, steps: int = 5
) -> tuple[list[float], float]:
    """By how much the coarse job ends later than the one that is simulated instruction by instruction, for losses
    spread evenly over a step on a full pipeline; and how long noticing takes.  In steps of the pace after the loss.
    """
    costs, policy = (
        CostModel.uniform(shape.stages, 10_000, 10_000, 10_000, 1_000, 2_000, 3_000),
        Policy(activation_cap=2 * shape.stages),
    )
    paces = StepPeriods(costs, policy)
    full, slower = paces.of(shape.full()), paces.of(shape.full().without(*lost))
    found = []
    for number in range(instants):
        at_us = full.first_us + full.period_us * (instants + number) // instants + 1
        fine = SimulatedJob(shape.full(), costs, policy, machine).run(steps, deaths=dict.fromkeys(lost, at_us))
        before, after = (
            SimulatedTrainer(shape, costs, policy, machine, normalise=False)
            .run([MembershipChange(at_us / 1e6, seats=lost)], 100)
            .segments
        )
        end_us = after.first_s * 1e6 + (steps - before.steps - 1) * slower.period_us
        found.append((end_us - max(fine.commits.values())) / slower.period_us)
    return found, machine.detection_us / slower.period_us


CASES = {
    "last stage": (SHAPE, (Seat(1, 2),)),
    "first stage": (SHAPE, (Seat(0, 0),)),
    "two replicas": (Topology(2, 2, 4), (Seat(0, 1),)),
    "two of a stage": (Topology(4, 3, 6), (Seat(0, 1), Seat(3, 1))),
    "a replica": (Topology(4, 3, 6), (Seat(2, 0), Seat(2, 1), Seat(2, 2))),
}


@pytest.mark.parametrize("machine", [FREE, replace(LOCAL, commit_us=0)], ids=["free", "local"])
@pytest.mark.parametrize("case", CASES)
def test_a_loss_costs_what_it_costs_instruction_by_instruction(case: str, machine) -> None:
    """Within 0.12 of a step, and 0.1 on average; too much by no more than the time to notice, in which survivors do
    work here. Beyond that are instants within a step's last instructions, when the lost worker had summed its gradients
    already: one in eight.
    """
    found, notice = late(*CASES[case], machine)
    assert -0.03 <= mean(found) <= 0.1 + notice
    assert min(found) >= -0.12 and sorted(found)[len(found) * 7 // 8 - 1] <= 0.12 + notice


def test_memberships_that_differ_in_names_only_are_one() -> None:
    paces = StepPeriods(COSTS, Policy())
    one, two = SHAPE.full().without(Seat(0, 1)), SHAPE.full().without(Seat(2, 1))
    assert pattern(one) == pattern(two) and paces.of(one) is paces.of(two) and len(paces) == 1
    assert pattern(SHAPE.full().without(Seat(0, 1), Seat(0, 2))) != pattern(
        SHAPE.full().without(Seat(0, 1), Seat(1, 2))
    )


def test_changes_in_a_row_and_during_a_pause() -> None:
    slow = replace(FREE, detection_us=5_000_000)
    history = trainer(slow).run(
        [
            MembershipChange(10, lost=1),
            MembershipChange(12, lost=1),
            MembershipChange(13, joined=1),
            MembershipChange(50, joined=1),
        ],
        100,
    )
    assert [len(transition.lost) for transition in history.transitions] == [1, 1, 0, 0]
    assert [segment.live for segment in history.segments] == [9, 7, 8, 9]
    assert history.segments[1].start_s == pytest.approx(17.01, abs=0.05), "5 s after the second loss"
    assert all(one.end_s <= two.start_s for one, two in zip(history.segments, history.segments[1:]))


def test_workers_that_return_within_a_step_enter_together() -> None:
    history = trainer().run(
        [MembershipChange(10, lost=2), MembershipChange(20.001, joined=1), MembershipChange(20.002, joined=1)], 30
    )
    assert [len(transition.joined) for transition in history.transitions] == [0, 2]


def test_a_loss_moves_the_line_at_which_others_return() -> None:
    slow = replace(FREE, detection_us=5_000_000)
    history = trainer(slow).run(
        [MembershipChange(10, lost=1), MembershipChange(20.001, joined=1), MembershipChange(20.002, lost=1)], 60
    )
    assert [(len(transition.lost), len(transition.joined)) for transition in history.transitions] == [
        (1, 0),
        (1, 0),
        (0, 1),
    ]
    assert history.transitions[2].at_s > 25


def test_time_is_accounted_for() -> None:
    """Steps, fills, redone work and pauses fill the hours, up to a step at the end."""
    history = trainer(LOCAL, seed=3).run(traces.regular(60, 1800, 100), 1800)
    worked = sum(segment.steps * segment.pace.period_us for segment in history.segments) / 1e6
    fill = (history.full.first_us - history.full.period_us) / 1e6
    assert worked + history.lost_s + fill == pytest.approx(1800, abs=history.full.period_us * 2e-6 + 0.1)


def test_the_same_seed_is_the_same_job_and_another_is_not() -> None:
    def lost(seed: int) -> list:
        return [transition.lost for transition in trainer(seed=seed).run(traces.regular(60, 600, 50), 600).transitions]

    assert lost(1) == lost(1) != lost(2)


def test_normalisation_moves_a_worker_where_it_pays() -> None:
    both = [MembershipChange(1, seats=(Seat(0, 1),)), MembershipChange(2, seats=(Seat(1, 1),))]
    moved, kept = trainer().run(both, 200), trainer(normalise=False).run(both, 200)
    assert moved.transitions[1].moves and max(moved.segments[-1].lost_by_stage) == 1
    assert kept.segments[-1].lost_by_stage == (0, 2, 0) and moved.steps > kept.steps


def test_the_last_worker_of_a_stage() -> None:
    with pytest.raises(ValueError, match="stage 1 loses its last worker: without a log"):
        trainer(normalise=False).run([MembershipChange(1, seats=tuple(Seat(replica, 1) for replica in range(3)))], 10)
    with pytest.raises(ValueError, match="leaves a stage without a worker: without a log"):
        trainer().run([MembershipChange(1, lost=7)], 10)


EVEN = CostModel.uniform(3, 10_000, 10_000, 10_000, step=6_000)
MEMORY = (StageBytes(9_000_000, 0, 18_000_000, 0, 9_000_000, 0, 500_000, "cpu", 0, 0, 1),) * 3


@pytest.mark.parametrize(
    ("lost", "ties", "memory", "step_s", "load_s"),
    [
        ("0.1 1.1", (), (), 2 * 0.03 + 0.006, 0.0),  # eight micro-batches, shared with the four that are left
        ("0.1 1.1", ((0, 1),), (), 8 * 0.03 + 0.006, 0.0),
        ("0.0 1.0 0.2 1.2", (), (), 8 * 0.03 + 0.006, 0.0),
        ("0.1 1.1 0.2 1.2", (), (), 2 * (8 * 0.03 + 0.006), 0.0),  # neighbours wait for each other
        ("0.1 1.1", (), MEMORY, 0.066 + 2 * 2 * 2 * 0.0005 + 4 * 2 * (0.00003 + 0.001), 0.027),
    ],
)
def test_a_replay_takes_what_doctor_predicts_shared_by_helpers(lost, ties, memory, step_s, load_s) -> None:
    left = Topology(2, 3, 4, ties).full().without(*map(Seat.parse, lost.split()))
    log = SimulatedLog(10, EVEN, Policy(), memory, Wire(30, 9_000))
    assert log.replay_s(left, 7) == pytest.approx(load_s + 7 * step_s)


def test_the_next_worker_that_comes_replays_the_steps_since_the_last_checkpoint() -> None:
    seat = Seat(0, 1)

    def played(every: int, *at_s: float, away_s: float = 1) -> SimulatedHistory:
        log = SimulatedLog(every, EVEN, Policy(), (), LOCAL.copy)
        losses = [MembershipChange(at, seats=(seat,)) for at in at_s]
        returns = [MembershipChange(at + away_s, joined=1) for at in at_s]
        return SimulatedTrainer(Topology(1, 3, 4), EVEN, Policy(), LOCAL, log=log).run([*losses, *returns], 300)

    one, more = played(50, 60), played(10**6, 60, 90, 200)
    (first,) = one.transitions
    before, pause = one.segments[0].steps, LOCAL.detection_us / 1e6 + 0.005
    assert first.lost == first.joined == (seat,) and before % 50
    assert first.replay_s == pytest.approx(before % 50 * 0.066), "two of four micro-batches"
    assert first.restart_s == pytest.approx(1 + LOCAL.return_us / 1e6 - pause)
    assert one.segments[1].start_s == pytest.approx(60 + first.pause_s) and one.segments[1].live == 3
    steps, later, _ = (each.steps for each in more.segments)
    replayed = [round(each.replay_s / 0.066) for each in more.transitions]
    assert replayed == [steps, steps, later], (
        "the second loss strikes in the replay, and each replay makes a checkpoint"
    )
    with pytest.raises(ValueError, match="nobody replays it within 900 s"):
        played(50, 60, away_s=900)


def test_a_loss_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="seat 0.1, which no live worker holds"):
        trainer().run([MembershipChange(1, seats=(Seat(0, 1),)), MembershipChange(2, seats=(Seat(0, 1),))], 10)


def test_the_gcp_trace_is_that_of_the_papers() -> None:
    changes, end = traces.read("gcp", 24)
    assert end == pytest.approx(6.32 * 3600) and changes[0] == MembershipChange(pytest.approx(432), lost=1)
    there = least = 24
    for change in changes:
        there += change.joined - change.lost
        least = min(least, there)
    assert there == 24 and least == 15


def test_traces_from_files(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("0 9 | 0.5 8  # a comment\n0.75 lost 0.1,1.2\n1 end")
    changes, end = traces.read(str(path), 9)
    assert end == 3600
    assert changes == [
        MembershipChange(1800.0, lost=1),
        MembershipChange(2700.0, seats=(Seat(0, 1), Seat(1, 2))),
    ]
    path.write_text('{"gpus": [[-0.0, 9], [0.5, 7.99], [1, 9]]}')
    assert traces.read(str(path), 9) == ([MembershipChange(1800.0, lost=1), MembershipChange(3600.0, joined=1)], None)


@pytest.mark.parametrize(
    "text, says", [("0 10", "1 to 9"), ("1 9 | 0.5 8", "rise"), ("0 nine", "nine"), ("1 9 8 7", "hour workers")]
)
def test_broken_traces(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        traces.read(str(path), 9)
