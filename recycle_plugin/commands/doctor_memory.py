"""Section of ``recycle doctor`` on a worker's memory: bytes of a parameter, and of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned, gib, times, unit
from recycle_plugin.commands.losses import clipped, stages_text
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
    "today": "today",
    "peak": "peak",
    "host": "host",
}
OF_A_PARAMETER = ("weights", "masters", "optimizer", "undo", "sum", "contributions", "new", "second", "scaled", "work")
NO_RUN = "bytes of each stage: not known without a run of your model with recycle.trace (--run RUN_DIR)"


def memory(job: ConfiguredJob) -> Section:
    """Return the section on the memory of a worker: how much makes a loss cheap, bytes of a parameter and of each
    stage. The bytes of a stage are known only from a run of the model. Raises PlanError.
    """
    each = of_a_parameter(job)
    data: dict = {"bytes_a_parameter": each}
    lines: tuple[str, ...] = (
        "bytes a parameter, with Adam, at each moment of a step; a worker keeps the last step's sum until it knows of "
        "its commit",
    )
    if job.survives:
        data["activation_cap"], said = _enough(job)
        lines = (said, *lines)
    table = list(_moments(each))
    if not job.measured:
        return Section("memory", "Memory of a worker", data, (NO_RUN, *lines), (), tuple(table))
    rows, room = held_bytes(job), _room(job)
    lines = (
        *_origin(job, room),
        "kept: boundary tensors of two steps, after one loss; activations: at the cap; "
        "running: an estimate of an instruction's workspace",
        "between: between two steps; today: the most within a step, with all workers; peak: the same after one loss; "
        "host: in host memory, if the device has its own",
        *lines,
    )
    wrong = (*(_too_much(rows, room.device) if room.device is not None else ()), *_too_full(job, rows, room))
    size, name = unit(max(row["peak"] for row in rows))
    stages = [
        ("stage", *PARTS.values()),
        *((str(stage), *(f"{row[part] / size:.2f}" for part in PARTS)) for stage, row in enumerate(rows)),
    ]
    table += ["", name, *aligned(stages, tuple(range(1, len(stages[0]))))]
    data |= {"measured": True, "device": room.device, "host": room.host, "stages": rows}
    return Section("memory", "Memory of a worker", data, lines, wrong, tuple(table))


class Room(NamedTuple):
    """Bytes of a worker's device, None if that is the host, and of a host for all its workers."""

    device: int | None
    host: int


def _room(job: ConfiguredJob) -> Room:
    devices, hosts = ([getattr(each, name) for each in job.measured] for name in ("device_bytes", "host_bytes"))
    return Room(min(devices) if job.measured[0].apart else None, min(hosts))


def _origin(job: ConfiguredJob, room: Room) -> Iterator[str]:
    """Yield lines on the source of these bytes, and on the memory that they have to fit into."""
    first = job.measured[0]
    yield (
        f"measured on {first.device} by the run of the costs: state, gradients, the bytes of a micro-batch, boundary "
        "tensors; the rest follows from these and from the settings here"
    )
    host = f"{_has('host', room.host)} for all its workers, beside what their processes take"
    yield host if room.device is None else f"{_has('device', room.device)}; {host}"
    if first.samples != job.samples:
        yield f"measured with micro-batches of {first.samples}, and the job's have {job.samples}: run it with these"
    if (first.masters > 0) != (_dtype(job) != "fp32"):
        yield f"measured {'with' if first.masters else 'without'} fp32 masters, and the job is in {_dtype(job)}"


def _has(what: str, size: int) -> str:
    return f"the {what} has {gib(size)}"


def _enough(job: ConfiguredJob) -> tuple[dict, str]:
    """Return the fewest micro-batches at which any one loss costs the least, as data and words. Raises PlanError."""
    free, now, most = job.planned()[0], job.one_lost(), job.busiest

    def period(held: int) -> int:
        return job.one_lost(activation_cap=held)

    goal = max(free, period(most))
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if period(middle) <= goal else (middle + 1, high)
    least = period(high)
    cost = "nothing" if least <= free else times(least / free)
    size = f" ({gib(max(row['each'] for row in held_bytes(job)) * high)})" if job.measured else ""
    data = {"least": high, "period_one_lost_us": now, "period_one_lost_us_changed": least}
    held = f"{SECTION}.activation_cap {shown(job.settings.activation_cap)}"
    if now <= goal:
        return data, f"{held} is enough: from {high} micro-batches{size} on one loss costs {cost}"
    return data, f"{held}: one loss costs {times(now / free)}; with {high} micro-batches{size} {cost}"


def of_a_parameter(job: ConfiguredJob) -> dict[str, dict[str, int]]:
    """Return {moment of a step: {part: bytes}} of one parameter, without parts that do not grow with the model."""
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
    return "fp32" if asked is None else "fp16" if asked == FP16 else "bf16"


def _blocks(job: ConfiguredJob) -> int | None:
    return job.busiest_blocks if job.settings.exact else None


def _scales(job: ConfiguredJob) -> bool:
    return job.clipping > 0 or job.settings.loss_scaling


def _too_much(rows: list[dict], device: int) -> tuple[str, ...]:
    """Return one line on all stages that do not fit, with a cap at which they would if there is one."""
    over = [stage for stage, row in enumerate(rows) if row["peak"] > device]
    if not over:
        return ()
    held = min(_cap(rows[stage], device) for stage in over)
    smaller = f", or set {SECTION}.activation_cap to {held}" if held >= 1 else ""
    return (f"{stages_text(over)}: {gib(max(row['peak'] for row in rows))} of {gib(device)}; use more stages{smaller}",)


def _too_full(job: ConfiguredJob, rows: list[dict], room: Room) -> Iterator[str]:
    """Yield a line for each host with less memory than its workers need together."""
    for host, seats in job.hosts.items():
        need = sum(rows[seat.stage]["peak" if room.device is None else "host"] for seat in seats)
        if need > room.host:
            yield (
                f"{clipped(host)}: its workers take {gib(need)} together, of {gib(room.host)}; put fewer on it, or set "
                f"{SECTION}.keep_bytes or {SECTION}.activation_cap"
            )


def _cap(row: dict, device: int) -> int:
    """Return the number of micro-batches that fit; 0 if the device is too small without any."""
    if max(row["summing"], row["stepping"]) > device:
        return 0
    return max(0, (device - row["computing"] + row["activations"]) // max(1, row["each"]))


class _Stage(NamedTuple):
    """Bytes of a stage: of its parameters, of a running instruction, and of the boundary tensor that it sends."""

    worker: WorkerBytes
    working: int
    boundary: int


def _stages(job: ConfiguredJob) -> Iterator[_Stage]:
    settings = job.settings.undo, _blocks(job), _scales(job)
    for stage, each in enumerate(job.measured):
        # While an I runs, its input and its output both exist. Each weight gets a new gradient.
        both = min(job.costs.activation_bytes[stage], job.costs.pending_bytes[stage])
        yield _Stage(WorkerBytes.of_run(each, *settings), both + each.largest + 2 * each.boundary, each.boundary)


def held_bytes(job: ConfiguredJob) -> list[dict]:
    """Return for each stage the bytes that a worker holds, by purpose.

    ``each``: of one micro-batch. ``today``: the most with all workers; ``peak``: the most after one loss. ``kept``:
    boundary tensors stay until their step is committed, and two steps may be in progress.
    """
    stages, before = list(_stages(job)), 0
    rows = []
    for number, (worker, working, boundary) in enumerate(stages):
        each = max(job.costs.activation_bytes[number], job.costs.pending_bytes[number] * job.policy.split_backward)
        made, before = boundary + before, boundary
        (kept, activations), now = (_of_batches(job, number, each, made, most) for most in (job.busiest, job.ordinary))
        peaks = worker.peaks(kept + activations + working)
        rows.append(
            {
                "each": each,
                "state": sum(worker.state.values()),
                "undo": worker.settled["undo"],
                "sums": worker.gradient,
                "contributions": worker.contributions,
                "kept": kept,
                "activations": activations,
                "working": working,
                "between": sum(worker.between.values()),
                **peaks,
                "today": max(worker.peaks(sum(now) + working).values()),
                "peak": max(peaks.values()),
                "host": worker.on_host + kept,
            }
        )
    return rows


def _of_batches(job: ConfiguredJob, stage: int, each: int, made: int, most: int) -> tuple[int, int]:
    """Return bytes that a worker of ``stage`` keeps for others, and holds for its own backwards. ``made``: bytes of
    boundary tensors of a micro-batch; ``each``: of activations; ``most``: micro-batches at most.
    """
    return 2 * made * most, each * min(most, job.policy.cap(stage, job.stages))
