"""Sections of ``recycle doctor``: refused settings, what NCCL carries, and installed releases."""

from __future__ import annotations

import os

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned
from recycle_plugin.core.vocabulary.roster import Member, Roster
from recycle_plugin.runtime.collectives.nccl_door import at_start, objections, sets
from recycle_plugin.runtime.collectives.neighbours import END_BYTES, MOST_ENDS, ends
from recycle_plugin.versions import releases


def refused(job: ConfiguredJob) -> Section:
    from recycle_plugin.adapters.deepspeed.refusals import FP16, half, refusals

    wrong = [*refusals(job.config), *([job.mismatch] if job.mismatch else [])]
    lines = [] if wrong else ["nothing that the config asks for"]
    half_there = ", whether the device has fp16" if half(job.config) == FP16 else ""
    lines.append(f"not known before the start: tensor parallelism, running statistics, plain iterators{half_there}")
    return Section("refused", "What is refused", wrong, tuple(lines), tuple(wrong))


def device_link(job: ConfiguredJob) -> Section:
    """Return the section on data over NCCL, and on environment variables that would hang or end a survivor."""
    wrong = tuple(objections(os.environ))
    sums = "NCCL: sums of gradients and tied weights, and the script's collectives, in groups made anew after each loss"
    given = sets(os.environ) | at_start(os.environ)
    whole, without = _ends(job)
    by_link = (
        sums,
        f"NCCL: boundary tensors, over at most {whole} links of two at each worker ({_memory(whole)} of its device's "
        f"memory), and {without} while one worker is out ({_memory(without)})",
        f"through the host's memory: boundary tensors before their link is made, after it has failed, and beyond "
        f"{MOST_ENDS} links; messages between two, collectives of objects, barriers",
    )
    staged = ("through the host's memory, for their order with recycle.exact: all collectives and boundary tensors",)
    lines = (
        *(staged if job.settings.exact else by_link),
        "unset, and set by the plugin: " + ", ".join(given),
        "not known before the start: the release of NCCL that is loaded",
    )
    links = {} if job.settings.exact else {"whole": whole, "one_out": without, "most": MOST_ENDS, "bytes": END_BYTES}
    data = {"sums": "host" if job.settings.exact else "nccl", "links": links, "sets": given}
    return Section("device_link", "What carries tensors", data, lines, wrong)


def _ends(job: ConfiguredJob) -> tuple[int, int]:
    """Return the most ends of links at a worker, with all workers and with one worker of any stage lost."""
    everybody = [Member(rank, seat, "", "") for rank, seat in enumerate(job.shape.seats)]
    firsts = [member for member in everybody if member.seat.replica == 0]
    without = (
        [Roster(tuple(each for each in everybody if each != first)) for first in firsts] if job.replicas > 1 else []
    )
    return ends(Roster(tuple(everybody))), max(map(ends, without), default=0)


def _memory(count: int) -> str:
    return f"about {count * END_BYTES >> 20} MiB"


def versions() -> Section:
    """Return the section on the installed releases compared with those that the plugin needs."""
    known = releases()
    table = aligned([(one.name, one.installed or "not installed", f"needs {one.needs}") for one in known])
    rows = [{**one._asdict(), "fits": one.fits} for one in known]
    return Section(
        "versions", "Versions here", rows, (), tuple(one.wrong for one in known if not one.fits), tuple(table)
    )
