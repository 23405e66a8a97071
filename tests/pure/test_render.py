"""What the pictures are made of; how they look is for eyes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, STAGE_WIDE, Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.span import Span, run_again
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.commands import curves
from recycle_plugin.lab.simulator import simulate
from recycle_plugin.planner import plan
from recycle_plugin.render import gantt, grid

COSTS = CostModel.uniform(2, 20, 20, 10, communication=10, reduce=20, step=10)
VIEW = Topology(2, 2, 2).full()
LOST = Seat(0, 1)


def spans(*lost: Seat) -> list[Span]:
    return simulate(plan(VIEW.without(*lost), COSTS, Policy()), COSTS)


def test_of_equal_bars_all_have_a_number_or_none() -> None:
    panel = gantt.Panel("", simulate(plan(Topology(3, 2, 12).full().without(LOST), COSTS, Policy()), COSTS))
    for length in range(1_000, 20_000, 250):
        texts, equal = gantt._texts([panel], length), defaultdict(set)
        for span in panel.spans:
            kind, took = gantt._kind(span), span.end_us - span.start_us
            has = bool(gantt.label(span.instruction, kind[1])) and took / length > texts.get(kind, 1.0)
            equal[kind, took].add(has)
        assert all(len(each) == 1 for each in equal.values())


def test_grid_of_a_simulated_step(golden) -> None:
    golden("simulated_degraded.txt", grid.draw(spans(LOST), tick_us=10))


def test_grid_refuses_ticks_of_no_length_and_draws_nothing_for_nothing() -> None:
    with pytest.raises(ValueError, match="tick_us is 0"):
        grid.draw(spans(), tick_us=0)
    assert grid.draw([]).strip() == "||"


def test_every_op_that_takes_time_has_a_colour_and_a_name() -> None:
    timed = {op for op in Op if op is Op.VALIDATE or replace(CostModel.uniform(1, 1, 1, 1, 0, 1, 1), tie=1).of(op, 0)}
    assert timed <= gantt.LOOKS.keys() == COMPUTE | STAGE_WIDE
    assert (
        len({look.colour for look in gantt.LOOKS.values()})
        == len({look.name for look in gantt.LOOKS.values()})
        == len(gantt.LOOKS)
    )
    assert len({op.value[0] for op in STAGE_WIDE}) == len(STAGE_WIDE), "in a grid they show their first letter"


@pytest.mark.parametrize("ending, magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_pictures_are_written(tmp_path, ending: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"steps.{ending}"
    gantt.draw(
        path, gantt.Panel("before the failure", spans()), gantt.Panel("after the failure", spans(LOST), {LOST: -5})
    )
    assert path.read_bytes().startswith(magic)


def test_what_was_run_once_more() -> None:
    """A forward that a peer repeats; not the reductions and steps that everybody has."""
    made = spans()
    first = next(span for span in made if span.seat == Seat(0, 1) and span.instruction.op is Op.F)
    again = first._replace(seat=Seat(1, 1), start_us=10**6, end_us=10**6 + 1)
    assert not run_again(made) and run_again([again, *made]) == {first: again}


def test_a_picture_of_nothing_is_refused(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing to draw"):
        gantt.draw(tmp_path / "no.png")


def test_idle_share_counts_a_dead_seat_until_its_death() -> None:
    forward = Instruction.parse("0F0.0")
    two = [Span(Seat(0, 0), forward, 0, 10), Span(Seat(1, 0), forward, 0, 5)]
    assert gantt.idle_share(two) == 0.25
    assert gantt.idle_share(two, {Seat(1, 0): 5}) == 0.0


def test_curves_side_by_side(golden) -> None:
    fault_free = {step: 3 - step / 8 for step in range(4)}
    golden("curves.txt", curves.table(fault_free, {**fault_free, 2: 2.75 + 3e-7}, killed_in=(2,)))
    assert curves.largest_difference({0: 1.0, 1: float("nan")}, {0: 1.0, 1: 1.0}) != 0
    with pytest.raises(ValueError, match="no step in common"):
        curves.table({1: 0.0}, {2: 0.0})
