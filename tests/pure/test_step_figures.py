"""Figures of committed steps from what workers say of them."""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.step_figures import StepFigures
from recycle_plugin.core.messages.from_coordinator import Committed
from recycle_plugin.core.messages.from_workers import Stepped
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import said, started

SQUARE = {0: 0, 1: 1, 2: 0, 3: 1}  # of each rank its stage


def told(work: StepFigures, step: int, spent: dict[int, tuple[int, int]]) -> None:
    for rank, (spent_us, again_us) in spent.items():
        work.add(WorkerId(rank), step, ComputeTime(spent_us, spent_us, again_us))


def test_bubbles_and_redone_work_are_shares_of_all_live_workers():
    work = StepFigures()
    told(work, 1, dict.fromkeys(range(4), (100_000, 0)))
    assert work.committed(1, SQUARE, 10.0) == ({"workers": 4, "redone_share": 0.0}, {"redone_s": 0.0})  # since when?
    told(work, 2, dict.fromkeys(range(3), (600_000, 150_000)))
    figures, more = work.committed(2, {0: 0, 1: 1, 2: 0}, 11.0)
    assert figures == {"workers": 3, "step_s": 1.0, "bubble_share": 0.4, "redone_share": 0.25}
    assert more == {"redone_s": 0.45, "stage_bubbles": [0.4, 0.4]}


def test_bubbles_of_a_stage_are_of_its_live_workers():
    """Rank 3 is lost: what it said of the step counts as computed, and for no stage's live workers."""
    work = StepFigures()
    work.committed(1, SQUARE, 1.0)
    told(work, 2, {0: (900_000, 0), 1: (500_000, 0), 2: (700_000, 0), 3: (100_000, 0)})
    figures, more = work.committed(2, {0: 0, 1: 1, 2: 0}, 2.0)
    assert (figures["bubble_share"], more["stage_bubbles"]) == (round(1 - 2.2 / 3, 4), [0.2, 0.5])


def test_what_is_said_of_a_later_step_waits_for_it():
    work = StepFigures()
    told(work, 2, {0: (1_000_000, 0)})
    assert work.committed(1, {0: 0}, 0.0) == ({"workers": 1}, {"redone_s": 0.0})
    told(work, 2, {0: (500_000, 500_000)})  # it was taken back and applied again
    figures, more = work.committed(2, {0: 0}, 2.0)
    assert figures == {"workers": 1, "step_s": 2.0, "bubble_share": 0.25, "redone_share": 0.3333}
    assert more["redone_s"] == 0.5


def test_steps_that_overlap_are_no_negative_bubble():
    work = StepFigures()
    work.committed(1, {0: 0}, 1.0)
    told(work, 2, {0: (1_500_000, 0)})
    figures, more = work.committed(2, {0: 0}, 2.0)
    assert figures["bubble_share"] == 0.0 and more["stage_bubbles"] == [0.0]


def test_everybody_hears_the_figures_and_so_does_the_log():
    membership = started()
    for step, now in ((1, 1.0), (2, 1.5)):
        for rank in range(4):
            out = membership.receive(Stepped(rank, 0, step, time=ComputeTime(250_000, 250_000)), now)
    expected = {"workers": 4, "step_s": 0.5, "bubble_share": 0.5, "redone_share": 0.0}
    assert [commit.figures for commit in said(out, Committed)] == [expected]
    assert [event.details for event in out.events if event.kind == "committed"] == [
        {"step": 2, **expected, "redone_s": 0.0, "stage_bubbles": [0.5, 0.5]}
    ]


def test_paces_deal_nothing_out_anew_unless_that_is_wanted():
    for wanted in (False, True):
        membership = started(rebalance=wanted)
        for step in (1, 2, 3):
            for rank in range(4):
                time = ComputeTime(2000 if rank == 2 else 1000, 1000)
                membership.receive(Stepped(rank, 0, step, time=time), 0.0)
        assert membership.generation == int(wanted)
