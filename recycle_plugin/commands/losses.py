"""The losses of a job that are worth examining: each kind once, with its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recycle_plugin.commands.config_job import ConfiguredJob, at_risk
from recycle_plugin.core.vocabulary.ids import Seat

NAMED, NAME_WIDTH = 4, 16  # most stages listed in a name, most characters of a host's name


def worker_cases(job: ConfiguredJob) -> Iterator[tuple[str, tuple[Seat, ...]]]:
    """Yield (name, lost seats) for the losses of workers that are survived. Replicas that lost the same stages are
    interchangeable, so each kind comes once. Makes one plan for each stage.
    """
    seen = set()
    for name, lost in _worker_losses(job):
        if (alike := _alike(lost)) not in seen:
            seen.add(alike)
            yield name, lost


def _worker_losses(job: ConfiguredJob) -> Iterator[tuple[str, tuple[Seat, ...]]]:
    periods = [job.planned((Seat(0, stage),))[0] for stage in range(job.stages)]
    ranked = sorted(range(job.stages), key=lambda stage: (-periods[stage], stage))
    worst, best = ranked[0], ranked[-1]
    same = periods[worst] == periods[best]
    yield "one worker of any stage" if same else f"one worker, at worst: stage {worst}", (Seat(0, worst),)
    if not same:
        yield f"one worker, at best: stage {best}", (Seat(0, best),)
    for count in sorted({2, 3, job.replicas - 1} & set(range(2, job.replicas))):
        yield f"{count} workers of stage {worst}", tuple(Seat(replica, worst) for replica in range(count))
        if count <= job.stages:
            spread = sorted(ranked[:count])
            where = stages_text(spread) if count <= NAMED else f"{count} stages"
            yield (
                f"{count} workers, spread: {where}",
                tuple(Seat(replica, stage) for replica, stage in enumerate(spread)),
            )
    yield "any whole replica", tuple(Seat(0, stage) for stage in range(job.stages))
    yield "all replicas but one", tuple(seat for seat in job.shape.seats if seat.replica)


def host_cases(job: ConfiguredJob) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, hosts) for hosts whose loss is survived; hosts with the same stages are one case."""
    risky = at_risk(job.hosts)
    groups: dict[tuple, list[str]] = {}
    for host, seats in list(job.hosts.items())[0 if job.survives_first_host else 1 :]:
        if host not in risky and not job.ends(seats):
            groups.setdefault(_alike(seats), []).append(host)
    for names in groups.values():
        yield f"host {clipped(names[0])}" + f" (+{len(names) - 1} alike)" * (len(names) > 1), names


def _alike(lost: tuple[Seat, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the stages that each replica lost, without the replicas' numbers."""
    by_replica: dict[int, list[int]] = {}
    for replica, stage in sorted(lost):
        by_replica.setdefault(replica, []).append(stage)
    return tuple(sorted(map(tuple, by_replica.values())))


def stages_text(stages: Sequence[int]) -> str:
    """Return ordered stages in words: ``stage 2``, ``stages 0-3, 7``."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return f"stage{'s' * (len(stages) > 1)} " + ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs
    )


def clipped(host: str) -> str:
    """Return a host's name, shortened to 16 characters."""
    return host if len(host) <= NAME_WIDTH else f"{host[: NAME_WIDTH - 3]}..."
