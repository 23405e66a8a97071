"""What a job's settings cost, what of them is refused, and which releases are here: sections of ``recycle doctor``."""

from __future__ import annotations

import os
from typing import Any

from recycle_plugin.commands.config_job import CLIPPING, ConfiguredJob
from recycle_plugin.commands.doctor_memory import held_bytes
from recycle_plugin.commands.doctor_section import Section, aligned, gib, ms, times
from recycle_plugin.core.vocabulary.worker_bytes import ADAM, STATE_BYTES, UNDO_BYTES, UNDO_HOST_BYTES, WEIGHTS
from recycle_plugin.runtime.collectives.nccl_door import objections, sets
from recycle_plugin.settings.wording import SECTION, shown
from recycle_plugin.versions import releases


def costly(job: ConfiguredJob) -> Section:
    """The section on what the job's settings cost, and what would change that.  Raises PlanError."""
    from recycle_plugin.adapters.deepspeed.refusals import FP16, half

    settings, rows = job.settings, list[dict[str, Any]]()
    if job.clipping > 0:
        said = "" if CLIPPING in job.config else " (DeepSpeed's default)"
        waits = f"{job.clipping:g}{said}: steps wait for the norm over all stages"
        redone = f"{job.clipping:g}{said}: no step waits for the norm; one that is over it is taken back and clipped"
        rows.append(
            _switch(job, CLIPPING, waits, f'0, or {SECTION}.clip "validate"', validate=False)
            if settings.waits_for_norm(job.clipping)
            else {"setting": CLIPPING, "text": redone}
        )
    for name, why in (
        ("split_backward", "weight gradients fill no bubbles"),
        ("stagger_optimizer", "all stages step together"),
    ):
        if not getattr(settings, name):
            rows.append(_switch(job, f"{SECTION}.{name}", f"false: {why}", "true", **{name: True}))
    if job.survives:
        rows.append(_cap(job))
    rows.append(_exact(job))
    precision = half(job.config)
    if precision is not None:
        whole = _whole("fp16" if precision == FP16 else "bf16", job.replicas)
        rows.append(
            {
                "setting": f"{precision}.enabled",
                "text": f"true: {whole}; gradients are summed in fp32, over micro-batches and over workers",
            }
        )
    elif settings.zero is not None:
        rows.append({"setting": f"{SECTION}.zero", "text": f'"{settings.zero}": {_whole("fp32", job.replicas)}'})
    rows.append(
        {
            "setting": f"{SECTION}.undo",
            "bytes_a_parameter": UNDO_BYTES[settings.undo],
            "host_bytes_a_parameter": UNDO_HOST_BYTES[settings.undo],
            "text": _undo(settings.undo),
        }
    )
    lines = tuple(f"{row['setting']} {row.pop('text')}" for row in rows)
    return Section("settings", "What settings cost", rows, lines)


def _exact(job: ConfiguredJob) -> dict:
    """Exact mode, or what it would cost, side by side with the same job without it.

    ``blocks``: how many the busiest worker has, without a loss and after one; each but the first takes a buffer.
    """
    on, block = bool(job.settings.exact), job.settings.exact_block
    count = len(job.blocks(block).members()) // job.replicas, job.busiest_blocks(block)
    now, without = (_periods(job, each) for each in (block, 1))
    each = f"blocks of {job.blocks(block).size} micro-batches"
    said = f"true, {each}: " if on else f"false: the same bits after any failure ({each}) would cost "
    said += f"the step {ms(now['period_us'])} (without: {ms(without['period_us'])})"
    if job.survives:
        said += f", after one loss {ms(now['period_one_lost_us'])} (without: {ms(without['period_one_lost_us'])})"
    said += f"; {' and '.join(str(each - 1) for each in count[: 1 + job.survives])} gradient buffers more"
    if job.profile is not None:
        said += f" of {gib(max(4 * sum(part.parameters for part in row) for row in job.profile.parts(job.stages)))}"
    found = {"setting": f"{SECTION}.exact", "on": on, "block": job.blocks(block).size, "blocks": list(count)}
    return found | {"now": now, "without": without, "text": said}


def _periods(job: ConfiguredJob, block: int | None) -> dict[str, int]:
    return {"period_us": job.planned(block=block)[0], "period_one_lost_us": job.one_lost(block=block)}


def _whole(dtype: str, replicas: int) -> str:
    whole, shared = STATE_BYTES[dtype], ADAM + WEIGHTS["fp32"]
    return (
        f"every worker has the optimizer's state whole, with one gradient {whole} bytes a parameter (Adam), stock a "
        f"share of it, {whole - shared + shared / replicas:.3g}"
    )


def _undo(way: str) -> str:
    others = "; ".join(f'"{other}": {_undo_bytes(other, "")}' for other in UNDO_BYTES if other != way)
    return f'"{way}": {_undo_bytes(way, " bytes a parameter (Adam)")}; {others}'


def _undo_bytes(way: str, unit: str) -> str:
    if UNDO_HOST_BYTES[way]:
        return f"{UNDO_HOST_BYTES[way]}{unit} in host memory"
    return f"{UNDO_BYTES[way]}{unit}{', not exact' * (way == 'inverse')}"


def _switch(job: ConfiguredJob, setting: str, now: str, instead: str, **changed: Any) -> dict:
    """A row on a setting that takes away one of the planner's techniques."""
    before = {"period_us": job.planned()[0], "period_one_lost_us": job.one_lost()}
    after = {"period_us_changed": job.planned(**changed)[0], "period_one_lost_us_changed": job.one_lost(**changed)}
    gained = [
        f"{what} {ms(old)} -> {ms(new)}"
        for what, old, new in zip(("the step", "after one loss"), before.values(), after.values())
        if new < old
    ]
    if not gained:
        return {"setting": setting, **before, "text": f"{now}, which costs nothing here"}
    return {"setting": setting, **before, **after, "text": f"{now}; {instead}: {', '.join(gained)}"}


def _cap(job: ConfiguredJob) -> dict:
    """The least memory at which one loss, whichever, costs as little as it can."""
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
    row = {
        "setting": f"{SECTION}.activation_cap",
        "least": high,
        "period_one_lost_us": now,
        "period_one_lost_us_changed": least,
    }
    held = shown(job.settings.activation_cap)
    if now <= goal:
        return row | {"text": f"{held} is enough: from {high} micro-batches{size} on one loss costs {cost}"}
    return row | {"text": f"{held}: one loss costs {times(now / free)}; {high} micro-batches{size}: {cost}"}


def refused(job: ConfiguredJob) -> Section:
    """The section on what the plugin refuses of the config."""
    from recycle_plugin.adapters.deepspeed.refusals import FP16, half, refusals

    wrong = [*refusals(job.config), *([job.mismatch] if job.mismatch else [])]
    lines = [] if wrong else ["nothing that the config asks for"]
    half_there = ", whether the device has fp16" if half(job.config) == FP16 else ""
    lines.append(f"seen at the start only: tensor parallelism, running statistics, plain iterators{half_there}")
    return Section("refused", "What is refused", wrong, tuple(lines), tuple(wrong))


def device_link(job: ConfiguredJob) -> Section:
    """The section on what NCCL carries, with what of this environment would hang or end a survivor."""
    wrong = tuple(objections(os.environ))
    staged = "boundary tensors, messages between two, collectives of objects, barriers"
    exact = ", and for their order with recycle.exact all collectives" if job.settings.exact else ""
    lines = (
        "NCCL: sums of gradients and tied weights, and the script's collectives, in groups made anew after each loss",
        f"through the host's memory: {staged}{exact}",
        "unset, and set by the plugin: " + ", ".join(sets(os.environ)),
        "seen at the start only: the release of NCCL that is loaded",
    )
    return Section("device_link", "What carries tensors", {"sums": "nccl", "sets": sets(os.environ)}, lines, wrong)


def versions() -> Section:
    """The section on the releases installed here against those that the plugin is written for."""
    known = releases()
    table = aligned([(one.name, one.installed or "not installed", f"needs {one.needs}") for one in known])
    rows = [{**one._asdict(), "fits": one.fits} for one in known]
    return Section(
        "versions", "Versions here", rows, (), tuple(one.wrong for one in known if not one.fits), tuple(table)
    )
