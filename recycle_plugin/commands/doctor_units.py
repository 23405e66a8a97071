"""What each unit of a loss keeps of the throughput, and what a loss stalls: a section of ``recycle doctor``."""

from __future__ import annotations

from typing import Any

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Op

LOSSES = 3  # at most, one after the other
WORST, BEST, WHOLE, SHRUNK = "worker, at worst", "worker, at best", "replica, constant", "replica, shrink"
WAYS = (WORST, BEST, WHOLE, SHRUNK)


def units(job: ConfiguredJob) -> Section:
    """The section: one plan for each unit, batch and number of losses.  Raises PlanError."""
    title = "Worker or replica as unit (recycle.unit, recycle.batch)"
    if not job.survives:
        return Section("units", title, [], ("nothing is survived",))
    rows = [_row(job, losses) for losses in range(1, min(job.replicas - 1, LOSSES) + 1)]
    table = aligned(
        [
            ("losses", *WAYS),
            *((str(row["losses"]), *(_shown(row["ways"][way]) for way in WAYS)) for row in rows),
        ]
    )
    lines = (
        "samples a second, of what the job has without a loss, after losses that each strike another replica; and how "
        "long the last of them stalls everybody, at a random instant of a step. At worst workers are lost of one "
        "stage, at best each of another, with the batch constant",
        f"of a stall {_pause_ms():.0f} ms to notice, meet and plan were measured on 2 cores; the rest is work that "
        "died and is done again. With shrink that is nothing, or, where the loss comes when some stages have their "
        f"sums and others not, up to {_longest_ms(job):.4g} ms",
    )
    return Section("units", title, rows, lines, table=tuple(table))


def _row(job: ConfiguredJob, losses: int) -> dict[str, Any]:
    return {
        "losses": losses,
        "ways": {way: _way(job, way, losses) for way in WAYS},
    }


def _way(job: ConfiguredJob, way: str, losses: int) -> dict[str, float]:
    """The ``throughput``, of what it is without a loss, and what the last of so many losses ``stalls_ms``."""
    shrinks = way == SHRUNK
    free, _ = job.planned_without((), shrinks=False)
    cases = [_lost(job, way, stage) for stage in (range(job.stages) if way == WORST else (0,))]
    periods = [job.planned_without(_of_first(each, losses), shrinks=shrinks)[0] for each in cases]
    period, lost = max(zip(periods, cases))
    gone = job.shape.full().without(*_of_first(lost, losses - 1)).lost_share(lost[losses - 1])
    again = 0.0 if shrinks else gone / 2 * period / 1000
    share = (job.replicas - losses) / job.replicas if shrinks else 1.0
    return {"throughput": round(share * free / period, 4), "stalls_ms": round(_pause_ms() + again, 1)}


def _lost(job: ConfiguredJob, way: str, stage: int) -> list[tuple[Seat, ...]]:
    """The seats that each replica loses, if it does: at worst those of one ``stage`` for all."""
    whole = [tuple(seat for seat in job.shape.seats if seat.replica == replica) for replica in range(job.replicas)]
    if way in (WHOLE, SHRUNK):
        return whole
    return [(seats[stage if way == WORST else seats[0].replica % job.stages],) for seats in whole]


def _of_first(lost: list[tuple[Seat, ...]], losses: int) -> tuple[Seat, ...]:
    return tuple(seat for seats in lost[:losses] for seat in seats)


def _pause_ms() -> float:
    from recycle_plugin.core.vocabulary.machine_constants import LOCAL

    return (LOCAL.detection_us + LOCAL.pause_us) / 1000


def _longest_ms(job: ConfiguredJob) -> float:
    """What a stage's worker computes of a step: so much may be done again where a step is void."""
    ops = (Op.F, Op.I, Op.W) if job.policy.split_backward else (Op.F, Op.B)
    each = max(sum(job.costs.of(op, stage) for op in ops) for stage in range(job.stages))
    return job.shape.micro_batches * each / 1000


def _shown(way: dict[str, float]) -> str:
    return f"{way['throughput']:.0%}, {way['stalls_ms']:.4g} ms"
