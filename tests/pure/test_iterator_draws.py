"""Plain iterators: after any losses both ends of a micro-batch have the same draw, and no survivor's sample is left out
or used twice.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import Draw, Gone, IteratorState, pack, share, unpack
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.recovery_plan import Torn
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.planner import plan

names = st.builds(MicroBatch, st.integers(0, 50), st.integers(0, 99))
drawn = st.dictionaries(
    st.integers(1, 10**6),
    st.dictionaries(names, st.builds(Draw, st.integers(0, 50), st.integers(0, 200)), min_size=1),
    max_size=2,
)


@given(drawn)
def test_what_was_drawn_travels_as_text(batches) -> None:
    assert unpack(pack(batches)) == batches


@cache
def planned(view: ClusterView) -> Plan:
    return plan(view, CostModel.uniform(view.topology.stages), Policy())


class Ends:
    """The workers of the first and last stage, which draw, hand out, and die; of the rest only what was computed."""

    def __init__(self, topology: Topology) -> None:
        self.view = topology.full()
        self.kept: dict[Seat, dict[MicroBatch, Draw]] = {}
        self.reads: dict[Seat, list[tuple[int, int]]] = {seat: [] for seat in self.ends}
        self.traces: dict[Seat, set[MicroBatch]] = {}
        self.traced_with: dict[MicroBatch, Draw] = {}

    @property
    def ends(self) -> list[Seat]:
        return sorted(seat for seat in self.view.live if seat.stage in (0, self.view.topology.stages - 1))

    def begin(self, step: int) -> None:
        self.step = step
        self.kept, self.traces, self.traced_with = (
            {seat: {} for seat in self.ends},
            {seat: set() for seat in self.view.live},
            {},
        )
        self.meet()

    def meet(self) -> None:
        held = {
            seat: frozenset(
                (
                    Datum("params", seat.stage, None, self.step),
                    *(Datum("act", 0, one, self.step) for one in self.traces[seat]),
                )
            )
            for seat in self.view.live
        }
        self.iterator_state = IteratorState(
            planned(self.view),
            held,
            {seat: {self.step: dict(self.kept[seat])} for seat in self.ends if self.kept[seat]},
            {},
        )

    def provide(self, seat: Seat, sends: int | None = None) -> None:
        """``sends``: how many copies leave it before it dies."""
        shared = share(self.iterator_state, self.step)
        for draw, micro_batch in shared.of(seat):
            if micro_batch not in self.kept[seat]:
                while (count := sum(step == self.step for step, _ in self.reads[seat])) <= draw.position:
                    self.reads[seat].append((self.step, count))
                self.kept[seat][micro_batch] = draw
        for transfer in [each for each in shared.transfers if each.giver == seat][:sends]:
            self.kept[transfer.taker][transfer.micro_batch] = self.kept[seat][transfer.micro_batch]

    def compute(self, micro_batch: MicroBatch, at: Seat) -> None:
        """The worker at ``at`` gets an activation of a micro-batch that was loaded and copied."""
        self.traces[at].add(micro_batch)
        self.traced_with[micro_batch] = self.kept[planned(self.view).route[0, micro_batch]][micro_batch]

    def die(self, *seats: Seat) -> None:
        self.view = self.view.without(*seats)
        self.kept = {seat: kept for seat, kept in self.kept.items() if seat in self.view.live}
        self.traces = {seat: traces for seat, traces in self.traces.items() if seat in self.view.live}
        self.meet()

    def check(self) -> None:
        route, last, batch = planned(self.view).route, self.view.topology.stages - 1, self.view.topology.batch
        draws = {one: self.kept[route[0, one]][one] for one in batch}
        assert draws == {one: self.kept[route[last, one]][one] for one in batch}, "an input meets another draw's label"
        assert len(set(draws.values())) == len(batch), "a draw is used twice"
        alive = self.iterator_state.sources
        assert all(draws[one] == Draw(*one) for one in batch if one.replica in alive)
        for one in set().union(*self.traces.values()):
            assert draws[one] == self.traced_with[one], f"{one} was computed with another draw"
        for source in alive:
            assert self.reads[Seat(source, 0)] == self.reads[Seat(source, last)], (
                "the ends stand at different positions"
            )
            used = sorted(draw.position for draw in draws.values() if draw.source == source)
            assert [(self.step, position) for position in used] == [
                read for read in self.reads[Seat(source, 0)] if read[0] == self.step
            ]


@st.composite
def shapes(draw: st.DrawFn) -> Topology:
    return Topology(draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))


def mortal(view: ClusterView) -> list[Seat]:
    return sorted(seat for seat in view.live if len(view.live_replicas(seat.stage)) > 1)


@given(shapes(), st.booleans(), st.data())
@settings(max_examples=300)
def test_any_losses_at_any_point(topology: Topology, one_a_step: bool, drawn: st.DataObject) -> None:
    """One loss a step never costs data that something was computed with; more may, and then that is said."""
    ends = Ends(topology)
    for step in range(1, 4):
        ends.begin(step)
        try:
            for _ in range(drawn.draw(st.integers(0, 1 if one_a_step else 3))):
                lose_some(ends, one_a_step, drawn)
            for seat in drawn.draw(st.permutations(ends.ends)):
                ends.provide(seat)
        except Gone as gone:
            if ends.iterator_state.sources:
                assert not one_a_step and "all workers that kept" in str(gone)
            return
        ends.check()


def lose_some(ends: Ends, only_one: bool, drawn: st.DataObject) -> None:
    """Some of the ends provide, something is computed of what they have, and somebody dies, perhaps while it hands
    out.
    """
    order = drawn.draw(st.permutations(ends.ends))
    ready = order[: drawn.draw(st.integers(0, len(order)))]
    for seat in ready:
        ends.provide(seat)
    route = planned(ends.view).route
    able = [one for one in ends.view.topology.batch if _copied(ends, one, route[0, one], ready)]
    for one in able:
        if drawn.draw(st.booleans()):
            ends.compute(one, drawn.draw(st.sampled_from(sorted(ends.view.live))))
    victims = mortal(ends.view)
    if not victims:
        return
    victim = drawn.draw(st.sampled_from(victims))
    others = [] if only_one else mortal(ends.view.without(victim))
    if victim in ends.ends and victim not in ready and drawn.draw(st.booleans()):
        ends.provide(victim, drawn.draw(st.integers(0, 3)))
    ends.die(victim, *([drawn.draw(st.sampled_from(others))] if others and drawn.draw(st.booleans()) else []))


def _copied(ends: Ends, one: MicroBatch, runner: Seat, ready: list[Seat]) -> bool:
    """Whether the runner has it, and whoever had to hand it out has done so."""
    givers = {
        transfer.giver
        for transfer in share(ends.iterator_state, ends.step).transfers
        if transfer.micro_batch == one and transfer.taker.stage == 0
    }
    return one in ends.kept[runner] and givers <= set(ready)


SQUARE = Topology(2, 2, 2)


def test_a_lost_replicas_share_is_dealt_evenly_behind_the_sources_own() -> None:
    view = Topology(4, 2, 3).full().without(Seat(1, 1))
    found = share(IteratorState(planned(view), {}, {}, {}), 9)
    assert found.dealt == {MicroBatch(1, 0): Draw(0, 3), MicroBatch(1, 1): Draw(2, 3), MicroBatch(1, 2): Draw(3, 3)}
    assert [str(draw) for draw, _ in found.of(Seat(2, 0))] == ["2.0", "2.1", "2.2", "2.3"]


def test_what_was_computed_with_data_that_nobody_has_ends_the_job() -> None:
    view = Topology(3, 2, 2).full().without(Seat(0, 0), Seat(1, 0))
    held = {Seat(0, 1): frozenset({Datum("act", 0, MicroBatch(0, 1), 5)})}
    labels = {Seat(0, 1): {5: {MicroBatch(0, 0): Draw(0, 0), MicroBatch(0, 1): Draw(0, 1)}}}
    with pytest.raises(Gone, match=r"step 5: all workers that kept the data of micro-batch 0\.1 are lost"):
        share(IteratorState(planned(view), held, {}, {}), 5)
    with pytest.raises(Gone, match=r"step 5: all workers that kept the inputs of micro-batch 0\.1 are lost"):
        share(IteratorState(planned(view), held, labels, {}), 5)
    unseen = share(IteratorState(planned(view), {}, labels, {}), 5)
    assert unseen.draws[MicroBatch(0, 1)] == Draw(0, 1), (
        "the other end's draw will do where nobody has computed with the lost one"
    )


def test_without_a_source_the_job_ends() -> None:
    view = SQUARE.full().without(Seat(0, 0), Seat(1, 1))
    with pytest.raises(Gone, match="no replica has both its first and its last stage left"):
        share(IteratorState(planned(view), {}, {}, {}), 5)


def test_two_draws_for_one_micro_batch_are_a_contradiction() -> None:
    drawn = {Seat(0, 0): {5: {MicroBatch(0, 0): Draw(0, 0)}}, Seat(1, 0): {5: {MicroBatch(0, 0): Draw(1, 2)}}}
    with pytest.raises(
        Torn, match=r"seat 1\.0 has draw 1\.2 for micro-batch 0\.0 of step 5, and another worker draw 0\.0"
    ):
        share(IteratorState(planned(SQUARE.full()), {}, drawn, {}), 5)


def test_who_comes_back_in_the_midst_of_a_step_leaves_no_batch_out() -> None:
    view, step = Topology(2, 2, 2).full(), 3
    dealt = {MicroBatch(0, 0): Draw(0, 0), MicroBatch(0, 1): Draw(0, 1), MicroBatch(1, 0): Draw(0, 2)}
    kept = {Seat(0, stage): {step: dealt} for stage in (0, 1)}
    draws = share(IteratorState(planned(view), {}, kept, {}), step).draws
    assert draws == {**dealt, MicroBatch(1, 1): Draw(1, 0)}
