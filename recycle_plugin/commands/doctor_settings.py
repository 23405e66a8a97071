"""What of a config is refused, what NCCL carries, and which releases are here: sections of ``recycle doctor``."""

from __future__ import annotations

import os

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned
from recycle_plugin.runtime.collectives.nccl_door import objections, sets
from recycle_plugin.versions import releases


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
