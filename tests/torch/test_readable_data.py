"""What a script may give as data, and which of that has states; the loaders are torchdata's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from deepspeed.utils import RepeatingLoader

from recycle_plugin.adapters.deepspeed.feeding import readable
from recycle_plugin.errors import RecycleError
from tests.jobs.stateful import stateful

EACH = 12  # samples, in batches of two


class Counting:
    """An iterator that has states."""

    def __init__(self, seed: int) -> None:
        self.next = seed

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.next += 1
        return self.next

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


GIVEN: dict[str, Callable[[int], Any]] = {
    "an iterator": Counting,
    "a loader": lambda seed: stateful(range(EACH), 2, seed),
    "a loader without helpers": lambda seed: stateful(range(EACH), 2, seed, helpers=0),
    "its iterator": lambda seed: iter(stateful(range(EACH), 2, seed, helpers=0)),
    "one that repeats": lambda seed: RepeatingLoader(stateful(range(EACH), 2, seed)),
}


def read(iterator: Iterator[Any], batches: int) -> list[list[int]]:
    return [getattr(batch, "tolist", lambda batch=batch: [batch])() for batch in islice(iterator, batches)]


@pytest.mark.parametrize("read_before", (0, 2))
@pytest.mark.parametrize("given", GIVEN)
def test_whatever_has_states_goes_on_from_one(given, read_before):
    """Its own order, by another seed, is another one."""
    iterator, states = readable(GIVEN[given](1))
    read(iterator, read_before)
    assert states is not None
    kept, expected = states.state_dict(), read(iterator, 4)
    iterator, states = readable(GIVEN[given](2))
    read(iterator, 1)
    states.load_state_dict(kept)
    assert read(iterator, 4) == expected != read(readable(GIVEN[given](2))[0], 4)


def test_an_epoch_that_has_ended_goes_on_with_the_next():
    iterator, states = readable(loader := GIVEN["a loader"](1))
    read(iterator, EACH)
    kept, expected = states.state_dict(), read(readable(loader)[0], EACH)
    iterator, states = readable(GIVEN["a loader"](2))
    states.load_state_dict(kept)
    assert read(iterator, EACH) == expected and len(expected) == EACH // 2


@pytest.mark.parametrize("given", (lambda: iter([1, 2]), lambda: RepeatingLoader([1, 2])))
def test_what_has_no_states_is_only_read(given):
    iterator, states = readable(given())
    assert read(iterator, 2) == [[1], [2]] and states is None


def test_what_can_not_be_read():
    with pytest.raises(RecycleError, match="a list, which is no iterator"):
        readable([1, 2])
