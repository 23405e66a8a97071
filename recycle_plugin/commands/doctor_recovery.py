"""Which way each kind of loss goes where a job logs, and what it is predicted to take: a section of ``recycle doctor``.

The model is planner/log_selection.py's, with what a start takes before it.  What nobody has measured for this job is
assumed, and said so.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned
from recycle_plugin.commands.losses import stages_text
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.planner.log_selection import Line, Selection, choose
from recycle_plugin.settings.wording import SECTION
from recycle_plugin.simulator.machine_constants import LOCAL
from recycle_plugin.simulator.peers import Transitions

EVERY = (10, 100)  # steps between checkpoints: where the interval begins, and the longest that a second one may have
RESTART_S = 1.0  # a lost worker's process waits for so long the first time (core/coordinator/restarts.py)
DISK = Transitions().storage_rate
BEFORE_S = (LOCAL.detection_us + LOCAL.return_us) / 1e6 + RESTART_S
NO_BYTES = (
    "bytes over the boundaries, which of them to log, and the loading of a checkpoint: not known without a profile "
    "(--profile FILE), and in none of these times"
)
ASSUMED = (
    f"assumed: {BEFORE_S:.0f} s until the next process has its model, {RESTART_S:.0f} s of them the wait before it is "
    f"started (4 to 8 s with small models on two cores; yours may take minutes to import and build); checkpoints and "
    f"logs are read at {DISK / 1e9:g} GB/s; a loss in the middle between two checkpoints"
)
INTERVAL = (
    f"how often a checkpoint is made follows from what the last ones have cost ({SECTION}.checkpoint.overhead), so it "
    f"is not known here: {EVERY[0]} and {EVERY[1]} steps stand for it"
)


def recovery(job: ConfiguredJob) -> Section:
    """The section on the ways of recovery; its ``data`` has all predicted seconds."""
    help_ = Help.of(job)
    ways, lines = _ways(job), [ASSUMED, INTERVAL, help_.text]
    data: dict = {"ways": ways, "start_up_s": BEFORE_S, "start_up": "assumed", "every": list(EVERY)}
    data["help"] = {"blocks": help_.blocks, "helpers": help_.helpers, "seconds": list(help_.seconds)}
    if job.profile is None:
        lines.append(NO_BYTES)
    else:
        crossing = _boundary_bytes(job)
        budget, disk = _disk(job)
        choices = {way: [choose(_line(job, every), way, budget) for every in EVERY] for way in ("all", "auto")}
        data |= {
            "boundary_bytes": crossing,
            "disk_bytes": budget,
            **{way: [_as_data(each) for each in chosen] for way, chosen in choices.items()},
        }
        lines += [
            f"logged in a step: {crossing / 1e6:.4g} MB over each boundary, both ways, "
            f"{crossing * (job.stages - 1) / 1e6:.4g} MB in all, by its senders; {disk}",
            *(_chosen(every, choices["all"][at], choices["auto"][at]) for at, every in enumerate(EVERY)),
            "times of these choices are without the start of the next process; every boundary is logged, whatever the "
            "best choice would be: choosing is not done yet",
        ]
    wrong = tuple(_wrong(job, data))
    return Section("recovery", "Recovery", data, tuple(lines), wrong, tuple(_table(ways)))


@dataclass(frozen=True)
class Help:
    """The help that a stage's replay gets: so many ``blocks`` in a step, that can be shared, for so many ``helpers``;
    the ``seconds`` of the slowest stage's recovery with them, at each of ``EVERY``; and that in words.
    """

    blocks: int
    helpers: int
    seconds: tuple[float, ...]
    text: str

    @classmethod
    def of(cls, job: ConfiguredJob) -> Help:
        """That of ``job``."""
        sizes = [len(each) for each in job.settings.policy(False, job.stages).blocks(job.shape).members().values()]
        limit = job.settings.log.helpers if job.settings.log is not None else 0
        live = (job.stages - 1) * job.shape.replicas
        helpers = min(live, len(sizes) - 1, live if limit == "auto" else limit)
        shared = [_line(job, every, sum(sizes[:: helpers + 1])) for every in EVERY]
        seconds = tuple(
            round(BEFORE_S + max(line.recovery_s(stage, stage + 1) for stage in range(job.stages)), 3)
            for line in shared
        )
        batch, alone = len(job.shape.batch), " stages that share weights are replayed without it" * bool(job.shape.ties)
        if len(sizes) == 1:
            text = (
                f"nobody can help with a replay: {SECTION}.exact adds all {batch} micro-batches of a step as one "
                f"block, which can't be shared; {SECTION}.exact_block cuts it"
            )
        elif not helpers:
            text = f"nobody helps with a replay: {SECTION}.log.helpers is 0"
        else:
            took = ", ".join(f"{each:.3g} s" for each in seconds)
            text = (
                f"help with a replay: the times in the table are those of one worker; with {helpers} that help, of "
                f"{live} that are left, who share {len(sizes)} blocks of up to {max(sizes)} micro-batches a step, the "
                f"slowest stage takes {took}, beside the weights that each is sent once a step;{alone}"
            ).removesuffix(";")
        return cls(len(sizes), helpers, seconds, text)


def _chosen(every: int, now: Selection, best: Selection) -> str:
    """What is logged, and what the best choice would be, in words."""
    instead = "no choice is better" if best.logged == now.logged else f"better: {best}"
    return f"with a checkpoint every {every} steps: {now}; {instead}"


def _ways(job: ConfiguredJob) -> list[dict]:
    """A row for each kind of loss: which way is taken, and the predicted seconds at each of ``EVERY``."""
    peers = (LOCAL.detection_us + LOCAL.pause_us) / 1e6
    rows = []
    if job.survives:
        rows.append(_row("a worker whose stage has others", "reroute", "they take its work", [peers] * len(EVERY)))
    alike: dict[tuple[float, ...], list[int]] = {}
    for stage in range(job.stages):
        taken = tuple(round(BEFORE_S + _line(job, every).recovery_s(stage, stage + 1), 3) for every in EVERY)
        alike.setdefault(taken, []).append(stage)
    for seconds, stages in alike.items():
        lost = f"the last worker of {'any stage' if len(stages) == job.stages else stages_text(stages)}"
        rows.append(_row(lost, "replay", "from the log; all others wait", seconds))
    if job.stages > 2:
        lines = [_line(job, every) for every in EVERY]
        both = [BEFORE_S + max(line.recovery_s(at, at + 2) for at in range(job.stages - 1)) for line in lines]
        rows.append(_row("two neighbours, at worst", "replay", "one after the other, at most", both))
    again = [_start_again_s(job, every) for every in EVERY]
    how = "from a checkpoint"
    rows.append(_row("a stage whose logs have a gap", "end", how, again))
    rows.append(_row("the host of rank 0", "end", how, again))
    return rows


def _row(lost: str, way: str, how: str, seconds: Sequence[float]) -> dict:
    return {"lost": lost, "way": way, "how": how, "seconds": [round(each, 3) for each in seconds]}


def _start_again_s(job: ConfiguredJob, every: int) -> float:
    """Seconds until everybody is where it was, once somebody has started the job again."""
    step_s = job.planned()[0] / 1e6
    return BEFORE_S + max(_load_s(job)) + every / 2 * step_s


def _line(job: ConfiguredJob, every: int, share: int | None = None) -> Line:
    """The job's stages as the planner's model of logs has them; no bytes where no profile knows them.  ``share``: so
    many micro-batches of a step are made by one worker, None for all.
    """
    profile, stages = job.profile, job.stages
    batch = len(job.shape.batch) if share is None else share
    ops = (Op.F, Op.I, Op.W) if job.settings.split_backward else (Op.F, Op.B)
    work = [
        (batch * sum(job.costs.of(op, stage) for op in ops) + job.costs.of(Op.STEP, stage)) / 1e6
        for stage in range(stages)
    ]
    crossing = 0 if profile is None else _boundary_bytes(job)
    hosts = {seat: host for host, seats in job.hosts.items() for seat in seats}
    first = {seat.stage: host for seat, host in hosts.items() if seat.replica == 0}
    return Line(
        recompute_s=tuple(work),
        boundary_bytes=(crossing,) * (stages - 1),
        failure=(1 / stages,) * stages,
        hosts=tuple(first[stage] for stage in range(stages)),
        load_s=max(_load_s(job)),
        every=every,
        network_bytes_per_s=DISK if profile is None else profile.across.bytes_per_us * 1e6,
        read_bytes_per_s=DISK,
    )


def _load_s(job: ConfiguredJob) -> list[float]:
    """Seconds for each stage's state from a checkpoint; 0 where its size is not known."""
    return [0.0] * job.stages if job.profile is None else [size / DISK for size in job.profile.state_bytes(job.stages)]


def _boundary_bytes(job: ConfiguredJob) -> int:
    """What crosses a boundary in a step, both ways, of all replicas."""
    assert job.profile is not None, "only a profile knows bytes"
    return 2 * len(job.shape.batch) * job.profile.boundary_bytes


def _disk(job: ConfiguredJob) -> tuple[int | None, str]:
    """The bytes that are free where the log goes, None where that can't be seen from here; and that in words."""
    folder = job.settings.log.folder if job.settings.log is not None else None
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


def _wrong(job: ConfiguredJob, data: dict) -> list[str]:
    """What has to change: a log for which there is no room."""
    full = [(every, each) for every, each in zip(EVERY, data.get("all", ())) if not each["fits"]]
    if not full:
        return []
    every, needs = full[0]
    return [
        f"the log takes {needs['log_bytes'] / 1e9:.4g} GB with a checkpoint every {every} steps, and "
        f"{data['disk_bytes'] / 1e9:.4g} GB are free: set {SECTION}.log.folder to a larger disk, or raise "
        f"{SECTION}.checkpoint.overhead"
    ]


def _table(ways: list[dict]) -> list[str]:
    heads = ("lost", "way", *(f"s, every {every}" for every in EVERY), "how")
    rows = [(row["lost"], row["way"], *(f"{each:.3g}" for each in row["seconds"]), row["how"]) for row in ways]
    return aligned([heads, *rows], tuple(range(2, 2 + len(EVERY))))
