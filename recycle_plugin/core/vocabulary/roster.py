"""Rosters: the members of a generation, the seats that they hold, and the members that are given up together.

A *worker* is one process: a rank, and the number of this process among those that had the rank, its *incarnation*. A
worker that comes back is another worker than the lost one. A *seat* is held by a group of workers in a fixed order, its
*shards*: each has a part of the stage, and they compute together. Workers with the same shard of a stage have the same
state and are each other's *peers*. Nobody searches a generation's members: a :class:`Roster` answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, KeysView
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.ids import Seat


class WorkerId(NamedTuple):
    """The identity of one process: the ``incarnation``-th, from 0, that has ``rank``."""

    rank: int
    incarnation: int = 0


@dataclass(frozen=True)
class Member:
    """A worker of a generation. ``address``: where its peers reach it. ``host``: that host's name. ``shard``: its place
    in the seat's group. In the roster that another worker is told, ``host`` is a number, and ``address`` is "" unless
    the two are near each other (:meth:`Roster.beside`).
    """

    rank: int
    seat: Seat
    address: str
    host: str
    incarnation: int = 0
    shard: int = 0

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.rank, self.incarnation)

    def __str__(self) -> str:
        return named(self.rank, self.seat)


Group = tuple[Member, ...]


GROUPS: dict[str, Callable[[Member], Any]] = {
    "_by_seat": lambda member: member.seat,
    "_by_stage": lambda member: member.seat.stage,
    "_by_shard": lambda member: (member.seat.stage, member.shard),
    "_by_replica": lambda member: member.seat.replica,
}
"""By what a roster groups its members, by the name of the index."""


@dataclass(frozen=True)
class Roster:
    """The workers of a generation, sorted by rank. Each index (a dict for each kind of question) is made on first use,
    in one pass. After that every answer is one look-up, whatever the number of workers, unless its docstring says
    otherwise. Raises ValueError if two members have one rank, or one shard of a seat.
    """

    members: Group = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(sorted(self.members, key=lambda member: member.worker)))
        if len(self.ranks) < len(self.members):
            raise ValueError(
                f"two members of one generation have the rank {_twice(each.rank for each in self.members)}"
            )
        places = [(each.seat, each.shard) for each in self.members]
        if len(set(places)) < len(places):
            raise ValueError(f"two members of one generation have the seat and shard {_twice(places)}")

    def _grouped(self, by: Callable[[Member], Hashable]) -> dict[Any, Any]:
        groups: dict[Hashable, list[Member]] = {}
        for member in self.members:
            groups.setdefault(by(member), []).append(member)
        return {name: tuple(group) for name, group in groups.items()}

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    # --- workers -----------------------------------------------------------------------------------

    @cached_property
    def _by_worker(self) -> dict[WorkerId, Member]:
        return {member.worker: member for member in self.members}

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(member.rank for member in self.members)

    @property
    def workers(self) -> KeysView[WorkerId]:
        return self._by_worker.keys()

    def member(self, worker: WorkerId) -> Member | None:
        """Return the member that ``worker`` is; None for a stranger."""
        return self._by_worker.get(worker)

    @property
    def first(self) -> Member:
        """The member of the lowest rank, which acts for all. Raises IndexError if nobody is left."""
        return self.members[0]

    # --- seats and stages --------------------------------------------------------------------------

    @cached_property
    def _by_seat(self) -> dict[Seat, Group]:
        groups = self._grouped(GROUPS["_by_seat"])
        return {seat: tuple(sorted(group, key=lambda member: member.shard)) for seat, group in groups.items()}

    @cached_property
    def _by_stage(self) -> dict[int, Group]:
        return self._grouped(GROUPS["_by_stage"])

    @cached_property
    def _by_shard(self) -> dict[tuple[int, int], Group]:
        return self._grouped(GROUPS["_by_shard"])

    @cached_property
    def _by_replica(self) -> dict[int, Group]:
        return self._grouped(GROUPS["_by_replica"])

    @cached_property
    def _by_address(self) -> dict[str, Member]:
        return {member.address: member for member in self.members if member.address}

    @property
    def seats(self) -> KeysView[Seat]:
        return self._by_seat.keys()

    @cached_property
    def working(self) -> frozenset[Seat]:
        """The seats that get work: all except those that lack a shard."""
        return frozenset(seat for seat, group in self._by_seat.items() if len(group) == self.shards)

    def empty_stages(self, stages: int) -> tuple[int, ...]:
        """Return which of a job's ``stages`` no working seat holds. Costs little more than a look at each stage."""
        return tuple(stage for stage in range(stages) if not any(map(self.works, self.stage(stage))))

    def works(self, member: Member) -> bool:
        """Return whether ``member``'s seat is given work: no shard is missing."""
        return len(self.group(member.seat)) == self.shards

    @cached_property
    def shards(self) -> int:
        """The number of shards of the seat that has most; 0 without members."""
        return max(map(len, self._by_seat.values()), default=0)

    def seats_by_rank(self) -> dict[int, Seat]:
        """Return the seat of each rank, in one pass over the members."""
        return {member.rank: member.seat for member in self.members}

    def group(self, seat: Seat) -> Group:
        """Return the members that hold ``seat``, in the order of their shards; empty if it is lost."""
        return self._by_seat.get(seat, ())

    def of_ranks(self, ranks: Collection[int]) -> Group:
        """Return the members that have any of ``ranks``, in one pass over the members."""
        return tuple(member for member in self.members if member.rank in ranks)

    def hosts_by_rank(self) -> dict[int, str]:
        """Return the host of each rank, in one pass over the members."""
        return {member.rank: member.host for member in self.members}

    def holder(self, seat: Seat, shard: int = 0) -> Member | None:
        """Return the member that holds ``shard`` of ``seat``; None if it is lost. Costs a look at each shard."""
        return next((member for member in self.group(seat) if member.shard == shard), None)

    def holding(self, seat: Seat, shard: int = 0) -> Member:
        """Return the holder of ``shard`` of ``seat``. Raises AssertionError if nobody holds it."""
        holder = self.holder(seat, shard)
        assert holder is not None, f"nobody holds seat {seat}"
        return holder

    def address(self, seat: Seat, shard: int = 0) -> str:
        """Return where the holder of ``shard`` of ``seat`` is reached. Raises AssertionError if nobody holds it, or if
        this is a worker's roster and the holder is not near it.
        """
        address = self.holding(seat, shard).address
        assert address, f"seat {seat} is not near, so its address was not told"
        return address

    @cached_property
    def counterparts(self) -> tuple[Group, ...]:
        """The members that hold the same shard of their seats, shard by shard, each group in the order of the seats."""
        by_shard = sorted(self._grouped(lambda member: member.shard).items())
        return tuple(tuple(sorted(group, key=lambda member: member.seat)) for _, group in by_shard)

    def at(self, address: str) -> Member | None:
        """Return the member that its peers reach at ``address``; None if there is none."""
        return self._by_address.get(address)

    @cached_property
    def addresses(self) -> frozenset[str]:
        return frozenset(self._by_address)

    def stage(self, stage: int) -> Group:
        """Return the members of ``stage``, in the order of the ranks."""
        return self._by_stage.get(stage, ())

    def peers(self, stage: int, shard: int = 0) -> Group:
        """Return the members that hold ``shard`` of ``stage``, which have one state, in the order of the ranks."""
        return self._by_shard.get((stage, shard), ())

    def alike(self, member: Member) -> Group:
        """Return the members with ``member``'s stage and shard, itself too, in the order of the ranks."""
        return self.peers(member.seat.stage, member.shard)

    def working_peers(self, stage: int, shard: int = 0) -> dict[int, Member]:
        """Return, by replica, the members with ``shard`` of ``stage`` whose seat gets work. One pass over them."""
        return {member.seat.replica: member for member in self.peers(stage, shard) if self.works(member)}

    def is_last(self, member: Member) -> bool:
        """Return whether ``member`` holds the only seat of its stage that is held. Costs one pass over the stage's
        members.
        """
        return all(other.seat == member.seat for other in self.stage(member.seat.stage))

    @cached_property
    def live_stages(self) -> tuple[int, ...]:
        """The stages that have a member, in order."""
        return tuple(sorted(self._by_stage))

    def first_of(self, stage: int, shard: int = 0) -> Member:
        """Return the member of the lowest rank with ``shard`` of ``stage``. Raises IndexError if there is none."""
        return self.peers(stage, shard)[0]

    def stages(self, stages: Collection[int], shard: int = 0) -> Group:
        """Return the members with ``shard`` of any of ``stages``, in the order of the ranks. Sorts them."""
        return tuple(
            sorted(
                (member for stage in set(stages) for member in self.peers(stage, shard)),
                key=lambda member: member.rank,
            )
        )

    def beside(self, stage: int, shard: int | None) -> Group:
        """Return the members that hold ``shard`` (None: any) of ``stage`` or of a stage beside it, in the order of the
        ranks. The first and the last stage count as beside each other: both draw batches, and either has those of the
        other. With those of its own seat they are *near* a worker: it sends to nobody else, and hears nobody else.
        Sorts them.
        """
        last = max(self.live_stages, default=0)
        ends = (last,) * (stage == 0) + (0,) * (stage >= last)
        stages = sorted({stage - 1, stage, stage + 1, *ends})
        if shard is not None:
            return self.stages(stages, shard)
        return tuple(sorted((each for one in stages for each in self.stage(one)), key=lambda member: member.rank))

    def replica(self, replica: int) -> Group:
        """Return the members of ``replica``, in the order of the ranks."""
        return self._by_replica.get(replica, ())

    # --- from one roster to the next, in one pass over the members --------------------------------------

    def without(self, workers: Collection[WorkerId]) -> Roster:
        """Return the roster without ``workers``. Its indexes come from this one's: beyond copies, made in C, the cost
        is a look at the groups of those that go.
        """
        gone = [self._by_worker[worker] for worker in workers if worker in self._by_worker]
        by_worker = self._by_worker.copy()
        for member in gone:
            del by_worker[member.worker]
        left = object.__new__(Roster)  # a part of what was checked
        indexes: dict[str, Any] = {"members": tuple(by_worker.values()), "_by_worker": by_worker}
        indexes["ranks"] = self.ranks.difference(member.rank for member in gone)
        for index, name in GROUPS.items():
            if index in self.__dict__:
                indexes[index] = groups = self.__dict__[index].copy()
                for group in {name(member) for member in gone}:
                    groups[group] = tuple(member for member in groups[group] if member.worker in by_worker)
                    if not groups[group]:
                        del groups[group]
        left.__dict__.update(indexes)
        return left

    def joins(self, before: Roster) -> Group:
        """Return the members that ``before`` lacks, in one pass over the members."""
        return tuple(member for member in self.members if member.worker not in before.workers)

    def leaves(self, before: Roster) -> Group:
        """Return the members that only ``before`` has, in one pass over them."""
        return before.joins(self)


def _twice(names: Iterable[Hashable]) -> Hashable:
    return Counter(names).most_common(1)[0][0]


class FailureDomain(Enum):
    """The unit that is given up as one when a worker of it is lost."""

    WORKER = "worker"
    SEAT = "seat"
    REPLICA = "replica"

    def of(self, member: Member, roster: Roster) -> Group:
        """Return the members of ``roster`` that go when ``member`` does, itself first."""
        together = {
            FailureDomain.WORKER: (),
            FailureDomain.SEAT: roster.group(member.seat),
            FailureDomain.REPLICA: roster.replica(member.seat.replica),
        }
        return member, *(other for other in together[self] if other != member)

    def unit(self, member: Member) -> Hashable:
        """Return the name of ``member``'s unit: equal for all that go with it and for their successors."""
        return {
            FailureDomain.WORKER: member.worker,
            FailureDomain.SEAT: member.seat,
            FailureDomain.REPLICA: member.seat.replica,
        }[self]

    def units(self, roster: Roster) -> tuple[Group, ...]:
        """Return the members of ``roster`` unit by unit, in the order of seats and shards. Sorts them."""
        found: dict[Hashable, list[Member]] = {}
        for member in sorted(roster, key=lambda member: (member.seat, member.shard)):
            found.setdefault(self.unit(member), []).append(member)
        return tuple(map(tuple, found.values()))
