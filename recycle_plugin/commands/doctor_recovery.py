"""Section of ``recycle doctor`` on recovery in a job that logs: the way and the predicted time of each kind of loss.

The way is chosen by the rules of core/coordinator/recovery_ways.py. The time of a replayed step is from the model of
planner/log_selection.py, which includes reading the logs. Values not measured for this job are assumed, and marked so.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned
from recycle_plugin.commands.losses import stages_text
from recycle_plugin.core.coordinator.facts.restarts import FIRST_S
from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.log_boundaries import AUTO, at_start, groups, in_words
from recycle_plugin.core.vocabulary.machine_constants import LOCAL, START_UP_S
from recycle_plugin.planner.log_line import STORAGE_BYTES_PER_S, crossing_bytes, expected
from recycle_plugin.planner.log_selection import Line, Selection, choose
from recycle_plugin.settings.sections import LogSettings
from recycle_plugin.settings.wording import SECTION

EVERY = (10, 100)  # steps between checkpoints: where the interval begins, and the longest that a second one may have
BEFORE_S = LOCAL.detection_us / 1e6 + FIRST_S + START_UP_S
NO_BYTES = (
    "bytes over the boundaries, which of them to log, and the time to load a checkpoint: not known without a profile "
    "(--profile FILE), so these times leave them out"
)
GUESSES = (
    f"assumed: {BEFORE_S:.0f} s until the next process has its model, {FIRST_S:.0f} s of them the wait before it is "
    f"started (4 to 8 s with small models on two cores; yours may take minutes to import and build); checkpoints and "
    f"logs are read at {STORAGE_BYTES_PER_S / 1e9:g} GB/s; a loss in the middle between two checkpoints"
)
INTERVAL = (
    f"how often a checkpoint is made follows from what the last ones have cost ({SECTION}.checkpoint.overhead), so it "
    f"is not known here: {EVERY[0]} and {EVERY[1]} steps stand for it"
)


def recovery(job: ConfiguredJob) -> Section:
    """Return the section on recovery; its ``data`` has all predicted seconds."""
    found = Choices.of(job)
    helped, help_text = _help(job, any(len(each) < job.stages - 1 for each in found.logged))
    ways = _ways(job, found)
    lines = [GUESSES, INTERVAL, help_text]
    data: dict = {"ways": ways, "start_up_s": BEFORE_S, "start_up": "assumed", "every": list(EVERY), "help": helped}
    data |= {"boundaries": found.setting, "budget": found.budget}
    if job.profile is None:
        also = f"; {SECTION}.log.boundaries chooses once steps were measured" * (found.setting == AUTO)
        lines += [f"{in_words(found.logged[0], job.stages)}{also}", NO_BYTES]
    else:
        crossing = crossing_bytes(job.profile, len(job.shape.batch))
        data |= {"boundary_bytes": crossing, "disk_bytes": found.free, "chosen": list(map(_as_data, found.chosen))}
        lines += [
            f"logged in a step: {crossing / 1e6:.4g} MB over each boundary, both ways, "
            f"{crossing * (job.stages - 1) / 1e6:.4g} MB in all, by its senders; {found.disk}",
            *map(str, found.chosen),
            "times of these choices are without the start of the next process",
        ]
    return Section("recovery", "Recovery", data, tuple(lines), tuple(found.wrong()), tuple(_table(ways)))


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
        lines = [] if job.profile is None else [_line(job, every) for every in EVERY]
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
    helpers, share = shared(blocks, live, None if job.settings.log is None else job.settings.log.most_helpers)
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
        "help with a replay: the times in the table are those of one worker; "
        f"if {helpers} of the {live} live ones help, and share {len(sizes)} blocks of up to {max(sizes)} "
        f"micro-batches a step, it computes {share:.0%} itself{alone}"
    )


def shared(blocks: Blocks, live: int, limit: int | None) -> tuple[int, float]:
    """Return how many workers help to replay ``blocks``, and the busiest worker's share of the micro-batches. ``live``:
    workers that are left; ``limit``: the most that may help, None for all of them.
    """
    sizes = [len(each) for each in blocks.members().values()]
    helpers = min(live, len(sizes) - 1, live if limit is None else limit)
    return helpers, sum(sizes[:: helpers + 1]) / sum(sizes)


def _row(lost: str, way: str, how: str, seconds: Sequence[float]) -> dict:
    """Return a row on a kind of loss: ``way``, ``how``, and seconds without progress at each interval in ``EVERY``. For
    ``way`` "end" the seconds count until a job that is started again is back where it was.
    """
    return {"lost": lost, "way": way, "how": how, "seconds": [round(each, 3) for each in seconds]}


def _ways(job: ConfiguredJob, found: Choices) -> list[dict]:
    losses, step_s = [], job.planned()[0] / 1e6
    if job.survives:
        pause, throughput = (LOCAL.detection_us + LOCAL.pause_us) / 1e6, job.planned()[0] / job.one_lost()
        slower = 0.0 if job.settings.rejoin == "never" else BEFORE_S * (1 - throughput)
        others = (pause + slower,) * len(EVERY)
        losses.append(_row("a worker whose stage has others", "reroute", "they take its work", others))
    alike: dict[tuple[float, ...], list[int]] = {}
    for stage in range(job.stages):
        alike.setdefault(_replayed_step_s(job, found, stage, stage), []).append(stage)
    for steps, stages in alike.items():
        lost = f"the last worker of {'any stage' if len(stages) == job.stages else stages_text(stages)}"
        losses.append(_row(lost, "replay", "from the log; all others wait", _from_checkpoint(job, steps)))
    if job.stages > 2:
        pairs = [_replayed_step_s(job, found, stage, stage + 1) for stage in range(job.stages - 1)]
        both = _from_checkpoint(job, [max(taken) for taken in zip(*pairs)])
        losses.append(_row("two neighbours, at worst", "replay", "one after the other, at most", both))
    again = _from_checkpoint(job, [step_s] * len(EVERY))
    for lost in ("stages that can't be replayed", *(() if job.survives_first_host else ("the host of rank 0",))):
        losses.append(_row(lost, "end", "from a checkpoint", again))
    return losses


def _from_checkpoint(job: ConfiguredJob, steps_s: Sequence[float]) -> tuple[float, ...]:
    """Return seconds from a loss midway between two checkpoints until its steps are done again, at each of ``EVERY``.
    ``steps_s``: seconds of a repeated step, at each of ``EVERY``.
    """
    loads = [0.0 if job.profile is None else _line(job, every).load_s for every in EVERY]
    return tuple(BEFORE_S + load + every / 2 * step for every, load, step in zip(EVERY, loads, steps_s))


def _replayed_step_s(job: ConfiguredJob, found: Choices, first: int, last: int) -> tuple[float, ...]:
    """Return seconds of a replayed step of two stages (or one) and those that replay along, at each of ``EVERY``."""
    taken = []
    for every, logged in zip(EVERY, found.logged):
        touched = [group for group in groups(logged, job.stages) if group[0] <= last and first < group[1]]
        taken.append(round(_line(job, every).step_s(touched[0][0], touched[-1][1]), 6))
    return tuple(taken)


def _line(job: ConfiguredJob, every: int) -> Line:
    batch, split = len(job.shape.batch), job.settings.split_backward
    return expected(job.costs, job.profile, split, batch, _hosts(job), every)


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


def _table(ways: list[dict]) -> list[str]:
    heads = ("lost", "way", *(f"s, every {every}" for every in EVERY), "how")
    rows = [(row["lost"], row["way"], *(f"{each:.3g}" for each in row["seconds"]), row["how"]) for row in ways]
    return aligned([heads, *rows], tuple(range(2, 2 + len(EVERY))))
