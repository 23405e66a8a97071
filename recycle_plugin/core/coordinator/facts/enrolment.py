"""Enrolment, the start of a job: all workers are there and want the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from recycle_plugin.core.messages.from_workers import Ready
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId

WAIT_S = 900.0  # the default of wait_timeout_s


class Enrolment:
    """The workers that have come or are ready, of a job of ``ranks`` ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: dict[int, Ready] = {}  # by rank
        self._come: set[int] = set()  # ranks whose worker has connected
        self._latest = 0, 0, 0.0  # how many had come and were ready by now, and since when (s)
        self.told_s = 0.0  # for how long nobody had come when the user was told last

    def come(self, rank: int) -> None:
        """Record that a worker of ``rank`` has connected."""
        self._come.add(rank)

    def awaited_s(self, now: float) -> float:
        """Return for how many seconds others have been waited for and none has come further, if asked at each tick."""
        latest = len(self._come), len(self._ready)
        if latest != self._latest[:2] or not self._latest[2]:
            self._latest, self.told_s = (*latest, now), 0.0
        return now - self._latest[2] if latest[0] < self._ranks or latest[1] else 0.0

    @property
    def absent(self) -> list[int]:
        """The ranks of which no worker has come. O(ranks)."""
        return [rank for rank in range(self._ranks) if rank not in self._come]

    @property
    def unready(self) -> list[int]:
        """The ranks of which no worker is ready. O(ranks)."""
        return [rank for rank in range(self._ranks) if rank not in self._ready]

    @property
    def wait_s(self) -> float:
        """For how many seconds workers wait for each other, by the job's setting once a worker has told it."""
        told = next(iter(self._ready.values()), None)
        return WAIT_S if told is None else told.job.deadlines.wait_timeout_s

    def add(self, ready: Ready) -> bool:
        """Record a worker that is ready. Return whether all are there."""
        self.come(ready.worker.rank)
        self._ready[ready.worker.rank] = ready
        return len(self._ready) >= self._ranks

    def is_stranger(self, worker: WorkerId) -> bool:
        """Return whether another worker already has the rank of ``worker``."""
        first = self._ready.get(worker.rank)
        return first is not None and first.worker != worker

    @property
    def roster(self) -> Roster:
        return Roster(tuple(ready.member for ready in self._ready.values()))

    def contradiction(self) -> str | None:
        """Return why the workers can't train together: the settings that differ, and each side's value. None if they
        can.

        Linear in the workers; settings are compared one by one only between workers whose jobs differ.
        """
        alike: dict[tuple[JobSpec, int], list[int]] = {}
        for rank, ready in sorted(self._ready.items()):
            alike.setdefault((ready.job, ready.stepped), []).append(rank)
        wants = [
            ({**_flat(asdict(job)), "the checkpoint's step": stepped}, ranks) for (job, stepped), ranks in alike.items()
        ]
        names = dict.fromkeys(name for want, _ in wants for name in want if name not in HOSTS)
        differing = [name for name in names if len({str(want.get(name)) for want, _ in wants}) > 1]
        if not differing:
            return self._misplaced()
        found = "; ".join(
            f"{name} is {_by_value({rank: str(want.get(name)) for want, ranks in wants for rank in ranks})}"
            for name in differing
        )
        return f"workers were started with different recycle settings or from different checkpoints: {found}"

    def _misplaced(self) -> str | None:
        """Return why the workers' seats are not those of their job; None if they are."""
        try:
            shape, roster = next(iter(self._ready.values())).job.shape, self.roster
        except ValueError as error:
            return f"these workers make no job: {error}"
        strange = sorted(roster.seats ^ set(shape.seats))
        return (
            f"seat {strange[0]} is {'held by no worker' if strange[0] in shape.seats else 'not in the job'}: workers "
            "were started with another number of stages or replicas"
            if strange
            else None
        )


CHANGES = frozenset({"micro_batches", "batch"})  # fields that change while a job goes on
HOSTS = frozenset({"folders"})  # fields that may differ between hosts
WHERE = HOSTS | {"run_dir", "metrics", "console"}  # fields of which the job's own value counts


def unlike(job: JobSpec, newcomers: JobSpec) -> str:
    """Return how a newcomer's settings differ from the job's, in words; "" if they agree."""
    ours, theirs = _flat(asdict(job)), _flat(asdict(newcomers))
    names = [name for name in ours | theirs if name not in CHANGES | WHERE and ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} is {ours.get(name)} in the job and {theirs.get(name)} in the newcomer" for name in names)


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _by_value(values: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} (rank{'s' * (len(those) > 1)} {', '.join(map(str, those))})" for value, those in ranks.items()
    )
