"""Section of ``recycle doctor`` on recovery in a job that logs: which boundaries it logs, their bytes, and helpers.

Times of a recovery are those of planner/log_selection.py, which include reading the logs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section
from recycle_plugin.core.vocabulary.log_boundaries import AUTO, at_start, in_words
from recycle_plugin.planner.log_line import STORAGE_BYTES_PER_S, crossing_bytes, expected
from recycle_plugin.planner.log_selection import Line, Selection, choose
from recycle_plugin.settings.sections import LogSettings
from recycle_plugin.settings.wording import SECTION

EVERY = (10, 100)  # steps between checkpoints: where the interval begins, and the longest that a second one may have
NO_BYTES = "bytes over the boundaries, and the time of a recovery: not known without a run (--run RUN_DIR)"
GUESSES = f"assumed: checkpoints and logs are read at {STORAGE_BYTES_PER_S / 1e9:g} GB/s"
INTERVAL = (
    f"how often a checkpoint is made follows from what the last ones have cost ({SECTION}.checkpoint.overhead), so it "
    f"is not known here: {EVERY[0]} and {EVERY[1]} steps stand for it"
)


def recovery(job: ConfiguredJob) -> Section:
    found = Choices.of(job)
    helped, help_text = _help(job, any(len(each) < job.stages - 1 for each in found.logged))
    lines = [INTERVAL, help_text]
    data: dict = {"every": list(EVERY), "help": helped, "boundaries": found.setting, "budget": found.budget}
    if not job.measured:
        also = f"; {SECTION}.log.boundaries chooses once steps were measured" * (found.setting == AUTO)
        lines += [f"{in_words(found.logged[0], job.stages)}{also}", NO_BYTES]
    else:
        crossing = crossing_bytes(job.measured, len(job.shape.batch))
        data |= {
            "boundary_bytes": list(crossing),
            "disk_bytes": found.free,
            "chosen": list(map(_as_data, found.chosen)),
        }
        lines += [
            f"logged in a step: up to {max(crossing) / 1e6:.4g} MB over a boundary, both ways, "
            f"{sum(crossing) / 1e6:.4g} MB in all, by its senders; {found.disk}",
            *map(str, found.chosen),
            GUESSES,
            "times are without the start of the next process",
        ]
    return Section("recovery", "Recovery", data, tuple(lines), tuple(found.wrong()))


@dataclass(frozen=True)
class Choices:
    """The boundaries that a job logs under ``setting`` at each interval in ``EVERY``.

    ``chosen`` is empty if bytes are not known; ``logged`` is then what the job logs at first. ``budget``: the bytes
    that logs may take, None for no limit. ``free``: bytes free on their disk, None if not known; ``disk``: the same in
    words.
    """

    setting: str | tuple[int, ...]
    budget: int | None
    free: int | None
    disk: str
    logged: tuple[tuple[int, ...], ...]
    chosen: tuple[Selection, ...]

    @classmethod
    def of(cls, job: ConfiguredJob) -> Choices:
        """Return the choices for ``job``. Raises ValueError for a boundary that the job does not have."""
        log = job.settings.log or LogSettings()
        setting, (free, disk) = log.of_stages(job.stages), _disk(log)
        room = min((each for each in (log.budget_bytes, free) if each is not None), default=None)
        lines = [_line(job, every) for every in EVERY] if job.measured else []
        chosen = tuple(choose(line, setting, room) for line in lines)
        logged = tuple(each.logged for each in chosen) or (at_start(setting, _hosts(job)),) * len(EVERY)
        return cls(setting, log.budget_bytes, free, disk, logged, chosen)

    def wrong(self) -> list[str]:
        """Return a line if there is no room for the log."""
        full = next((each for each in self.chosen if not each.fits), None)
        if full is None:
            return []
        needs = f"the log takes {full.log_bytes / 1e9:.4g} GB with a checkpoint every {full.every} steps, and"
        fewer = f'set {SECTION}.log.boundaries to "{AUTO}", or raise {SECTION}.checkpoint.overhead'
        if self.free is not None and full.budget == self.free:
            return [f"{needs} {self.free / 1e9:.4g} GB are free: set {SECTION}.log.folder to a larger disk, {fewer}"]
        assert full.budget is not None, "what does not fit has a budget"
        return [f"{needs} {SECTION}.log.budget is {full.budget / 1e9:.4g} GB: raise it, {fewer}"]


def _help(job: ConfiguredJob, together: bool) -> tuple[dict, str]:
    """Return a step's blocks and a replay's helpers, as data and words; ``together``: stages may replay together."""
    blocks = job.settings.policy(False, job.stages).blocks(job.shape)
    sizes = [len(each) for each in blocks.members().values()]
    live = (job.stages - 1) * job.shape.replicas
    helpers, busiest = blocks.shared(live, None if job.settings.log is None else job.settings.log.most_helpers)
    found = {"blocks": len(sizes), "helpers": helpers}
    if len(sizes) == 1:
        batch = f"all {len(job.shape.batch)} micro-batches of a step"
        return found, (
            f"no worker can help with a replay: {SECTION}.exact adds {batch} as one block, which can't be shared; "
            "a number in its place splits it"
        )
    if not helpers:
        return found, f"no worker helps with a replay: {SECTION}.log.helpers is 0"
    which = ["share weights"] * bool(job.shape.ties) + ["replay together"] * together
    alone = f"; stages that {' or '.join(which)} are replayed without it" * bool(which)
    return found, (
        f"help with a replay: if {helpers} of the {live} live ones help, and share {len(sizes)} blocks of up to "
        f"{max(sizes)} micro-batches a step, it computes {busiest / sum(sizes):.0%} itself{alone}"
    )


def _line(job: ConfiguredJob, every: int) -> Line:
    batch, split = len(job.shape.batch), job.settings.split_backward
    return expected(job.costs, job.measured, split, batch, _hosts(job), every)


def _hosts(job: ConfiguredJob) -> tuple[str, ...]:
    """Return the hosts of each stage, as core.vocabulary.log_boundaries.stage_hosts does."""
    hosts = {seat: host for host, seats in job.hosts.items() for seat in seats}
    return tuple(
        ", ".join(host for seat, host in sorted(hosts.items()) if seat.stage == stage) for stage in range(job.stages)
    )


def _disk(log: LogSettings) -> tuple[int | None, str]:
    """Return the bytes free where the log goes, None if not visible from here, and a text on them."""
    folder = log.folder
    if folder is None:
        return None, f"its disk is not known: {SECTION}.log.folder names none"
    place = next((each for each in (Path(folder), *Path(folder).parents) if each.exists()), None)
    if place is None or place == Path(place.anchor):
        return None, f"its disk is not known: {folder} is not there on this host"
    free = shutil.disk_usage(place).free
    return free, f"free on the disk of {folder}: {free / 1e9:.4g} GB"


def _as_data(found: Selection) -> dict:
    return {
        "logged": list(found.logged),
        "log_bytes": found.log_bytes,
        "expected_s": round(found.expected_s, 3),
        "worst_s": round(found.worst_s, 3),
        "fits": found.fits,
    }
