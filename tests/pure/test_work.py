"""Figures of committed steps from what workers say of them."""

from __future__ import annotations

from recycle_plugin.core.protocol import Committed, Pace, Stepped
from recycle_plugin.core.work import Work
from tests.support.membership import said, started


def told(work: Work, step: int, spent: dict[int, tuple[int, int]]) -> None:
    for rank, (spent_us, again_us) in spent.items():
        work.add(Pace(rank, step, spent_us, spent_us, again_us))


def test_bubbles_and_redone_work_are_shares_of_all_live_workers():
    work = Work()
    told(work, 1, dict.fromkeys(range(4), (100_000, 0)))
    assert work.committed(1, 4, 10.0) == {"workers": 4, "redone_share": 0.0}  # since when?
    told(work, 2, dict.fromkeys(range(3), (600_000, 150_000)))
    assert work.committed(2, 3, 11.0) == {"workers": 3, "step_s": 1.0, "bubble_share": 0.4, "redone_share": 0.25}


def test_what_is_said_of_a_later_step_waits_for_it():
    work = Work()
    told(work, 2, {0: (1_000_000, 0)})
    assert work.committed(1, 1, 0.0) == {"workers": 1}
    told(work, 2, {0: (500_000, 500_000)})  # it was taken back and applied again
    assert work.committed(2, 1, 2.0) == {"workers": 1, "step_s": 2.0, "bubble_share": 0.25, "redone_share": 0.3333}


def test_steps_that_overlap_are_no_negative_bubble():
    work = Work()
    work.committed(1, 1, 1.0)
    told(work, 2, {0: (1_500_000, 0)})
    assert work.committed(2, 1, 2.0)["bubble_share"] == 0.0


def test_everybody_hears_the_figures_and_so_does_the_log():
    membership = started()
    for step, now in ((1, 1.0), (2, 1.5)):
        for rank in range(4):
            membership.receive(Pace(rank, step, 250_000, 250_000), now)
            out = membership.receive(Stepped(rank, 0, step), now)
    expected = {"workers": 4, "step_s": 0.5, "bubble_share": 0.5, "redone_share": 0.0}
    assert [commit.figures for commit in said(out, Committed)] == [expected]
    assert [event.details for event in out.events if event.kind == "committed"] == [{"step": 2, **expected}]


def test_paces_deal_nothing_out_anew_unless_that_is_wanted():
    for wanted in (False, True):
        membership = started(rebalance=wanted)
        for step in (1, 2, 3):
            for rank in range(4):
                membership.receive(Pace(rank, step, 2000 if rank == 2 else 1000, 1000), 0.0)
                membership.receive(Stepped(rank, 0, step), 0.0)
        assert membership.generation == int(wanted)
