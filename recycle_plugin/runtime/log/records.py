"""The records of a log: what a worker logs of its steps, so that a lost stage can be replayed (SWIFT, PPoPP'23).

A worker writes one *stream* of records, for itself alone, in the order in which data came to it. It knows nothing of
later steps, so a record never says that it counts: the :class:`Commit` of its step does, and a :class:`Void` revokes
that. Which records count follows from all streams of a run (:class:`~recycle_plugin.runtime.log.reader.LogReader`).

Payloads follow their records as raw bytes, little-endian and without gaps, one for each :class:`Part`.
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
"""The bytes of a number of each type, by torch's name."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The owner of a stream: the worker that writes it, its run, its seat, and ``shard``, its place in the seat."""

    run_id: str
    worker: WorkerId
    seat: Seat
    shard: int = 0

    def __str__(self) -> str:
        again = f", incarnation {self.worker.incarnation}" if self.worker.incarnation else ""
        return named(self.worker.rank, self.seat) + again


@dataclass(frozen=True, slots=True)
class Head:
    """The first record of a segment: its stream, and its number in the stream, from 0."""

    stream: Stream
    sequence: int


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a payload; ``dtype``: torch's name without ``torch.``. Raises ValueError for wrong values."""

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
    """What a replay needs to know of a step from other stages: the global gradient ``norm`` by which it was applied or
    skipped, None if nobody asked for it. The norm is a tensor of ``dtype``, or a number if that is "".
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
    """Step ``step`` is committed; data that is valid from generation ``valid_from`` or later counts. ``tensors``: how
    many data of the step that count this stream has logged.
    """

    step: int
    valid_from: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Void:
    """Nothing counts of the steps after ``after`` that is valid from before generation ``valid_from``: it was computed
    with rejected weights, or the job has gone back to a checkpoint.
    """

    after: int
    valid_from: int

    @property
    def step(self) -> int:
        """The last step that stays valid."""
        return self.after


@dataclass(frozen=True, slots=True)
class Gap:
    """Not everything was logged of the steps ``first`` to ``last`` (None: not known yet), and ``why``."""

    first: int
    last: int | None
    why: str

    @property
    def step(self) -> int:
        """The last step that is known to be in the gap."""
        return self.first if self.last is None else self.last

    def covers(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)

    def __str__(self) -> str:
        until = "and later" if self.last is None else f"to {self.last}"
        return f"steps {self.first} {until}: {self.why}"


# --- the index -----------------------------------------------------------------------------------------------


class IndexEntry(NamedTuple):
    """A record's place in its segment: ``size`` bytes from ``offset``, payload included. ``what``: the name of its
    type. ``datum`` is None, and ``valid_from`` 0, if the record has none.
    """

    what: str
    step: int
    datum: Datum | None
    valid_from: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Index:
    """The last record of a complete segment: the places of all others."""

    entries: tuple[IndexEntry, ...]


Kept = DatumRecord | StepRecord
Record = Kept | Commit | Void | Gap
LANGUAGE = Language((Head, DatumRecord, StepRecord, Commit, Void, Gap, Index))
