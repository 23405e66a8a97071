"""What a worker holds in memory, for each parameter and on each stage: a section of ``recycle doctor``."""

from __future__ import annotations

from collections.abc import Iterator

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned, gib, times
from recycle_plugin.commands.losses import stages_text
from recycle_plugin.core.vocabulary.worker_bytes import GRADIENT, WorkerBytes
from recycle_plugin.settings.wording import SECTION, shown

PARTS = {
    "state": "state",
    "undo": "undo",
    "sums": "sum",
    "contributions": "contributions",
    "kept": "kept",
    "activations": "activations",
    "working": "running",
    "between": "between",
    "peak": "peak",
    "host": "host",
}
OF_A_PARAMETER = ("weights", "masters", "optimizer", "undo", "sum", "contributions", "new", "second", "scaled", "work")
NO_PROFILE = (
    "of each stage: not known without a profile: recycle profile --out FILE measures one, --profile FILE takes it"
)


def memory(job: ConfiguredJob) -> Section:
    """The section on the memory of a worker: how many micro-batches make a loss cheap, bytes of a parameter, and of
    each stage, which only a profile knows.  Raises PlanError.
    """
    each = of_a_parameter(job)
    data: dict = {"bytes_a_parameter": each}
    lines: tuple[str, ...] = (
        "bytes a parameter, with Adam, once a step is committed, before, and in the next; the last sum is there until "
        "that is known",
    )
    if job.survives:
        data["activation_cap"], said = _enough(job)
        lines = (said, *lines)
    table, wrong = list(_moments(each)), tuple[str, ...]()
    if job.profile is None:
        return Section("memory", "Memory of a worker", data, (NO_PROFILE, *lines), (), tuple(table))
    rows, device = held_bytes(job), job.profile.device_bytes
    has = "the profile does not say how much the device has" if device is None else f"the device has {gib(device)}"
    lines = (
        f"{has}; kept: boundary tensors of two steps, after one loss; activations: at the cap; "
        "running: what an instruction needs, an estimate",
        "between: steps; peak: within one; host: beside these, where the device is not the host",
        *lines,
    )
    wrong = _too_much(rows, device) if device is not None else ()
    stages = [
        ("stage", *PARTS.values()),
        *((str(stage), *(f"{row[part] / (1 << 30):.2f}" for part in PARTS)) for stage, row in enumerate(rows)),
    ]
    table += ["", "GiB", *aligned(stages, tuple(range(1, len(stages[0]))))]
    return Section(
        "memory", "Memory of a worker", data | {"device": device, "stages": rows}, lines, wrong, tuple(table)
    )


def _enough(job: ConfiguredJob) -> tuple[dict, str]:
    """The least memory at which one loss, whichever, costs as little as it can, as data and in words.  Raises
    PlanError.
    """
    free, now, most = job.planned()[0], job.one_lost(), job.busiest

    def period(held: int) -> int:
        return job.one_lost(activation_cap=held, memory_bytes=None)

    goal = max(free, period(most))
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if period(middle) <= goal else (middle + 1, high)
    least = period(high)
    cost = "nothing" if least <= free else times(least / free)
    size = f" ({gib(max(row['each'] for row in held_bytes(job)) * high)})" if job.profile else ""
    data = {"least": high, "period_one_lost_us": now, "period_one_lost_us_changed": least}
    held = f"{SECTION}.activation_cap {shown(job.settings.activation_cap)}"
    if now <= goal:
        return data, f"{held} is enough: from {high} micro-batches{size} on one loss costs {cost}"
    return data, f"{held}: one loss costs {times(now / free)}; {high} micro-batches{size}: {cost}"


def of_a_parameter(job: ConfiguredJob) -> dict[str, dict[str, int]]:
    """Bytes of one parameter between steps and at each moment of a step, by part; without what does not grow with the
    model.
    """
    one = WorkerBytes(1, _dtype(job), job.settings.undo, _blocks(job), _scales(job), GRADIENT, apart=True)
    moments = {
        "committed": one.settled,
        "between steps": one.between,
        "computing": one.computing(),
        "summing": one.summing(),
        "stepping": one.stepping,
    }
    found = {moment: {part: of.get(part, 0) for part in OF_A_PARAMETER} for moment, of in moments.items()}
    return {moment: of | {"all": sum(of.values())} for moment, of in found.items()}


def _moments(each: dict[str, dict[str, int]]) -> Iterator[str]:
    parts = [part for part in (*OF_A_PARAMETER, "all") if any(of[part] for of in each.values())]
    rows = [("", *each), *((part, *(str(of[part]) for of in each.values())) for part in parts)]
    yield from aligned(rows, tuple(range(1, len(each) + 1)))


def _dtype(job: ConfiguredJob) -> str:
    from recycle_plugin.adapters.deepspeed.refusals import FP16, half

    asked = half(job.config)
    if job.profile is not None or asked is None:
        return job.profile.dtype if job.profile is not None else "fp32"
    return "fp16" if asked == FP16 else "bf16"


def _blocks(job: ConfiguredJob) -> int | None:
    return job.busiest_blocks if job.settings.exact else None


def _scales(job: ConfiguredJob) -> bool:
    return job.clipping > 0 or job.settings.loss_scaling


def _too_much(rows: list[dict], device: int) -> tuple[str, ...]:
    """One line for all stages that don't fit, with the cap that would do, where one does."""
    over = [stage for stage, row in enumerate(rows) if row["peak"] > device]
    if not over:
        return ()
    held = min(_cap(rows[stage], device) for stage in over)
    smaller = f", or set {SECTION}.activation_cap to {held}" if held >= 1 else ""
    return (f"{stages_text(over)}: {gib(max(row['peak'] for row in rows))} of {gib(device)}; use more stages{smaller}",)


def _cap(row: dict, device: int) -> int:
    """The micro-batches for which there is room; 0 where the device is too small without any."""
    if max(row["summing"], row["stepping"]) > device:
        return 0
    return max(0, (device - row["computing"] + row["activations"]) // max(1, row["each"]))


def held_bytes(job: ConfiguredJob) -> list[dict]:
    """Bytes that a worker of each stage holds, by what for; ``each``: of one micro-batch, ``peak``: of all at most.

    ``kept``: boundary tensors stay until their step is committed, and two steps may be under way.
    """
    profile, stages, policy = job.profile, job.stages, job.policy
    assert profile is not None, "only a profile knows bytes"
    working, workers = (
        profile.working_bytes(stages),
        profile.worker_bytes(stages, job.settings.undo, _blocks(job), _scales(job)),
    )
    rows = []
    for stage, worker in enumerate(workers):
        each = max(job.costs.activation_bytes[stage], job.costs.pending_bytes[stage] * policy.split_backward)
        room = policy.memory_bytes[stage] if isinstance(policy.memory_bytes, tuple) else policy.memory_bytes
        most = each * (job.busiest if room is not None else min(job.busiest, policy.cap(stage, stages)))
        made = (stage > 0) + (stage < stages - 1)
        kept = 2 * made * job.busiest * profile.boundary_bytes
        activations = most if room is None else min(most, room)
        peaks = worker.peaks(kept + activations + working[stage])
        rows.append(
            {
                "each": each,
                "state": sum(worker.state.values()),
                "undo": worker.settled["undo"],
                "sums": worker.gradient,
                "contributions": worker.contributions,
                "kept": kept,
                "activations": activations,
                "working": working[stage],
                "between": sum(worker.between.values()),
                **peaks,
                "peak": max(peaks.values()),
                "host": worker.on_host + kept,
            }
        )
    return rows
