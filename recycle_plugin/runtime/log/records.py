"""The records of a log: what a worker keeps of its steps, so that a lost stage can be replayed (SWIFT, PPoPP'23).

A worker writes one *stream* of records, for itself alone, in the order in which things came to it.  It knows nothing of
later steps, so a record never says that it counts: the :class:`Commit` of its step does, and a :class:`Void` takes that
back.  Which records count follows from all streams of a run (:class:`~recycle_plugin.runtime.log.reader.LogReader`).

Payloads are not in the records: they come behind them as raw bytes, little-endian and without gaps, one for each
:class:`Part`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from recycle_plugin.core.messages.encoding import Language
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import WorkerId

_BY_BYTES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
    2: "uint16 int16 float16 bfloat16",
    4: "uint32 int32 float32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
ITEM_BYTES = {name: size for size, names in _BY_BYTES.items() for name in names.split()}
"""The bytes of a number of each type, by torch's name for it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The owner of a stream: the worker that writes it, of which run, and its seat.  ``shard``: its place in the seat's
    group.
    """

    run_id: str
    worker: WorkerId
    seat: Seat
    shard: int = 0

    def __str__(self) -> str:
        again = f", incarnation {self.worker.incarnation}" if self.worker.incarnation else ""
        return named(self.worker.rank, self.seat) + again


@dataclass(frozen=True, slots=True)
class Head:
    """The first record of a segment: whose it is, and which one of the stream, counted from 0."""

    stream: Stream
    sequence: int


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a payload; ``dtype`` is torch's name for it, without ``torch.``.  Raises ValueError for a type that
    nobody knows, and a shape that is none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.dtype!r} is no type that a log knows")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"{self.shape} is no shape")

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


# --- what a worker keeps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DatumRecord:
    """A datum with its tensors: an activation or gradient over a logged boundary, or a batch that can't be read again.

    ``valid_from``: the generation from which its maker's data is valid (core/worker/step_store.py).
    """

    datum: Datum
    parts: tuple[Part, ...]
    valid_from: int

    @property
    def step(self) -> int:
        return self.datum.step


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The part of a step that a replay needs of other stages: the global ``norm`` of the gradients with regard to which
    it was applied, or skipped, None where nobody asked for it; as a tensor of ``dtype``, or where that is "" a number.
    """

    step: int
    valid_from: int
    norm: float | None
    dtype: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        return ()


# --- what says which of it counts ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Commit:
    """Step ``step`` is committed, and what is valid from generation ``valid_from`` or later counts of it.

    ``tensors``: how many different data of the step this stream has kept that count.
    """

    step: int
    valid_from: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Void:
    """Nothing counts of the steps after ``after`` that is valid from before generation ``valid_from``: it was computed
    with weights that were rejected, or the job has gone back to a checkpoint.
    """

    after: int
    valid_from: int

    @property
    def step(self) -> int:
        """The last step that it leaves alone."""
        return self.after


@dataclass(frozen=True, slots=True)
class Gap:
    """Not everything was kept of the steps ``first`` to ``last`` (None: nobody knows yet), and ``why``."""

    first: int
    last: int | None
    why: str

    @property
    def step(self) -> int:
        """The last step that is known to be in it."""
        return self.first if self.last is None else self.last

    def covers(self, step: int) -> bool:
        """Whether ``step`` is one of its steps."""
        return self.first <= step and (self.last is None or step <= self.last)

    def __str__(self) -> str:
        until = "and later" if self.last is None else f"to {self.last}"
        return f"steps {self.first} {until}: {self.why}"


# --- the index -----------------------------------------------------------------------------------------------


class IndexEntry(NamedTuple):
    """A record's place in its segment: ``size`` bytes from ``offset`` on, payload included.

    ``what``: the name of its type; ``datum`` is None where it has none; ``valid_from`` is 0 where it has none.
    """

    what: str
    step: int
    datum: Datum | None
    valid_from: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Index:
    """The last record of a segment that is complete: where all others are."""

    entries: tuple[IndexEntry, ...]


Kept = DatumRecord | StepRecord
Record = Kept | Commit | Void | Gap
LANGUAGE = Language((Head, DatumRecord, StepRecord, Commit, Void, Gap, Index))
