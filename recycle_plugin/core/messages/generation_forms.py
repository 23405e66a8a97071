"""The forms in which workers are told of a generation.

Over a connection that an earlier one went over, it is what has changed. Else it is a FirstGeneration: who all members
are, and where those near the worker are (:meth:`~recycle_plugin.core.vocabulary.roster.Roster.beside`). Plans, sums and
scripts need to know who the others are, and not where. Ranks, seats and hosts are regular, so they are sent as steps
from one member to the next. The addresses of a stage are packed once for all its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate, chain, groupby, repeat

from recycle_plugin.core.messages.encoding import MOST, decode, encode
from recycle_plugin.core.messages.from_coordinator import (
    Everyone,
    FirstGeneration,
    Generation,
    GenerationChange,
    Run,
    WhereNear,
)
from recycle_plugin.core.messages.typed import Unreadable
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Group, Member


class GenerationForEach:
    """A generation in the forms that workers are told. ``hosts``: the number of each host, which all hear of."""

    def __init__(self, generation: Generation, hosts: Mapping[str, int]) -> None:
        self._generation, self._hosts = generation, hosts
        self._near = cache(self._packed)

    def changed(self, before: Generation) -> GenerationChange:
        """Return it for those that have heard of ``before``. Two passes over the members."""
        change = self._generation.changed(before)
        come = tuple(replace(member, host=str(self._hosts[member.host])) for member in change.come)
        return replace(change, come=come)

    def first(self, seat: Seat, shard: int | None) -> FirstGeneration:
        """Return it for the worker with ``shard`` of ``seat``; None: any shard. Costs a pass over the members once, and
        one over those of the three stages for each stage and shard.
        """
        it, several = self._generation, self._generation.roster.shards > 1 and shard is not None
        near = self._near(seat.stage, shard), *((self._near(seat, shard),) if several else ())
        return FirstGeneration(it.number, it.from_step, it.cause, it.at, it.slowness, self._everyone, near)

    @cached_property
    def _everyone(self) -> bytes:
        members = self._generation.members
        return encode(
            Everyone(
                runs(each.rank for each in members),
                runs(each.seat.replica for each in members),
                runs(each.seat.stage for each in members),
                runs(self._hosts[each.host] for each in members),
                runs(each.incarnation for each in members),
                runs(each.shard for each in members),
            )
        )

    def _packed(self, of: Seat | int, shard: int | None) -> bytes:
        """Return the addresses of a seat, or of ``shard`` of a stage and those beside it."""
        roster = self._generation.roster
        near: Group = roster.group(of) if isinstance(of, Seat) else roster.beside(of, shard)
        return encode(WhereNear(runs(each.rank for each in near), tuple(each.address for each in near)))


def whole(first: FirstGeneration) -> Generation | Unreadable:
    """Return the generation, in which members that are not near have no address. One pass over the members."""
    everyone, where = decode(first.everyone), dict[int, str]()
    for near in map(decode, first.near):
        if not isinstance(near, WhereNear) or _count(near.ranks) != len(near.addresses):
            return near if isinstance(near, Unreadable) else Unreadable("addresses", "are not one for each rank")
        where.update(zip(numbers(near.ranks), near.addresses, strict=True))
    if not isinstance(everyone, Everyone):
        return everyone if isinstance(everyone, Unreadable) else Unreadable("members", "are another message")
    columns = (everyone.ranks, everyone.replicas, everyone.stages, everyone.hosts, everyone.incarnations)
    counts = {*map(_count, columns), _count(everyone.shards)}
    if len(counts) > 1 or max(counts) > MOST:
        return Unreadable("members", f"are {sorted(counts)} by different columns, and at most {MOST} are read")
    members = tuple(
        Member(rank, Seat(replica, stage), where.get(rank, ""), str(host), incarnation, shard)
        for rank, replica, stage, host, incarnation, shard in zip(
            *map(numbers, columns), numbers(everyone.shards), strict=True
        )
    )
    return Generation(first.number, members, first.from_step, first.cause, first.at, first.slowness)


def runs(of: Iterable[int]) -> tuple[Run, ...]:
    """Return the runs of the steps from 0 through the numbers ``of``. One pass over them."""
    given = [*of]
    steps = (number - before for before, number in zip(chain((0,), given), given))
    return tuple(Run(by, len([*same])) for by, same in groupby(steps))


def numbers(of: tuple[Run, ...]) -> Iterable[int]:
    """Return what :func:`runs` was given."""
    return accumulate(chain.from_iterable(repeat(by, length) for by, length in of))


def _count(of: tuple[Run, ...]) -> int:
    return sum(max(run.length, 0) for run in of)
