"""DeepSpeed's rules for where data comes from: ``training_data``, a source, or an iterator given to ``train_batch``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from deepspeed.runtime.dataloader import RepeatingLoader

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.iterator_draws import Ended
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.ports import Source
from recycle_plugin.runtime.worker.data import DatasetSource
from recycle_plugin.runtime.worker.feed import Feed
from recycle_plugin.runtime.worker.iterator_states import Stateful, is_stateful


class Repeating:
    """The loader of ``training_data`` that ``deepspeed.initialize`` returns. ``loader()`` makes it at the first read:
    that starts processes and draws a random number, and ``train_batch()`` does not need it.
    """

    def __init__(self, loader: Callable[[], Iterable[Any]]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._begun)

    @cached_property
    def _begun(self) -> Iterator[Any]:
        return RepeatingLoader(self._loader())


class BegunLater:
    """An iterator over a script's stateful ``loader``, begun at the first batch, or anew after a state is loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)
        self._batches = None


class RepeatedStates:
    """The states of a RepeatingLoader, which has none itself: those of its loader."""

    def __init__(self, repeating: RepeatingLoader) -> None:
        self._repeating = repeating

    def state_dict(self) -> Any:
        return self._repeating.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._repeating.loader.load_state_dict(state)
        self._repeating.data_iter = iter(self._repeating.loader)


def readable(given: Any) -> tuple[Any, Stateful | None]:
    """Return the iterator to read for ``given``, a script's iterator or stateful loader, and the object with its
    states, or None. Raises RecycleError for any other object.
    """
    if isinstance(given, RepeatingLoader) and is_stateful(given.loader):
        return given, RepeatedStates(given)
    if hasattr(given, "__next__"):
        return given, given if is_stateful(given) else None
    if is_stateful(given) and hasattr(given, "__iter__"):
        return (begun := BegunLater(given)), begun
    raise RecycleError(
        f"train_batch(data_iter=…) is a {type(given).__name__}, which is no iterator: pass iter(…) of it, "
        "or deepspeed.utils.RepeatingLoader(…)"
    )


class Feeding:
    """Applies DeepSpeed's rules for the ``feed`` of the worker at ``seat``; ``dataset`` replaces the engine's
    ``training_data``. ``next_batch()`` reads the engine's iterator, and ``set_iterator(data_iter)`` sets it. ``adjust``
    applies the script's ``set_batch_fn`` to a batch.
    """

    def __init__(
        self,
        feed: Feed,
        seat: Seat,
        dataset: Source | None,
        exact: bool,
        next_batch: Callable[[], Any],
        set_iterator: Callable[[Any], object],
        adjust: Callable[[Any], Any],
    ) -> None:
        self._feed, self._seat, self._exact, self._adjust = feed, seat, exact, adjust
        self._next_batch, self._set_iterator = next_batch, set_iterator
        self._set_by_script = False
        self._reading: Any = None  # for what the script has given
        self._has_dataset = isinstance(dataset, DatasetSource)
        feed.source = self._collated(dataset) if isinstance(dataset, DatasetSource) else dataset

    def set_source(self, source: Callable[[int, int, int], Any]) -> None:
        """Take data from ``source(step, replica, micro_batch)``. Raises RecycleError after steps with an iterator."""
        if self._feed.source is None and self._feed.settled:
            raise RecycleError(
                "set_data_source() was called after a step with data from an iterator: call it before the first "
                "train_batch()"
            )
        self._feed.source, self._set_by_script, self._has_dataset = (
            lambda step, micro_batch: source(step, *micro_batch),
            True,
            False,
        )

    def take_iterator(self, data_iter: Any, had: Any, step: int) -> None:
        """Choose the data of ``step``: the source set by the script, else the iterator it passes, else
        ``training_data``. ``had``: the engine's iterator. Raises RecycleError if there is no data, or it does not suit
        the settings.
        """
        feed = self._feed
        if not feed.reads or self._set_by_script:
            return
        if data_iter is None and self._has_dataset:
            # the engine's iterator is None beside training_data, unless the script called set_dataloader or
            # set_dataiterator
            data_iter = had
        if data_iter is not None:
            self._read_from(data_iter, step)
        if feed.source is not None:
            return
        if data_iter is None and had is None:
            raise RecycleError(
                "train_batch() has no data: pass data_iter=, or training_data= to deepspeed.initialize, or call "
                "engine.set_data_source(source)"
            )
        if self._exact:
            raise RecycleError(
                "recycle.exact with data from a plain iterator: after a loss the survivors' iterators give other "
                "batches than without a loss; "
                "pass a map-style dataset as training_data= and call train_batch() without an iterator, or call "
                "engine.set_data_source(source)"
            )

    def _read_from(self, data_iter: Any, step: int) -> None:
        if self._feed.source is not None and self._feed.settled:
            raise RecycleError(
                "train_batch(data_iter=…) after steps with training_data: pass an iterator from the first step on, or "
                "never"
            )
        self._feed.source, self._has_dataset = None, False
        if self._feed.given(data_iter, step):
            self._reading, self._feed.states.present = readable(data_iter)
        self._set_iterator(self._reading)
        self._feed.go_on()

    def next_batch(self, what: str) -> tuple[Any, Any]:
        """Read inputs and labels from the script's iterator. Raises Ended at its end."""
        try:
            batch = self._next_batch()
        except StopIteration:
            raise Ended(f"the data iterator of seat {self._seat} has ended {what}") from None
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise RecycleError(
                f"the data iterator gives a {type(batch).__name__}: the pipeline engine takes (inputs, labels); "
                "engine.set_batch_fn() makes them of anything"
            )
        return batch[0], batch[1]

    def evaluated(self, count: int) -> list[Any]:
        """Read batches to evaluate as stock does: first and last stage's workers read all of their replica's."""
        return [self._next_batch() for _ in range(count)] if self._feed.reads else []

    def _collated(self, dataset: DatasetSource) -> Source:
        return lambda step, micro_batch: self._adjust(dataset(step, micro_batch))
