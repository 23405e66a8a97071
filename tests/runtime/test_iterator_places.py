"""Where iterators begin in a job that goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.worker.iterator_places import IteratorPlace, read, resumed, write


def places(*given: int, size: int = 2) -> dict[int, IteratorPlace]:
    return {replica: IteratorPlace(replica, len(given), each, size, 1) for replica, each in enumerate(given)}


def added(path: Path, into: Callable[[Any], object]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        into(file)


def test_what_is_written_is_read(tmp_path):
    """Both ends of a replica say the same."""
    for seat, place in ((Seat(0, 0), places(4, 6)[0]), (Seat(1, 0), places(4, 6)[1]), (Seat(1, 1), places(4, 6)[1])):
        write(added, tmp_path / "tag", seat, place)
    assert read(tmp_path / "tag") == places(4, 6) and read(tmp_path) == {}


@pytest.mark.parametrize("text", ("{}", "[" * 100_000), ids=("empty", "deep"))
def test_a_file_that_is_no_place(tmp_path, text):
    (tmp_path / "recycle_iterator_0.0.json").write_text(text)
    with pytest.raises(RecycleError, match=r"recycle_iterator_0\.0\.json can't be read"):
        read(tmp_path)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6))
def test_as_many_replicas_go_on_where_they_stood(numbers):
    found = resumed(places(*numbers), len(numbers), 2)
    assert found.read == tuple(numbers) and not found.change


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 8))
def test_others_begin_where_no_sample_is_left_out(numbers, replicas, size):
    """Together they have had as many samples as before, or as much less as makes no batch of each; and it is said."""
    found = resumed(places(*numbers), replicas, size)
    if (replicas, size) == (len(numbers), 2):
        return
    had = sum(numbers) * 2
    assert len(set(found.read)) == 1 and 0 <= had - sum(found.read) * size < replicas * size
    assert f"had given {', '.join(map(str, numbers))} batches, and here are {replicas} replicas" in found.change
    assert ("given unequal numbers" in found.change) == (len(set(numbers)) > 1)


def test_a_replica_whose_place_nobody_knew():
    known = places(4, 6, 6)
    del known[0]
    with pytest.raises(RecycleError, match="does not say how far the iterator of replica 0 was read"):
        resumed(known, 3, 2)


def test_one_iterator_after_the_other():
    last = {replica: IteratorPlace(replica, 2, 8, 2, 3) for replica in range(2)}
    with pytest.raises(RecycleError, match="had given 3 iterators in turn"):
        resumed(last, 2, 2)
