"""The costs of exact mode (core/vocabulary/blocks.py): freedom to reroute, gradient buffers, and what the sums move."""

from __future__ import annotations

from collections.abc import Iterator

from recycle_plugin.commands.config_job import ConfiguredJob

NEARLY = 1.02  # as fast as without blocks, for all that matters


def figures(job: ConfiguredJob, block: int | None) -> dict:
    """What exact mode costs with blocks of so many micro-batches.

    ``blocks``: how many the busiest worker has, without a loss and after one; each but the first takes a buffer.
    ``moved``: what a worker sends in a sum, in units of an all-reduce's bytes: its blocks once, and its part of the
    result.
    """
    free, lost = job.planned(block=block)[0], job.one_lost(block=block)
    blocks = len(job.blocks(block).members()) // job.replicas, job.busiest_blocks(block)
    return {
        "block": job.blocks(block).size,
        "period_us": free,
        "period_one_lost_us": lost,
        "blocks": blocks,
        "moved": [(count + 1) / 2 for count in blocks],
    }


def smaller(job: ConfiguredJob, found: dict, least_us: int) -> Iterator[dict]:
    """The costs with half the blocks, a quarter and so on, down to the first with which a loss costs no more than it
    has to.
    """
    while found["period_one_lost_us"] > NEARLY * least_us and found["block"] > 1:
        found = figures(job, found["block"] // 2)
        yield found


def cost(job: ConfiguredJob) -> dict:
    """What exact mode costs the job, or would cost it.

    ``now``: with the blocks of the settings, or, where the mode is off, with those that it would have; ``without``:
    without the mode; ``smaller``: with blocks to change to.
    """
    without, now = figures(job, 1), figures(job, job.settings.exact_block)
    return {
        "on": bool(job.settings.exact),
        "now": now,
        "without": without,
        "smaller": list(smaller(job, now, without["period_one_lost_us"])),
    }


def buffer_bytes(job: ConfiguredJob) -> int | None:
    """Bytes of a buffer for the largest stage's gradients in fp32; None without a profile."""
    return (
        None
        if job.profile is None
        else max(4 * sum(part.parameters for part in row) for row in job.profile.parts(job.stages))
    )
