"""Where a step's data comes from: the job's ``training_data``, a source that the script sets, or plain iterators (core/sources.py)."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable

from deepspeed.runtime.pipe.engine import PipelineEngine

from recycle_plugin.adapters.deepspeed.data import DatasetSource, Source
from recycle_plugin.core.ids import MicroBatch
from recycle_plugin.core.instruction import Instruction
from recycle_plugin.core.places import Places
from recycle_plugin.core.sources import Standing
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.supply import Supply


class Feeding(PipelineEngine):
    """The part of :class:`~recycle_plugin.adapters.deepspeed.engine.RecycleEngine` that gets micro-batches."""

    _source: Source | None = None
    _source_is_set = False  # by the script
    _trained = False  # a step, so that where data comes from is settled
    _supply: Supply | None = None  # of the first and the last stage; in use where there is no source

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
        if self._supply is None or self._source_is_set:
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
    def _draws(self) -> bool:
        """Whether this worker's data comes from a plain iterator."""
        return self._supply is not None and self._source is None

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
        if self._draws and not self._trained and self._is_first():
            self._job.session.note(
                "data", "data comes from plain iterators: a step that a loss interrupts is finished with its own data, after that the survivors' iterators "
                "give the lost replica's share; engine.set_data_source() would keep every step's data, and needs no replica with both ends alive",
            )  # fmt: skip
        self._trained = True

    def drawn(self) -> dict[str, str]:
        """What is kept of iterators' data (runtime.loop.Replica)."""
        session = self._job.session
        if self._source is None and session.interruption() is not None:
            self._transport.hear_out(session.pending.roster.addresses)
        return self._supply.drawn() if self._supply is not None else {}

    def stand(self, standing: Standing) -> None:
        """What everybody has (runtime.loop.Replica)."""
        if self._supply is not None:
            self._supply.stand(standing)

    def _await_data(self, instruction: Instruction) -> None:
        if self._draws and instruction.step > 0:
            self._supply.wait(instruction.step, instruction.micro_batch)

    def _exec_load(self, instruction: Instruction) -> None:
        step, one = instruction.step, instruction.micro_batch
        self._stage.load((step, one), self._batch(step, one) if step > 0 else self._evaluations.batch(one))

    def _batch(self, step: int, micro_batch: MicroBatch) -> Any:
        if self._draws:
            return self._supply.take(step, micro_batch)
        batch = self._source(step, micro_batch)
        made = isinstance(self._source, DatasetSource) and self.batch_fn is not None
        return self.batch_fn(batch) if made else batch
