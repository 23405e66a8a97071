"""Programs as arrays: an instruction is a view on one integer.

A plan for 1,536 workers holds some 300,000 instructions. They are packed into one immutable block of 64-bit codes, so
that planning, verifying and hashing run over arrays; an :class:`Instruction` is made only when one is looked at. A code
holds op, stage and micro-batch, and neither step nor peer: a plan is the template of every step, and
``planner.lowered`` adds transfers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE, Instruction, Op
from recycle_plugin.core.vocabulary.topology import Topology

OPS = tuple(Op)
OP_SHIFT, STAGE_SHIFT, REPLICA_SHIFT = 56, 40, 20
STAGE_MASK, PLACE_MASK = (1 << 16) - 1, (1 << 20) - 1
_NUMBER = {op: number for number, op in enumerate(OPS)}


def encode(instruction: Instruction) -> int:
    """Return the integer code of a template's instruction. Raises ValueError for one bound to a step or a peer."""
    if instruction.step or instruction.peer:
        raise ValueError(
            f"{instruction} is bound to a step or a peer: a plan's programs are templates without transfers"
        )
    replica, index = instruction.micro_batch or (0, 0)
    return _NUMBER[instruction.op] << OP_SHIFT | instruction.stage << STAGE_SHIFT | replica << REPLICA_SHIFT | index


@lru_cache(maxsize=1 << 16)
def decode(code: int) -> Instruction:
    """Return the instruction of a ``code`` that :func:`encode` has made."""
    op = OPS[code >> OP_SHIFT]
    micro_batch = None if op in STAGE_WIDE else MicroBatch(code >> REPLICA_SHIFT & PLACE_MASK, code & PLACE_MASK)
    return Instruction(op, code >> STAGE_SHIFT & STAGE_MASK, micro_batch)


class Program(Sequence[Instruction]):
    """One worker's instructions, in order; equal to any sequence of the same instructions."""

    __slots__ = ("codes",)

    def __init__(self, codes: memoryview) -> None:
        self.codes = codes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, place: Any) -> Any:
        return tuple(map(decode, self.codes[place])) if isinstance(place, slice) else decode(self.codes[place])

    def __iter__(self) -> Iterator[Instruction]:
        return map(decode, self.codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Iterable[Instruction]) -> tuple[Instruction, ...]:
        return (*self, *other)

    def __radd__(self, other: Iterable[Instruction]) -> tuple[Instruction, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        return f"Program({' '.join(map(str, self))})"


class Packed(Mapping[Seat, Any]):
    """A row of 64-bit integers for each seat. ``data`` holds the rows one after the other in the order of ``seats``
    (sorted); row i ends before entry ``ends[i]``. Raises ValueError if lengths do not fit.
    """

    __slots__ = ("data", "ends", "seats")

    def __init__(self, seats: tuple[Seat, ...], ends: tuple[int, ...], data: bytes) -> None:
        if 8 * (ends[-1] if ends else 0) != len(data) or len(seats) != len(ends):
            raise ValueError(f"{len(data)} bytes for {len(seats)} seats whose rows end at {ends[-1] if ends else 0}")
        self.seats, self.ends, self.data = seats, ends, data

    @classmethod
    def of(cls, rows: Mapping[Seat, Sequence[Any]]) -> Packed:
        """Return ``rows`` packed, in the order of the seats."""
        seats, ends, data = tuple(sorted(rows)), [], array("q")
        for seat in seats:
            data.extend(cls._numbers(rows[seat]))
            ends.append(len(data))
        return cls(seats, tuple(ends), data.tobytes())

    @staticmethod
    def _numbers(row: Sequence[Any]) -> Iterable[int]:
        return row

    def __len__(self) -> int:
        return len(self.seats)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self.seats)

    def __contains__(self, seat: Any) -> bool:
        place = bisect_left(self.seats, seat)
        return place < len(self.seats) and self.seats[place] == seat

    def __getitem__(self, seat: Seat) -> Any:
        place = bisect_left(self.seats, seat)
        if place == len(self.seats) or self.seats[place] != seat:
            raise KeyError(seat)
        return memoryview(self.data).cast("q")[self.ends[place - 1] if place else 0 : self.ends[place]]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed):
            return (self.seats, self.ends, self.data) == (other.seats, other.ends, other.data)
        return Mapping.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((self.seats, self.ends, self.data))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.seats)} seats, {self.ends[-1] if self.ends else 0} entries)"


class Programs(Packed):
    """The :class:`Program` of every seat, packed into one block of codes."""

    __slots__ = ()

    @staticmethod
    def _numbers(row: Sequence[Instruction]) -> Iterable[int]:
        return row.codes if isinstance(row, Program) else map(encode, row)

    def __getitem__(self, seat: Seat) -> Program:
        return Program(super().__getitem__(seat))


class Route(Mapping[tuple[int, MicroBatch], Seat]):
    """The seat that runs each (stage, micro-batch). ``data``: 32-bit replica numbers by stage, replica, index. Raises
    ValueError if its length does not fit ``topology``.
    """

    __slots__ = ("data", "topology")

    def __init__(self, topology: Topology, data: bytes) -> None:
        if len(data) != 4 * topology.stages * topology.replicas * topology.micro_batches:
            raise ValueError(f"a route of {len(data) // 4} entries for {topology}")
        self.topology, self.data = topology, data

    @classmethod
    def of(cls, topology: Topology, route: Mapping[tuple[int, MicroBatch], Seat]) -> Route:
        """Return ``route`` packed; it has to name a seat for every stage and micro-batch of ``topology``."""
        return cls(
            topology,
            array(
                "i", (route[stage, mb].replica for stage in range(topology.stages) for mb in topology.batch)
            ).tobytes(),
        )

    def __getitem__(self, key: tuple[int, MicroBatch]) -> Seat:
        stage, (replica, index) = key
        shape = self.topology
        if not (0 <= stage < shape.stages and 0 <= replica < shape.replicas and 0 <= index < shape.micro_batches):
            raise KeyError(key)
        return Seat(
            memoryview(self.data).cast("i")[(stage * shape.replicas + replica) * shape.micro_batches + index], stage
        )

    def __iter__(self) -> Iterator[tuple[int, MicroBatch]]:
        return ((stage, micro_batch) for stage in range(self.topology.stages) for micro_batch in self.topology.batch)

    def __len__(self) -> int:
        return len(self.data) // 4

    def owned(self, stage: int, replicas: Collection[int]) -> dict[int, tuple[MicroBatch, ...]]:
        """Return by replica number the micro-batches of ``replicas`` that each worker of ``stage`` runs, in order."""
        width = self.topology.replicas * self.topology.micro_batches
        owned: dict[int, list[MicroBatch]] = {}
        wanted = frozenset(replicas)
        for replica, micro_batch in zip(
            memoryview(self.data).cast("i")[stage * width : (stage + 1) * width], self.topology.batch
        ):
            if micro_batch.replica in wanted:
                owned.setdefault(replica, []).append(micro_batch)
        return {replica: tuple(micro_batches) for replica, micro_batches in owned.items()}

    def __eq__(self, other: object) -> bool:
        return (
            (self.topology, self.data) == (other.topology, other.data)
            if isinstance(other, Route)
            else Mapping.__eq__(self, other)
        )

    def __hash__(self) -> int:
        return hash((self.topology, self.data))
