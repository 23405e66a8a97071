"""Regrouping, from one membership to the next: it is published, its members report, then they go on together.

* A *generation* is a version of the membership. After a failure it holds at once. A planned one holds from a step that
  nobody can have started.
* Every member of a new generation stops and reports how many steps it has applied, what it holds of unfinished ones,
  and the hash of its plan. When all have reported, all are told every report.
* A newer generation replaces one that is still under way. Reports for an older one are dropped.
* If many workers are lost at once, one generation is without all of them: to tell each loss to everybody would cost the
  coordinator time in proportion to the losses times the members.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recycle_plugin.core.coordinator.facts.output import WORKERS, CoordinatorOutput
from recycle_plugin.core.coordinator.facts.shards import drawn_by_all, held_by_all
from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.messages.from_workers import SurvivorReport
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId

NAMED = 3  # so many causes of one generation are named


@dataclass(frozen=True)
class Reports:
    """The reports of all that go on in ``generation``, as they came."""

    generation: Generation
    by_worker: dict[WorkerId, SurvivorReport]

    @property
    def counts(self) -> list[int]:
        """How many steps each worker has applied, in the order of the reports."""
        return [report.stepped for report in self.by_worker.values()]

    @property
    def all_valid_from(self) -> list[int]:
        """The generation from which each worker's data is valid, in the order of the reports."""
        return [report.valid_from for report in self.by_worker.values()]

    @property
    def loaded(self) -> bool:
        """Whether any worker has the state of a checkpoint."""
        return any(report.loaded for report in self.by_worker.values())

    @property
    def slowest(self) -> SurvivorReport:
        """The report that took longest to make."""
        return max(self.by_worker.values(), key=lambda report: sum(report.timings.values()))

    @cached_property
    def holdings(self) -> dict[str, Any]:
        """The held data by seat, in its text form: what all shards of the seat hold."""
        return {seat: held_by_all([report.held for report in told]) for seat, told in self._told.items()}

    @cached_property
    def held_draws(self) -> dict[str, Any]:
        """The held data of plain iterators by seat, in its text form: what all shards of the seat hold, if anything."""
        drawn = {seat: drawn_by_all([report.held_draws for report in told]) for seat, told in self._told.items()}
        return {seat: found for seat, found in drawn.items() if found}

    @cached_property
    def placed(self) -> dict[Seat, SurvivorReport]:
        """By seat, one report of those whose plain iterators stand at their replica's place."""
        return {Seat.parse(seat): told[0] for seat, told in self._told.items() if told[0].places}

    @cached_property
    def _told(self) -> dict[str, list[SurvivorReport]]:
        """For each seat with a report, its shards' reports in their order."""
        told: dict[str, list[SurvivorReport]] = {}
        for seat in self.generation.roster.seats:
            for member in self.generation.roster.group(seat):
                if (report := self.by_worker.get(member.worker)) is not None:
                    told.setdefault(str(seat), []).append(report)
        return told

    @property
    def odd(self) -> dict[WorkerId, str]:
        """The workers that contradict the majority, and how, in words; empty if there is no majority."""
        told = {
            worker: (report.digest, report.stepped if report.loaded else None)
            for worker, report in self.by_worker.items()
        }
        usual, count = Counter(told.values()).most_common(1)[0]
        if 2 * count <= len(told):
            return {}
        plan = f"it has made another plan for generation {self.generation.number} than most others"
        return {
            worker: plan
            if digest != usual[0]
            else f"it has loaded {_of_checkpoint(loaded)}, and most others {_of_checkpoint(usual[1])}"
            for worker, (digest, loaded) in told.items()
            if (digest, loaded) != usual
        }

    def contradiction(self) -> str | None:
        """Return why the workers can't go on together, or None."""
        digests = {report.digest for report in self.by_worker.values()}
        if len(digests) > 1:
            return f"workers made different plans for generation {self.generation.number}: {', '.join(sorted(digests))}"
        steps = set(self.counts)
        if self.loaded and not (len(steps) == 1 and all(report.loaded for report in self.by_worker.values())):
            return f"workers have loaded checkpoints of different steps: {', '.join(map(str, sorted(steps)))}"
        return None


def _of_checkpoint(loaded: int | None) -> str:
    return "no checkpoint" if loaded is None else f"a checkpoint of step {loaded}"


class Regrouping:
    """The change to the newest generation. ``generation``: the newest. ``in_force``: the last that came about."""

    def __init__(self) -> None:
        self.generation = -1
        self.in_force = -1
        self._awaiting: Generation | None = None
        self._asked: frozenset[WorkerId] = frozenset()  # the newest generation's members
        self._reports: dict[WorkerId, SurvivorReport] = {}
        self._open: set[WorkerId] = set()  # those that have not reported
        self._behind: list[str] = []  # why another generation is to follow
        self.plans_more = False  # workers have asked to leave or to return since a generation was planned

    @property
    def under_way(self) -> bool:
        """Whether a published generation has not come about yet."""
        return self._awaiting is not None

    @property
    def at_once(self) -> int | None:
        """The number of the generation under way if it holds at once, else None."""
        return self._awaiting.number if self._awaiting and not self._awaiting.from_step else None

    @property
    def planned(self) -> Generation | None:
        """The generation under way if it holds from a later step, else None."""
        return self._awaiting if self._awaiting and self._awaiting.from_step else None

    def plans(self, roster: Roster) -> bool:
        """Return whether a planned generation with the workers of ``roster`` is under way."""
        return self.planned is not None and self.planned.roster.workers == roster.workers

    def publish(
        self, roster: Roster, from_step: int, cause: str, now: float, slowness: tuple[Any, ...], out: CoordinatorOutput
    ) -> None:
        """Publish a generation of ``roster`` to all workers. It holds from ``from_step`` on, or at once if 0."""
        self.generation += 1
        self._awaiting = Generation(self.generation, tuple(roster), from_step, cause, now, slowness)
        self._asked = frozenset(roster.workers)
        self._open = set(self._asked)
        self._reports.clear()
        self._behind = []
        out.tell(WORKERS, self._awaiting)

    def put_off(self, cause: str) -> None:
        """Let the present generation, which can't come about any more, wait until a newer generation is published."""
        self._behind.append(cause)

    @property
    def behind(self) -> str:
        """Why another generation is to follow the one under way; "" if none is."""
        more = f"; {len(self._behind) - NAMED} more" if len(self._behind) > NAMED else ""
        return "; ".join(self._behind[:NAMED]) + more

    def has_come(self, committed: int) -> bool:
        """Return whether the generation under way can hold by now: its step is at most the one after ``committed``."""
        return self._awaiting is not None and committed >= self._awaiting.from_step - 1

    def counts_on(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` is a member of the generation under way."""
        return self._awaiting is not None and worker in self._awaiting.roster.workers

    def report(self, worker: WorkerId) -> SurvivorReport | None:
        """Return the report of ``worker`` for the newest generation; None if there is none."""
        return self._reports.get(worker)

    def add(self, report: SurvivorReport) -> bool:
        """Record a report. Return False, and drop it, if it is not a member's for the generation under way."""
        if report.generation != self.generation or self.generation == self.in_force:
            return False
        if report.worker not in self._asked:
            return False
        self._reports[report.worker] = report
        self._open.discard(report.worker)
        return True

    @property
    def wanted(self) -> bool:
        """Whether a worker has reported for a generation that has not come about: it still needs the others."""
        return self.generation > self.in_force and bool(self._reports)

    def complete(self, live: Roster) -> Reports | None:
        """Return all reports once every worker in ``live`` has reported, else None."""
        if (
            self._behind
            or self._awaiting is None
            or not self._reports
            or any(worker in live.workers for worker in self._open)
        ):
            return None
        return Reports(self._awaiting, dict(self._reports))

    def agreed(self, generation: Generation) -> None:
        """Put ``generation`` in force."""
        self._awaiting, self.in_force = None, generation.number

    def stop(self) -> None:
        """Drop the generation under way: nobody goes on, for now or for good."""
        self._awaiting, self._behind = None, []

    def overdue(self, left: set[WorkerId], seconds: float) -> str | None:
        """Return the complaint about missing reports after ``seconds``, or None. ``left``: need not report."""
        if self._awaiting is None:
            return None
        missing = self._awaiting.roster.without(left | self._reports.keys())
        return (
            f"regrouping to generation {self._awaiting.number} waited {seconds:.0f} s for the report of "
            f"{', '.join(map(str, missing))}; raise recycle.idle_timeout_s and "
            "recycle.wait_timeout_s if the training script may pause that long"
        )
