"""DeepSpeed's rules of where data comes from: ``training_data``, a source, or an iterator given to ``train_batch``."""

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
    """The loader of ``training_data`` that ``deepspeed.initialize`` returns, which ``loader()`` makes once a script
    reads it: that starts processes and draws a random number, and ``train_batch()`` needs none.
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
    """An iterator over a ``loader`` that a script gives itself, and that has states: begun with the first batch, or
    anew with a state.
    """

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
        """The loader's."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Have the loader go on from ``state``."""
        self._loader.load_state_dict(state)
        self._batches = None


class RepeatedStates:
    """The states of a RepeatingLoader, which has none itself: those of its loader."""

    def __init__(self, repeating: RepeatingLoader) -> None:
        self._repeating = repeating

    def state_dict(self) -> Any:
        """The loader's."""
        return self._repeating.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Have the loader go on from ``state``."""
        self._repeating.loader.load_state_dict(state)
        self._repeating.data_iter = iter(self._repeating.loader)


def readable(given: Any) -> tuple[Any, Stateful | None]:
    """What to call ``next`` of where a script has ``given`` an iterator, or a loader with states, and what has its
    states, None where nothing has.  Raises RecycleError for what is neither.
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
    """Applies DeepSpeed's rules for ``feed`` of the worker at ``seat``; ``dataset`` stands in the place of the engine's
    ``training_data``.

    ``next_batch()`` reads the iterator that the engine has, and ``set_iterator(data_iter)`` gives it one; ``adjust``
    makes of a batch what the script's ``set_batch_fn`` has asked for.
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
        self._reading: Any = None  # of what the script has given
        self._has_dataset = isinstance(dataset, DatasetSource)
        feed.source = self._collated(dataset) if isinstance(dataset, DatasetSource) else dataset

    def set_source(self, source: Callable[[int, int, int], Any]) -> None:
        """Take data from a script's ``source(step, replica, micro_batch)``; raises RecycleError after steps with an
        iterator.
        """
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
        """Choose the data of ``step``: an iterator that the script passes, above ``training_data`` and below a source
        that it has set.  ``had``: the iterator that the engine has.

        Raises RecycleError where there is none, or it does not suit the settings.
        """
        feed = self._feed
        if not feed.reads or self._set_by_script:
            return
        if data_iter is None and self._has_dataset:
            # which stays empty beside training_data, unless the script has called set_dataloader or set_dataiterator
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
                "batches than without one; "
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
        """Read inputs and labels from the script's iterator (runtime/stage/ports.py); raises Ended where it has given
        all that it has.
        """
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
        """Batches to evaluate, read as stock does: the first and the last stage's workers read all of their
        replica's.
        """
        return [self._next_batch() for _ in range(count)] if self._feed.reads else []

    def _collated(self, dataset: DatasetSource) -> Source:
        return lambda step, micro_batch: self._adjust(dataset(step, micro_batch))
