"""Sets of data as messages carry them: the micro-batches of each kind, stage and step together, in one text.

After a loss each worker of a job holds some hundred data. Most questions concern kinds and steps alone, and the planner
reads the texts into arrays (planner/closure.py). So objects for data are made only on iteration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch

NAMES = re.compile(r"(\d{1,9}\.\d{1,9}( \d{1,9}\.\d{1,9})*)?", re.ASCII)
SHOWN = 40  # characters of a malformed text in an error


class Group(NamedTuple):
    """What data of one kind, stage and step have in common."""

    kind: str
    stage: int
    step: int


def pack(data: Iterable[Datum]) -> dict[str, str]:
    """Pack ``data`` for a message by kind, stage and step: {"wgrad 1@17": "0.0 0.1", "reduced 1@16": ""}."""
    found: dict[str, list[str]] = {}
    for datum in sorted(data, key=lambda datum: (*datum[:2], datum.step, datum.micro_batch or ())):
        names = found.setdefault(f"{datum.kind} {datum.stage}@{datum.step}", [])
        names += [str(datum.micro_batch)] if datum.micro_batch else []
    return {key: " ".join(names) for key, names in found.items()}


class PackedData(AbstractSet[Datum]):
    """The set of data that :func:`pack` has put into ``packed``. Raises ValueError if a stage or a step in it is
    malformed; iterating raises it if a micro-batch is. ``names``: by group, the micro-batches' names, separated by
    blanks; empty for data of a whole stage.
    """

    def __init__(self, packed: Mapping[str, str]) -> None:
        self.names = {_group(key): names for key, names in packed.items()}

    @classmethod
    def _from_iterable(cls, data: Iterable[Any]) -> frozenset[Any]:  # type: ignore[override]
        """Return the result of an operation on two sets."""
        return frozenset(data)

    def check(self) -> None:
        """Raise ValueError if a text is no list of micro-batches."""
        for group, names in self.names.items():
            if not NAMES.fullmatch(names):
                raise ValueError(f"{group.kind} of stage {group.stage} is of {names[:SHOWN]!r}")

    def __contains__(self, datum: object) -> bool:
        if not isinstance(datum, Datum):
            return False
        if datum.micro_batch is None:
            return self.names.get(Group(datum.kind, datum.stage, datum.step)) == ""
        return datum in self._data

    def __iter__(self) -> Iterator[Datum]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    @cached_property
    def _data(self) -> frozenset[Datum]:
        found: set[Datum] = set()
        for (kind, stage, step), names in self.names.items():
            micro_batches: Iterable[MicroBatch | None] = map(_micro_batch, names.split()) if names else (None,)
            found.update(map(Datum, repeat(kind), repeat(stage), micro_batches, repeat(step)))
        return frozenset(found)


def packed_data(data: AbstractSet[Datum]) -> PackedData:
    """Return ``data`` packed."""
    return data if isinstance(data, PackedData) else PackedData(pack(data))


def groups(data: AbstractSet[Datum]) -> Collection[Group]:
    """Return the groups of ``data``. Costs time in proportion to the groups if it is packed, else to the data."""
    return data.names.keys() if isinstance(data, PackedData) else {Group(*datum[:2], datum.step) for datum in data}


@lru_cache(maxsize=1 << 12)
def _group(key: str) -> Group:
    kind, _, where = key.partition(" ")
    stage, _, step = where.partition("@")
    return Group(kind, int(stage), int(step))


@lru_cache(maxsize=1 << 16)
def _micro_batch(name: str) -> MicroBatch:
    replica, _, index = name.partition(".")
    return MicroBatch(int(replica), int(index))
