"""States of a script's data: what is kept of them, and when one is loaded."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.state.packing import packed
from recycle_plugin.runtime.worker.iterator_states import MOST, IteratorStates
from tests.jobs.stateful import stateful


class Data:
    """Data whose state is ``state``; of a number below 0 it takes none."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        assert state["read"] >= 0, "a state\nof other data"
        self.state = state


class Job:
    """What states need of a session: boards that outlive a process, and what the user is told."""

    def __init__(self) -> None:
        self.posted: dict[str, bytes] = {}
        self.said: list[str] = []

    def states(self, state: Any) -> IteratorStates:
        """Those of another process of the rank, with data of that ``state``."""
        session: Any = SimpleNamespace(
            heartbeats=SimpleNamespace(at=lambda *what: nullcontext()),
            note=lambda kind, text: self.said.append(text),
            boards=SimpleNamespace(
                post=lambda board, text, _: self.posted.setdefault(board, text), predecessors=self.posted.get
            ),
        )
        states = IteratorStates(session)
        states.present = Data(state)
        return states


@pytest.fixture
def job() -> Job:
    return Job()


def test_who_comes_back_begins_as_its_predecessor_did(job):
    first = job.states({"read": 3, "order": torch.arange(4)})
    first.begin(3, first.state())
    newcomer = job.states({"read": 0})
    newcomer.begin_as_predecessor()
    assert newcomer.nearest(Place(1, 7), 0) == 3 and newcomer.present.state["order"].tolist() == [0, 1, 2, 3]
    assert newcomer.nearest(Place(1, 7), 3) == 3, "it is loaded once"


def test_a_loader_that_stands_there_already_gives_all_epochs_as_one_that_was_never_loaded(job):
    """torchdata's without helpers, once it is loaded, gives later epochs in another order."""
    loaders = []
    for states in (first := job.states(None), newcomer := job.states(None)):
        states.present = stateful(range(8), 2, seed=5, helpers=0)
        loaders.append(states.present)
    first.begin(0, first.state())
    newcomer.begin_as_predecessor()
    assert newcomer.nearest(Place(1, 3), 0) == 0, "it reads up to there"
    whole, again = ([batch.tolist() for _ in range(3) for batch in loader] for loader in loaders)
    assert whole == again and whole[:4] != whole[4:8]


@pytest.mark.parametrize("place, read", ((Place(2, 7), 0), (Place(1, 2), 0), (Place(1, 7), 4)))
def test_a_state_that_is_not_on_the_way_is_not_loaded(job, place, read):
    """It is another iterator's, or the iterator is to stand before it, or stands behind it."""
    states = job.states({"read": 0})
    states.set(3, packed({"read": 3}))
    assert states.nearest(place, read) == read and states.present.state == {"read": 0}


def test_states_that_can_not_be_kept_are_said_once_and_large_ones_are_not_sent(job):
    states = job.states({"made_by": Data})
    assert states.state() is None is states.state()
    assert len(job.said) == 1 and "can't be kept" in job.said[0]
    large = job.states({"buffer": torch.zeros(MOST)})
    state = large.state()
    assert state is not None
    large.begin(0, state)
    newcomer = job.states({"read": 0})
    newcomer.begin_as_predecessor()
    assert not job.posted and newcomer.nearest(Place(1, 7), 0) == 0


def test_data_that_does_not_take_its_state_ends_in_one_line(job):
    states = job.states({"read": 0})
    states.set(3, packed({"read": -1}))
    with pytest.raises(RecycleError, match="after its batch 3: AssertionError: a state; give it the data") as raised:
        states.nearest(Place(1, 3), 0)
    assert "\n" not in str(raised.value)
