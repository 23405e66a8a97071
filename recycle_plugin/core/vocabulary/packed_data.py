"""Sets of data as messages carry them: the micro-batches of each kind, stage and step together, in one text of ranges.

After a loss each worker of a job holds some hundred data, mostly of micro-batches in a row, and all are told what each
holds. Most questions concern kinds and steps alone, and the planner reads the texts into arrays (planner/closure.py).
So objects for data are made only on iteration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, lru_cache
from itertools import pairwise, repeat
from typing import Any, NamedTuple, TypeVar

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat

_RANGE = r"\d{1,9}\.\d{1,9}:\d{1,9}"  # replica, first and last micro-batch
RANGES = re.compile(rf"({_RANGE}( {_RANGE})*)?", re.ASCII)
MOST = 1 << 20  # micro-batches in all texts of a set
Key = TypeVar("Key")
SHOWN = 40  # characters of a malformed text in an error


class Group(NamedTuple):
    """The kind, stage and step that the data of a group share."""

    kind: str
    stage: int
    step: int


def pack(data: Iterable[Datum]) -> dict[str, str]:
    """Pack ``data`` for a message by kind, stage and step: {"wgrad 1@17": "0.0:3 0.5:5", "reduced 1@16": ""}."""
    found: dict[str, list[MicroBatch]] = {}
    for datum in sorted(data, key=lambda datum: (*datum[:2], datum.step, datum.micro_batch or ())):
        of = found.setdefault(f"{datum.kind} {datum.stage}@{datum.step}", [])
        of += [datum.micro_batch] if datum.micro_batch else []
    return {key: " ".join(_ranges(of)) for key, of in found.items()}


def among_all(held: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Shorten what each seat holds for a message to all. Own replicas are left out ("wgrad 1@17": ".0:3"), and most
    seats of a stage then hold the same: that is said once ("0:15 17:31.1": replicas and the stage). ``held``: by a
    seat's text form, as :func:`pack` makes it. Costs time in proportion to the seats.
    """
    alike: dict[tuple[int, tuple[tuple[str, str], ...]], list[int]] = {}
    for seat, packed in held.items():
        replica, _, stage = seat.partition(".")
        own = _replaced(packed, f" {replica}.", " .")
        alike.setdefault((int(stage), tuple(own.items())), []).append(int(replica))
    return {f"{' '.join(_runs(sorted(replicas)))}.{stage}": dict(own) for (stage, own), replicas in alike.items()}


def of_each(told: Mapping[str, Mapping[str, str]]) -> dict[Seat, PackedData]:
    """Undo :func:`among_all`; seats are in their order. Seats that hold the same share one ``PackedData.alike``."""
    held: dict[Seat, PackedData] = {}
    for seats, packed in told.items():
        replicas, _, stage = seats.rpartition(".")
        alike = PackedData(packed).alike
        for first, _, last in (run.partition(":") for run in replicas.split()):
            for replica in range(int(first), int(last) + 1):
                held[Seat(replica, int(stage))] = PackedData.of(alike, replica)
    return dict(sorted(held.items()))


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield the text of each longest run of ``numbers``, which are in order: "first:last"."""
    breaks = [place for place, (one, other) in enumerate(pairwise(numbers), 1) if other != one + 1]
    for begin, end in pairwise((0, *breaks, len(numbers))):
        yield f"{numbers[begin]}:{numbers[end - 1]}"


def _replaced(packed: Mapping[Key, str], old: str, new: str) -> dict[Key, str]:
    return {key: f" {ranges}".replace(old, new)[1:] for key, ranges in packed.items()}


def _ranges(micro_batches: Sequence[MicroBatch]) -> Iterator[str]:
    """Yield the text of each longest run of ``micro_batches``, which are in order."""
    breaks = [place for place, (one, other) in enumerate(pairwise(micro_batches), 1) if other != (one[0], one[1] + 1)]
    for begin, end in pairwise((0, *breaks, len(micro_batches))):
        if begin < end:
            (replica, first), (_, last) = micro_batches[begin], micro_batches[end - 1]
            yield f"{replica}.{first}:{last}"


class PackedData(AbstractSet[Datum]):
    """The set of data that :func:`pack` has put into ``packed``. Raises ValueError if a stage or a step in it is
    malformed; iterating raises it if a range is. ``alike``: by group, the micro-batches as "replica.first:last",
    separated by blanks; empty for data of a whole stage. Those of replica ``own`` may stand as ".first:last", so that
    others' sets can share ``alike``.
    """

    def __init__(self, packed: Mapping[str, str]) -> None:
        self.alike, self.own = {_group(key): ranges for key, ranges in packed.items()}, -1

    @classmethod
    def of(cls, alike: dict[Group, str], own: int) -> PackedData:
        """Return the set with the data ``alike`` of several replicas, of which ``own`` is one."""
        made = cls({})
        made.alike, made.own = alike, own
        return made

    @cached_property
    def ranges(self) -> dict[Group, str]:
        """By group, the micro-batches as "replica.first:last", separated by blanks."""
        return self.alike if self.own < 0 else _replaced(self.alike, " .", f" {self.own}.")

    @classmethod
    def _from_iterable(cls, data: Iterable[Any]) -> frozenset[Any]:  # type: ignore[override]
        """Return the result of an operation on two sets."""
        return frozenset(data)

    def check(self) -> None:
        """Raise ValueError if a text is no list of ranges of micro-batches, or if all of them are of too many."""
        total = 0
        for group, ranges in self.ranges.items():
            counts = [count for _, _, count in _parsed(ranges)] if RANGES.fullmatch(ranges) else [0]
            total += sum(counts)
            if min(counts, default=1) < 1 or total > MOST:
                raise ValueError(
                    f"{group.kind} of stage {group.stage} is of {ranges[:SHOWN]!r}: write replica.first:last, "
                    f"separated by blanks, for at most {MOST} micro-batches in all"
                )

    def __contains__(self, datum: object) -> bool:
        if not isinstance(datum, Datum):
            return False
        if datum.micro_batch is None:
            return self.alike.get(Group(datum.kind, datum.stage, datum.step)) == ""
        return datum in self._data

    def __iter__(self) -> Iterator[Datum]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    @cached_property
    def _data(self) -> frozenset[Datum]:
        found: set[Datum] = set()
        for (kind, stage, step), ranges in self.ranges.items():
            micro_batches: Iterable[MicroBatch | None] = (None,)
            if ranges:
                micro_batches = (
                    MicroBatch(replica, first + index)
                    for replica, first, count in _parsed(ranges)
                    for index in range(count)
                )
            found.update(map(Datum, repeat(kind), repeat(stage), micro_batches, repeat(step)))
        return frozenset(found)


def packed_data(data: AbstractSet[Datum]) -> PackedData:
    return data if isinstance(data, PackedData) else PackedData(pack(data))


def groups(*data: AbstractSet[Datum]) -> Collection[Group]:
    """Return the groups of all ``data``. Costs time in proportion to the groups that are not shared for packed sets,
    else to the data.
    """
    alike = {id(each.alike): each.alike for each in data if isinstance(each, PackedData)}
    others = [[Group(*datum[:2], datum.step) for datum in each] for each in data if not isinstance(each, PackedData)]
    found: set[Group] = set()
    return found.union(*alike.values(), *others)


@lru_cache(maxsize=1 << 12)
def _group(key: str) -> Group:
    kind, _, where = key.partition(" ")
    stage, _, step = where.partition("@")
    return Group(kind, int(stage), int(step))


def _parsed(ranges: str) -> Iterator[tuple[int, int, int]]:
    """Yield (replica, first micro-batch, count) of each of ``ranges``."""
    for each in ranges.split():
        replica, _, indexes = each.partition(".")
        first, _, last = indexes.partition(":")
        yield int(replica), int(first), int(last) - int(first) + 1
