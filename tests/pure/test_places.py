"""Where plain iterators stand, as the coordinator keeps it by replica, also of those that have lost both their ends."""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.facts.places import Places
from recycle_plugin.core.coordinator.facts.regrouping import Reports
from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.messages.from_workers import Stepped, SurvivorReport
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.packed_data import pack
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

MICRO_BATCHES = 2  # of each of two replicas of one stage; replica 1 lives


@pytest.fixture
def places() -> Places:
    """Both replicas have given two batches in step 1, which is committed."""
    found = Places()
    agree(found, reports({0: {"0": Place()}, 1: {"0": Place()}}, stepped=0), 0)
    step(found, 1, {0: Place(1, 2), 1: Place(1, 2)})
    return found


def agree(places: Places, told: Reports, committed: int, replicas: tuple[int, ...] = (0, 1)) -> None:
    places.agree(told, committed, dict.fromkeys((committed + 1, committed + 2), replicas), MICRO_BATCHES)


def step(places: Places, number: int, said: dict[int, Place | None]) -> None:
    for replica, place in said.items():
        places.stepped(Stepped(replica, 0, number, place), replica)
    places.commit(number)


def reports(
    said: dict[int, dict[str, Place]], stepped: int, drawn: dict[str, str] | None = None, held: tuple[Datum, ...] = ()
) -> Reports:
    """Of one worker for each replica in ``said``, of which replica 1's holds ``drawn`` and ``held``."""
    members = tuple(Member(replica, Seat(replica, 0), "", "host") for replica in said)
    told = {
        WorkerId(replica): SurvivorReport(
            replica,
            1,
            stepped,
            "plan",
            pack(held) if replica == 1 else {},
            held_draws=(drawn or {}) if replica == 1 else {},
            places=place,
        )
        for replica, place in said.items()
    }
    return Reports(Generation(1, members, 0, "loss", 0.0), told)


def test_what_ends_say_is_kept_when_it_is_committed(places) -> None:
    assert places.known() == {0: (1, 2), 1: (1, 2)}
    places.stepped(Stepped(0, 0, 2, Place(1, 4)), 0)
    assert places.known()[0] == (1, 2)
    places.commit(2)
    assert places.known() == {0: (1, 4), 1: (1, 2)}


@pytest.mark.parametrize("times", (1, 2), ids=("once", "after another loss too"))
@pytest.mark.parametrize(
    "drawn, read",
    [({"2": "0.0 0.1 1.0 1.1"}, 4), ({"2": "0.0 1.0 1.1"}, 3), ({"2": "1.0 1.1"}, 2), ({}, 2)],
    ids=("all", "one", "none", "nothing yet"),
)
def test_of_the_lost_the_batches_count_that_others_have(places, times, drawn, read) -> None:
    for _ in range(times):
        told = reports({1: {"1": Place(1, 2), "2": Place(1, 4)}}, 1, drawn)
        agree(places, told, 1)
        assert places.known(told) == {0: (1, read), 1: (1, 4)}
    step(places, 2, {1: Place(1, 6)})
    step(places, 3, {1: Place(1, 10)})
    assert places.known() == {0: (1, read), 1: (1, 10)}


def test_a_step_in_which_scripts_have_given_another_iterator(places) -> None:
    told = reports({1: {"1": Place(1, 2), "2": Place(2, 2)}}, 1, {"2": "0.0 1.0 1.1"})
    agree(places, told, 1)
    assert places.known(told) == {0: (2, 1), 1: (2, 2)}
    step(places, 2, {1: Place(2, 3)})
    assert places.known() == {0: (2, 1), 1: (2, 3)}


def test_with_a_sum_whose_batches_are_gone_nobody_knows_the_place(places) -> None:
    """Replica 0's second batch may be in it, or another in its place."""
    told = reports({1: {"1": Place(1, 2), "2": Place(1, 4)}}, 1, {"2": "0.0 1.0 1.1"}, (Datum("reduced", 0, None, 2),))
    agree(places, told, 1)
    assert places.known(told) == {1: (1, 4)}
    step(places, 2, {1: Place(1, 4)})
    assert places.known() == {1: (1, 4)}


def test_what_was_counted_before_a_sum_stays_when_the_copies_are_gone(places) -> None:
    said = {1: {"1": Place(1, 2), "2": Place(1, 5)}}
    agree(places, reports(said, 1, {"2": "0.0 0.1=1.2 1.0 1.1"}), 1)
    told = reports(said, 1, {"2": "1.0 1.1"}, (Datum("reduced", 0, None, 2),))
    agree(places, told, 1)
    assert places.known(told) == {0: (1, 3), 1: (1, 5)}


def test_who_has_said_it_before_its_death_is_believed(places) -> None:
    places.stepped(Stepped(0, 0, 2, Place(1, 4)), 0)
    told = reports({1: {"2": Place(1, 4)}}, 2, {"2": "1.0 1.1"}, (Datum("params", 0, None, 3),))
    agree(places, told, 1)
    places.commit(2)
    assert places.known() == {0: (1, 4), 1: (1, 4)}


def test_a_loaded_checkpoint_moves_no_iterator(places) -> None:
    places.stepped(Stepped(0, 0, 2, Place(1, 4)), 0)
    places.rewind()
    told = reports({0: {"0": Place(1, 4)}, 1: {"0": Place(1, 4)}}, 0)
    agree(places, told, 0)
    assert places.known() == {0: (1, 4), 1: (1, 4)}
    step(places, 1, {0: Place(1, 6), 1: Place(1, 6)})
    assert places.known() == {0: (1, 6), 1: (1, 6)}


def test_who_has_come_back_and_stands_nowhere_yet_moves_nothing(places) -> None:
    told = reports({0: {}, 1: {"1": Place(1, 2)}}, 1, {"2": "1.0 1.1"}, (Datum("act", 0, MicroBatch(1, 0), 2),))
    agree(places, told, 1)
    step(places, 2, {0: None, 1: Place(1, 6)})
    assert places.known() == {0: (1, 2), 1: (1, 6)}


def test_what_a_void_step_has_taken_of_a_lost_replica_counts_nowhere(places) -> None:
    agree(places, reports({1: {"1": Place(1, 2), "2": Place(1, 4)}}, 1, {"2": "0.0 0.1 1.0 1.1"}), 1, replicas=(1,))
    places.stepped(Stepped(1, 1, 2, Place(1, 4)), 1)
    places.commit(2)
    assert places.known() == {0: (1, 2), 1: (1, 4)}, "it goes on with what nobody else has ever used"


def test_of_a_void_step_nothing_is_believed_that_a_lost_replica_has_said(places) -> None:
    places.stepped(Stepped(0, 0, 2, Place(1, 4)), 0)
    agree(places, reports({1: {"1": Place(1, 2), "2": Place(1, 4)}}, 1, {"2": "1.0 1.1"}), 1, replicas=(1,))
    places.commit(2)
    assert places.known()[0] == (1, 2)
