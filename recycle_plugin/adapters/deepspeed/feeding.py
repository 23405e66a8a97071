"""Where a step's data comes from: the job's ``training_data``, a source that the script sets, or plain iterators (core/sources.py)."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable

from deepspeed.runtime.pipe.engine import PipelineEngine

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.places import Places
from recycle_plugin.core.sources import Batches
from recycle_plugin.core.stepstore import StepStore
from recycle_plugin.core.supply import Supply
from recycle_plugin.runtime.batches import Tensors
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.worker.data import DatasetSource
from recycle_plugin.runtime.worker.ports import Source


class Feeding(PipelineEngine):
    """The part of :class:`~recycle_plugin.adapters.deepspeed.engine.RecycleEngine` that gets micro-batches."""

    _source: Source | None = None
    _source_is_set = False  # by the script
    _trained = False  # a step, so that where data comes from is settled
    _store: StepStore
    _supply: Supply | None  # of plain iterators, for whoever needs data; in use where there is no source

    @cached_property
    def _places(self) -> Places:
        return Places(self.micro_batches)

    def set_data_source(self, source: Callable[[int, int, int], Any]) -> None:
        """``source(step, replica, micro_batch)`` gives (inputs, labels); steps count from 1, the same on every worker.

        Iterators that ``train_batch`` is given are not read then.
        """
        if self._source is None and self._trained:
            raise RecycleError("set_data_source() was called after a step with data from an iterator: call it before the first train_batch()")
        self._source, self._source_is_set = lambda step, micro_batch: source(step, *micro_batch), True

    def _take_iterator(self, data_iter: Any) -> None:
        """What the script passes stands above ``training_data``, as in DeepSpeed, and below a source that it has set."""
        if not self._reads or self._source_is_set:
            return
        if data_iter is None and isinstance(self._source, DatasetSource):
            data_iter = self.data_iterator  # which stays empty beside training_data, unless the script has called set_dataloader or set_dataiterator
        if data_iter is not None:
            self._read_from(data_iter)
        if self._source is not None:
            return
        if self.data_iterator is None:
            raise RecycleError("train_batch() has no data: pass data_iter=, or training_data= to deepspeed.initialize, or call engine.set_data_source(source)")
        if self._job.settings.exact:
            raise RecycleError(
                "recycle.exact with data from a plain iterator: after a loss the survivors' iterators give other batches than without one; "
                "pass a map-style dataset as training_data= and call train_batch() without an iterator, or call engine.set_data_source(source)"
            )

    def _read_from(self, data_iter: Any) -> None:
        if not hasattr(data_iter, "__next__"):
            raise RecycleError(f"train_batch(data_iter=…) is a {type(data_iter).__name__}, which is no iterator: pass iter(…) of it, or deepspeed.utils.RepeatingLoader(…)")
        if self._source is not None and self._trained:
            raise RecycleError("train_batch(data_iter=…) after steps with training_data: pass an iterator from the first step on, or never")
        self._source = None
        self.set_dataiterator(data_iter)

    @property
    def _reads(self) -> bool:
        """Whether this worker's stage needs data."""
        return self.is_first_stage() or self.is_last_stage()

    def _hand_on(self, datum: Datum, batch: Tensors, taker: Seat) -> None:
        self._world.transfer(datum, batch, taker, self._store.era)

    def _say_dealt(self, step: int, retired: set[int], dealt: Batches) -> None:
        names, by = ", ".join(map(str, sorted(retired))), ", ".join(map(str, sorted({draw.source for draw in dealt.values()})))
        self._job.session.note(
            "data", f"from step {step} on the share of replica {names}, {len(dealt)} micro-batches a step, is drawn from the iterators of replica {by}",
            step=step, replicas=sorted(retired), drawn={str(one): str(draw) for one, draw in sorted(dealt.items())},
        )  # fmt: skip

    def _read_iterator(self, what: str) -> tuple[Any, Any]:
        try:
            batch = self.next_batch()
        except StopIteration:
            raise RecycleError(
                f"the data iterator of seat {self.seat} has ended in {what}: wrap its loader in deepspeed.utils.RepeatingLoader; "
                "after a loss the survivors' iterators give the lost replica's share as well"
            ) from None
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise RecycleError(f"the data iterator gives a {type(batch).__name__}: the pipeline engine takes (inputs, labels); engine.set_batch_fn() makes them of anything")
        return batch[0], batch[1]

    def _begin_with_data(self) -> None:
        """Before each step."""
        self._store.drawn = self._source is None
        if self._store.drawn and self._reads and not self._trained and self._is_first():
            self._job.session.note(
                "data", "data comes from plain iterators: a step that a loss interrupts is finished with its own data, after that the survivors' iterators "
                "give the lost replica's share; engine.set_data_source() would keep every step's data, and needs no replica with both ends alive",
            )  # fmt: skip
        self._trained = True

    def _batch(self, step: int, micro_batch: MicroBatch) -> Any:
        """What is addressed by both (runtime.worker.ports.Source)."""
        batch = self._source(step, micro_batch)
        made = isinstance(self._source, DatasetSource) and self.batch_fn is not None
        return self.batch_fn(batch) if made else batch
