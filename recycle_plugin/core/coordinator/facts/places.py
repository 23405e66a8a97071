"""Where each replica's plain iterator stands after the last committed step, whoever is lost
(core/vocabulary/iterator_draws.py has the rules).

The workers of a replica's first and last stage, its ends, report the place with each step that they apply. If a replica
has lost both ends, its batches in unfinished steps are counted from the copies that others hold. If these copies are
gone too once a step is summed, nobody knows how many batches are in it, and the replica has no place any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from recycle_plugin.core.coordinator.facts.regrouping import Reports
from recycle_plugin.core.messages.from_workers import Stepped
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import Draw, Place
from recycle_plugin.core.vocabulary.iterator_draws import unpack as unpack_drawn
from recycle_plugin.core.vocabulary.packed_data import PackedData


@dataclass
class Unfinished:
    """A step that is not committed. ``said``: reported places after it, by replica. ``drawn``: batches drawn of
    replicas of which nobody reports. ``numbers``: which of their scripts' iterators the ends have read for it.
    """

    said: dict[int, Place] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)

    def behind(self, replica: int, before: Place | None) -> Place | None:
        """Return the place of ``replica`` after this step, given the place ``before`` it; None if it is not known."""
        if replica in self.said or not self.drawn.get(replica):
            return self.said.get(replica, before)
        if before is None or len(self.numbers) != 1:
            return None
        (number,) = self.numbers  # all scripts are alike: lost workers read the same iterator
        return Place(number, self.drawn[replica] + (before.read if before.iterator == number else 0))


class Places:
    """The places of a job's plain iterators, by replica."""

    def __init__(self) -> None:
        self._kept: dict[int, Place] = {}  # after the last committed step
        self._unfinished: dict[int, Unfinished] = {}  # by step
        self._placed: set[int] = set()  # replicas with a reported place at the last regroup

    def stepped(self, message: Stepped, replica: int) -> None:
        """Record where the iterator of an end of ``replica`` stands after a step."""
        if message.place is not None:
            step = self._of(message.step)
            step.said[replica] = message.place
            step.numbers.add(message.place.iterator)

    def commit(self, last: int) -> None:
        """Keep the places after step ``last``, which is committed, and after those before it."""
        for number in sorted(step for step in self._unfinished if step <= last):
            step = self._unfinished.pop(number)
            for replica in (*step.said, *step.drawn):
                self._keep(replica, step.behind(replica, self._kept.get(replica)))

    def rewind(self) -> None:
        """Drop unfinished steps: all go on from a checkpoint, and their iterators go on where they are."""
        self._unfinished.clear()

    def agree(
        self, reports: Reports, committed: int, batches: Mapping[int, tuple[int, ...]], micro_batches: int
    ) -> None:
        """Record the reports of members that go on together; ``committed`` is the last step so far. ``batches``: for
        each of the next two steps, the replicas that contribute ``micro_batches`` each, if iterators are read. Costs
        time in proportion to the batches that the members hold.
        """
        for seat, report in reports.placed.items():
            for name, place in report.places.items():
                if int(name) <= committed:
                    self._keep(seat.replica, place)
                else:
                    self._of(int(name)).numbers.add(place.iterator)
                if committed < int(name) <= report.stepped:
                    self._of(int(name)).said[seat.replica] = place
        placed = {seat.replica for seat in reports.placed}
        for number, replicas in batches.items():
            self._count_draws(reports, number, replicas, micro_batches, placed)
        self._placed = placed

    def count_whole(self, reports: Reports, batches: Mapping[int, tuple[int, ...]], micro_batches: int) -> None:
        """Record that each replica that ``batches`` names for a step has given it all its ``micro_batches``, including
        replicas lost before they could report. For jobs whose scripts each draw only for themselves: a step has all of
        a replica's batches or none (core/vocabulary/step_batches.py).
        """
        placed, behind = {seat.replica for seat in reports.placed}, dict(self._kept)
        for number in sorted(batches):
            step = self._of(number)
            for replica in set(batches[number]).difference(placed, step.said):
                before = behind.get(replica, Place())
                step.said[replica] = Place(before.iterator, before.read + micro_batches)
            behind |= step.said

    def known(self, reports: Reports | None = None) -> dict[int, Place]:
        """Return the known places after the last committed step, or with ``reports`` the current ones."""
        if reports is None:
            return dict(self._kept)
        found: dict[int, Place | None] = dict(self._kept)
        for number in sorted(self._unfinished):
            for replica, before in found.items():
                found[replica] = self._unfinished[number].behind(replica, before)
        for seat, report in reports.placed.items():
            found[seat.replica] = report.places[max(report.places, key=int)]
        return {replica: place for replica, place in found.items() if place is not None}

    def _count_draws(
        self, reports: Reports, number: int, replicas: Collection[int], micro_batches: int, placed: Collection[int]
    ) -> None:
        """Add to each cursor the micro-batches drawn in step ``number``. Replicas in ``placed`` are skipped (their
        position is known); draws of replicas that do not contribute are ignored. If copies are missing of a summed
        step, replicas that nobody reports any more lose their place.
        """
        draws: dict[MicroBatch, Draw] = {}
        for packed in reports.held_draws.values():
            found = unpack_drawn(packed).get(number, {})
            draws.update((one, draw) for one, draw in found.items() if one.replica in replicas)
        step = self._of(number)
        step.said = {replica: place for replica, place in step.said.items() if replica in replicas}
        silent = self._placed.intersection(replicas).difference(placed, step.said)
        if (silent or step.drawn) and len(draws) < len(replicas) * micro_batches and _summed(reports, number):
            for replica in silent:
                self._kept.pop(replica, None)
            return  # the counts of other replicas stay
        step.drawn.clear()
        for draw in draws.values():
            if draw.source not in placed:
                step.drawn[draw.source] = max(step.drawn.get(draw.source, 0), draw.position + 1)

    @staticmethod
    def unfilled(reports: Reports, committed: int) -> int:
        """Return the step after ``committed`` for which the iterators of all whole replicas have ended; else 0."""
        step = max((report.lacks for report in reports.by_worker.values()), default=0)
        if step <= committed:
            return 0
        ended, seats = ended_iterators(reports), reports.generation.roster.working & reports.placed.keys()
        first, last = 0, max(seat.stage for seat in reports.generation.roster.working)
        whole = [seat.replica for seat in seats if seat.stage == first and Seat(seat.replica, last) in seats]
        newest = max(ended.values(), default=0)
        return step if all(ended.get(replica) == newest for replica in whole) else 0

    def _of(self, step: int) -> Unfinished:
        return self._unfinished.setdefault(step, Unfinished())

    def _keep(self, replica: int, place: Place | None) -> None:
        if place is None:
            self._kept.pop(replica, None)
        else:
            self._kept[replica] = place


def ended_iterators(reports: Reports) -> dict[int, int]:
    """Return, by replica, the number of its script's last iterator that an end has exhausted."""
    found: dict[int, int] = {}
    for seat, report in reports.placed.items():
        if report.ended:
            found[seat.replica] = max(report.ended, found.get(seat.replica, 0))
    return found


def _summed(reports: Reports, step: int) -> bool:
    """Return whether somebody has a gradient sum of ``step``, or has applied it."""
    return any(
        not ranges and (group.step == step + 1 if group.kind == "params" else group.step == step)
        for packed in reports.holdings.values()
        for group, ranges in PackedData(packed).ranges.items()
    )
