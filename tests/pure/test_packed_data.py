"""Packed data is the set that it was made of, whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.packed_data import (
    MOST,
    Group,
    PackedData,
    among_all,
    groups,
    of_each,
    pack,
    packed_data,
)

OF_ONE, OF_ALL = ("act", "grad", "stash", "inner", "wgrad", "data"), ("reduced", "tied", "norm", "params")
NUMBER = st.integers(0, 12)
DATA = st.one_of(
    st.builds(Datum, st.sampled_from(OF_ONE), NUMBER, st.builds(MicroBatch, NUMBER, NUMBER), NUMBER),
    st.builds(Datum, st.sampled_from(OF_ALL), NUMBER, st.none(), NUMBER),
)


@given(st.frozensets(DATA, max_size=40), st.frozensets(DATA, max_size=40))
def test_it_is_the_set_that_was_packed(data, others):
    packed = PackedData(pack(data))
    packed.check()
    assert packed == data and len(packed) == len(data)
    assert {datum for datum in data | others if datum in packed} == data
    assert packed - others == data - others and packed & others == data & others and packed | others == data | others
    assert pack(packed) == pack(data)


@given(st.frozensets(DATA, max_size=40))
def test_groups_are_the_same_packed_or_not(data):
    assert set(groups(data)) == set(groups(packed_data(data))) == {Group(*datum[:2], datum.step) for datum in data}


@pytest.mark.parametrize("key", ("wgrad", "wgrad 1", "wgrad x@3", "wgrad 1@", ""))
def test_a_malformed_group_is_an_error(key):
    with pytest.raises(ValueError):
        PackedData({key: "0.1:1"})


@pytest.mark.parametrize(
    "ranges",
    (
        *(
            "0",
            "0.1",
            "0.x-2",
            "0.1-1,0.2-2",
            "0.1-1 ",
            " 0.1-1",
            "0.1-1  0.3-3",
            "-1.0-0",
            "0.1-2-3",
            "1e3.0-0",
            "٣.1-1",
        ),
        *("0.2:1", "0.1-2", f"0.0:{10**9}", f"0.0:{MOST}", f"0.0:{MOST // 2} 1.0:{MOST // 2}"),
    ),
)
def test_what_is_no_list_of_ranges_of_micro_batches_is_named(ranges):
    with pytest.raises(ValueError, match="^wgrad of stage 1 is of "):
        PackedData({"wgrad 1@3": ranges}).check()


def test_what_is_told_to_all_is_short_and_undone() -> None:
    held = {f"{one}.0": pack({wgrad(one, 0), wgrad(one, 1), wgrad(11, 7)}) for one in (1, 11, 2)}
    told = among_all(held)
    assert told == {"1:2.0": {"wgrad 0@1": ".0:1 11.7:7"}, "11:11.0": {"wgrad 0@1": ".0:1 .7:7"}}
    undone = of_each(told)
    assert {str(seat): pack(have) for seat, have in undone.items()} == held
    assert {seat.replica: have.ranges[Group("wgrad", 0, 1)] for seat, have in undone.items()} == {
        1: "1.0:1 11.7:7",
        2: "2.0:1 11.7:7",
        11: "11.0:1 11.7:7",
    }
    assert set(groups(*undone.values(), frozenset({wgrad(1, 1)._replace(step=3)}))) == {
        Group("wgrad", 0, 1),
        Group("wgrad", 0, 3),
    }


@given(st.dictionaries(st.tuples(st.integers(0, 12), st.integers(0, 2)), st.frozensets(st.integers(0, 3), max_size=3)))
def test_what_any_seats_hold_comes_through(replicas_held) -> None:
    held = {
        f"{replica}.{stage}": pack({wgrad(other, other) for other in others} | {wgrad(replica, 1)})
        for (replica, stage), others in replicas_held.items()
    }
    assert {str(seat): pack(have) for seat, have in of_each(among_all(held)).items()} == held


def wgrad(replica: int, index: int) -> Datum:
    return Datum("wgrad", 0, MicroBatch(replica, index), 1)


def test_all_texts_together_are_of_so_many_micro_batches():
    half = f"0.0:{MOST // 2 - 1}"
    PackedData({"wgrad 1@3": half, "act 1@3": half, "params 1@3": ""}).check()
    with pytest.raises(
        ValueError, match="^act of stage 1 is of '7.0:0': write replica.first:last, separated by blanks"
    ):
        PackedData({"wgrad 1@3": half, "wgrad 0@3": half, "act 1@3": "7.0:0"}).check()
