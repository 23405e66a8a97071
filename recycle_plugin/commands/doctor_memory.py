"""What a worker of each stage holds in memory: a section of ``recycle doctor``."""

from __future__ import annotations

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned, gib
from recycle_plugin.commands.losses import stages_text
from recycle_plugin.settings.wording import SECTION

PARTS = {
    "state": "state",
    "undo": "undo",
    "blocks": "blocks",
    "kept": "kept",
    "activations": "activations",
    "working": "running",
    "sum": "sum",
}


def memory(job: ConfiguredJob) -> Section:
    """The section on the memory of a worker of each stage, which only a profile knows."""
    title = "Memory of a worker"
    if job.profile is None:
        return Section(
            "memory",
            title,
            None,
            ("not known without a profile: recycle profile --out FILE measures one, --profile FILE takes it",),
        )
    rows, device = held_bytes(job), job.profile.device_bytes
    parts = [part for part in PARTS if part != "blocks" or job.settings.exact]
    table = [
        ("stage", *map(PARTS.get, parts)),
        *((str(stage), *(gib(row[part]) for part in parts)) for stage, row in enumerate(rows)),
    ]
    has = "the profile does not say how much the device has" if device is None else f"the device has {gib(device)}"
    lines = (
        f"{has}; kept: boundary tensors of two steps, after one loss"
        + "; blocks: exact mode's sums" * job.settings.exact,
        "activations: at the cap; running: what an instruction needs, an estimate",
    )
    wrong = _too_much(rows, device) if device is not None else ()
    return Section(
        "memory",
        title,
        {"device": device, "stages": rows},
        lines,
        wrong,
        tuple(aligned(table, tuple(range(1, len(table[0]))))),
    )


def _too_much(rows: list[dict], device: int) -> tuple[str, ...]:
    """One line for all stages that don't fit, with the cap that would do, where one does."""
    over = [stage for stage, row in enumerate(rows) if row["sum"] > device]
    if not over:
        return ()
    held = min(
        (device - rows[stage]["sum"] + rows[stage]["activations"]) // max(1, rows[stage]["each"]) for stage in over
    )
    smaller = f", or set {SECTION}.activation_cap to {held}" if held >= 1 else ""
    return (f"{stages_text(over)}: {gib(max(row['sum'] for row in rows))} of {gib(device)}; use more stages{smaller}",)


def held_bytes(job: ConfiguredJob) -> list[dict]:
    """Bytes that a worker of each stage holds, by what for; ``each``: of one micro-batch, ``sum``: of all.

    ``kept``: boundary tensors stay until their step is committed, and two steps may be under way.
    """
    profile, stages, policy = job.profile, job.stages, job.policy
    state, working = profile.state_bytes(stages), profile.working_bytes(stages)
    both, parts = profile.state_bytes(stages, job.settings.undo), profile.parts(stages)
    rows = []
    for stage in range(stages):
        each = max(job.costs.activation_bytes[stage], job.costs.pending_bytes[stage] * policy.split_backward)
        room = policy.memory_bytes[stage] if isinstance(policy.memory_bytes, tuple) else policy.memory_bytes
        most = each * (job.busiest if room is not None else min(job.busiest, policy.cap(stage, stages)))
        made = (stage > 0) + (stage < stages - 1)
        blocks = (
            4 * sum(part.parameters for part in parts[stage]) * (job.busiest_blocks(policy.block) - 1)
            if job.settings.exact
            else 0
        )
        row = {
            "each": each,
            "state": state[stage],
            "undo": both[stage] - state[stage],
            "blocks": blocks,
            "kept": 2 * made * job.busiest * profile.boundary_bytes,
            "activations": most if room is None else min(most, room),
            "working": working[stage],
        }
        rows.append(row | {"sum": sum(row[part] for part in PARTS if part != "sum")})
    return rows
