"""Enrolment, the start of a job: all workers are there and want the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from recycle_plugin.core.messages.from_workers import Ready
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId


class Enrolment:
    """The workers that are ready, of a job of so many ``ranks``."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: dict[int, Ready] = {}  # by rank

    def add(self, ready: Ready) -> bool:
        """Adds a worker that is ready; returns whether all are there."""
        self._ready[ready.worker.rank] = ready
        return len(self._ready) >= self._ranks

    def is_stranger(self, worker: WorkerId) -> bool:
        """Whether another worker has the rank of ``worker``."""
        first = self._ready.get(worker.rank)
        return first is not None and first.worker != worker

    @property
    def roster(self) -> Roster:
        return Roster(tuple(ready.member for ready in self._ready.values()))

    def contradiction(self) -> str | None:
        """The reason why they can't train together: what they want differently, and who wants what; else None."""
        wants = {
            rank: {**_flat(asdict(ready.job)), "the checkpoint's step": ready.stepped}
            for rank, ready in sorted(self._ready.items())
        }
        names = dict.fromkeys(name for want in wants.values() for name in want if name not in HOSTS)
        differing = [name for name in names if len({str(want.get(name)) for want in wants.values()}) > 1]
        if not differing:
            return self._misplaced()
        found = "; ".join(
            f"{name} is {_by_value({rank: str(want.get(name)) for rank, want in wants.items()})}" for name in differing
        )
        return f"workers were started with different recycle settings or from different checkpoints: {found}"

    def _misplaced(self) -> str | None:
        """The reason why these can't be the workers of the job that they want: they don't hold its seats; else None."""
        try:
            shape, roster = next(iter(self._ready.values())).job.shape, self.roster
        except ValueError as error:
            return f"this is no job: {error}"
        strange = sorted(roster.seats ^ set(shape.seats))
        return (
            f"seat {strange[0]} is {'held by nobody' if strange[0] in shape.seats else 'none of the job'}: workers "
            "were started with another number of stages or replicas"
            if strange
            else None
        )


CHANGES = frozenset({"micro_batches", "batch"})  # while a job goes on
HOSTS = frozenset({"folders"})  # may be each host's own
WHERE = HOSTS | {"run_dir", "metrics", "console"}  # the job's own counts


def unlike(job: JobSpec, newcomers: JobSpec) -> str:
    """What a newcomer wants otherwise than the job that it comes back to, in words; empty where it wants the same."""
    ours, theirs = _flat(asdict(job)), _flat(asdict(newcomers))
    names = [name for name in ours | theirs if name not in CHANGES | WHERE and ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} is {ours.get(name)} in the job and {theirs.get(name)} there" for name in names)


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _by_value(values: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} (rank{'s' * (len(those) > 1)} {', '.join(map(str, those))})" for value, those in ranks.items()
    )
