"""Where a plain iterator stands: counted over all steps, and taken over by a worker whose own one begins anew; what it
gives is in the store.
"""

from __future__ import annotations

import pytest

from recycle_plugin.core.messages.from_coordinator import Committed
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import Draw, Gone, IteratorState, Place, share, unpack
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker import iterator_data
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.planner import plan

SHAPE = Topology(2, 2, 3)


class Numbers:
    """An iterator that gives its draws, and remembers how often it was asked."""

    def __init__(self) -> None:
        self.read_of: list[tuple[int, int]] = []

    def read(self, step: int, position: int, draw: Draw | None) -> Draw | None:
        self.read_of.append((step, position))
        return draw

    def skip_to(self, place: Place, read: int) -> None:
        self.read_of += [(0, position) for position in range(read, place.read)]

    def draw_of(self, batch: Draw) -> Draw:
        return batch


@pytest.fixture
def end():
    """Replica 0's first stage: its supply, its store, its iterator, and what it hands on and says."""
    store, iterator, handed, said = StepStore(Seat(0, 0), SHAPE.stages), Numbers(), [], []
    iterator_data = IteratorData(
        store, iterator, lambda *given: handed.append(given), lambda *given: said.append(given)
    )
    iterator_data.take_state(IteratorState(plan(SHAPE.full(), CostModel.uniform(2), Policy()), {}, {}, {}))
    store.reads_iterator = True
    return iterator_data, store, iterator, handed, said


def test_what_is_drawn_is_in_the_store_and_a_peer_has_a_copy(end):
    iterator_data, store, _, handed, said = end
    iterator_data.provide(1, ControlView(0))
    assert store.of("drawn", 1) == {MicroBatch(0, index): Draw(0, index) for index in range(3)}
    assert [(datum.micro_batch, taker) for datum, _, taker in handed] == [
        (MicroBatch(0, index), Seat(1, 0)) for index in range(3)
    ]
    assert not said
    assert {step: dict(found) for step, found in unpack(iterator_data.held_draws()).items()} == {
        1: store.of("drawn", 1)
    }
    store.commit(1)
    assert iterator_data.held_draws() == {}


def test_a_committed_step_and_one_with_another_source_draw_nothing(end):
    iterator_data, store, iterator, *_ = end
    line = ControlView(0)
    line.take(Committed(2, {}))
    iterator_data.provide(2, line)
    store.reads_iterator = False
    iterator_data.provide(3, line)
    assert iterator.read_of == []


def test_batches_are_counted_over_steps_and_checkpoints(end):
    iterator_data, store, iterator, *_ = end
    for step in (1, 2):
        iterator_data.provide(step, ControlView(0))
        iterator_data.provide(step, ControlView(0))  # what is here is not drawn again
    assert iterator_data.stands == (1, len(iterator.read_of)) == (1, 6)
    assert [iterator_data.place_behind(step) for step in range(3)] == [(1, 0), (1, 3), (1, 6)]
    assert iterator_data.places(1) == {"1": (1, 3), "2": (1, 6)}
    iterator_data.rewind()
    store.rewind(0, valid_from=1)
    iterator_data.provide(1, ControlView(0))
    assert iterator_data.stands == iterator_data.place_behind(1) == (1, len(iterator.read_of)) == (1, 9)


def test_an_iterator_that_begins_anew_goes_on_where_another_stood(end):
    iterator_data, _, iterator, *_ = end
    iterator_data.skip_to(Place(1, 4))
    iterator_data.provide(3, ControlView(0))
    assert len(iterator.read_of) == 7 == iterator_data.stands.read
    assert iterator.read_of[4:] == [
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    iterator_data.skip_to(Place(1, 7))
    assert len(iterator.read_of) == 7


def test_it_does_not_go_back(end):
    iterator_data, *_ = end
    iterator_data.provide(1, ControlView(0))
    with pytest.raises(
        ValueError,
        match="the data iterator of seat 0.0 has given 3 batches, but training goes on after 2: it can't go back",
    ):
        iterator_data.skip_to(Place(1, 2))


def test_who_gives_what_this_worker_does_not_draw(end):
    iterator_data, *_ = end
    assert iterator_data.giver(Datum("drawn", 0, MicroBatch(1, 2), 1)) == Seat(1, 0)


@pytest.mark.parametrize(
    "iterators, places, read, why",
    [
        (
            1,
            {1: Place(1, 4)},
            0,
            "does not know how far its iterator was read, as all workers with its last batches were",
        ),
        (2, {0: Place(3, 6)}, 0, "was given 2 iterators by its script, but its replica had read 3"),
        (1, {0: Place(1, 6)}, 6, None),
        (2, {0: Place(2, 4)}, 4, None),
        (3, {0: Place(2, 4)}, 0, None),
    ],
)
def test_a_newcomers_iterator_finds_its_place_or_says_why_not(end, iterators, places, read, why):
    """It says so once, and reads no further than it may; one that its replica has not begun stands at its beginning."""
    _, store, iterator, *_ = end
    said: list[str] = []
    newcomer = IteratorData(store, iterator, lambda *given: None, lambda *given: None, said.append)
    newcomer.in_place = False
    for number in range(1, iterators):
        newcomer.begin_another(number)
    assert newcomer.places(3) == {}
    for _ in range(2):
        state = IteratorState(plan(SHAPE.full(), CostModel.uniform(2), Policy()), {}, {}, {}, frozenset(), places)
        newcomer.take_state(state)
    assert newcomer.in_place is (why is None) and len(iterator.read_of) == read
    assert newcomer.places(3) == ({} if why else {"3": (iterators, read)})
    assert [each.startswith(why) for each in said] == [True] if why else not said


def test_what_another_iterator_gives_is_no_data_of_a_step_before_it(end):
    """The other end may still read the iterator before: inputs and labels would be those of two."""
    iterator_data, store, *_ = end
    iterator_data.provide(1, ControlView(0))
    iterator_data.begin_another(2)
    iterator_data.provide(1, ControlView(0))  # is here
    store.commit(1)
    with pytest.raises(Gone, match="of step 1 is lost .* seat 0.0 has had another iterator since step 2: the batch"):
        iterator_data.provide(1, ControlView(0))
    iterator_data.provide(2, ControlView(0))
    assert len(store.of("drawn", 2)) == 3


@pytest.mark.parametrize("begun", (False, True))
def test_a_steps_draws_are_shared_out_once(end, monkeypatch, begun):
    supply, shared = end[0], []
    held = {Seat(1, 0): {1: {MicroBatch(1, 0): Draw(1, 0)}}} if begun else {}
    state = IteratorState(plan(SHAPE.full(), CostModel.uniform(2), Policy()), {}, held, {})
    monkeypatch.setattr(iterator_data, "share", lambda *given: shared.append(given) or share(*given))
    for times in (1, 2):
        supply.take_state(state)
        supply.provide(1, ControlView(0))
        for index in range(3):
            supply.giver(Datum("drawn", 0, MicroBatch(1, index), 1))
        assert len(shared) == times
