"""Which way each kind of loss goes where a job logs, and what it is predicted to take: a section of ``recycle doctor``.

The decision is the one that a job makes, core/coordinator/recovery_ways.py; the time of a replayed step is from the
model of planner/log_selection.py, which counts what is read of logs too.  What nobody has measured for this job is
assumed, and said so.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from recycle_plugin.commands.config_job import ConfiguredJob
from recycle_plugin.commands.doctor_section import Section, aligned
from recycle_plugin.commands.losses import stages_text
from recycle_plugin.core.coordinator.recovery_ways import (
    ASSUMED,
    END,
    NOBODY_LEFT,
    NOT_NEEDED,
    START_UP_S,
    UNKNOWN,
    Decision,
    Time,
    Times,
    Way,
    no,
    reload,
    replay,
    reroute,
    shared,
)
from recycle_plugin.core.coordinator.restarts import FIRST_S
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.planner.log_selection import Line, Selection, choose
from recycle_plugin.settings.wording import SECTION
from recycle_plugin.simulator.machine_constants import LOCAL
from recycle_plugin.simulator.peers import Transitions

EVERY = (10, 100)  # steps between checkpoints: where the interval begins, and the longest that a second one may have
DISK = Transitions().storage_rate
BEFORE_S = LOCAL.detection_us / 1e6 + FIRST_S + START_UP_S
MISSING = "what the replay needs is missing"
NO_BYTES = (
    "bytes over the boundaries, which of them to log, and the loading of a checkpoint: not known without a profile "
    "(--profile FILE), and in none of these times"
)
GUESSES = (
    f"assumed: {BEFORE_S:.0f} s until the next process has its model, {FIRST_S:.0f} s of them the wait before it is "
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
    losses = _losses(job)
    ways = [each.row for each in losses]
    lines = [GUESSES, INTERVAL, help_.text, *(each.text for each in losses if each.said)]
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
        blocks = job.settings.policy(False, job.stages).blocks(job.shape)
        sizes = [len(each) for each in blocks.members().values()]
        live = (job.stages - 1) * job.shape.replicas
        helpers, share = shared(blocks, live, None if job.settings.log is None else job.settings.log.most_helpers)
        lines = [_line(job, every, round(share * len(job.shape.batch))) for every in EVERY]
        seconds = tuple(
            round(BEFORE_S + max(line.recovery_s(stage, stage + 1) for stage in range(job.stages)), 3) for line in lines
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


@dataclass(frozen=True)
class Loss:
    """A kind of loss, in words, and ``how`` it is recovered from; the ``decisions`` at each of ``EVERY``; ``said``: in
    a line of its own too, which has what the other ways cost.
    """

    lost: str
    how: str
    decisions: tuple[Decision, ...]
    said: bool = True

    @property
    def row(self) -> dict:
        """Its row of the table; an end takes as long as whoever starts the job again needs to be where it was."""
        ways = [each.taken if each.taken.parts else each.ways[-2] for each in self.decisions]
        seconds = [round(each.seconds or 0.0, 3) for each in ways]
        instead = [each.details["instead"] for each in self.decisions]
        return {
            "lost": self.lost,
            "way": self.decisions[0].taken.name,
            "how": self.how,
            "seconds": seconds,
            "instead": instead,
        }

    @property
    def text(self) -> str:
        """What the ways cost with the fewest steps between checkpoints, in words."""
        decision, why = self.decisions[0], self.decisions[0].ways[1].why_not
        if decision.taken.parts:
            return f"{self.lost}: {decision.taken.name}, {decision.taken.cost}. {decision.others()}"
        return f"{self.lost}: {decision.taken.name}, since {why}. {decision.others(why)}"


def _losses(job: ConfiguredJob) -> list[Loss]:
    """The kinds of loss, each with its decision."""
    found = []
    each_step = [_slowest_s(job, every, 1) for every in EVERY]
    if job.survives:
        comes = None if job.settings.rejoin == "never" else Time(BEFORE_S, ASSUMED)
        pause, throughput = (
            Time((LOCAL.detection_us + LOCAL.pause_us) / 1e6, ASSUMED),
            job.planned()[0] / job.one_lost(),
        )
        first = reroute(pause, comes, throughput)
        decisions = tuple(_decision(job, every, step, NOT_NEEDED, first) for every, step in zip(EVERY, each_step))
        found.append(Loss("a worker whose stage has others", "they take its work", decisions))
    alike: dict[tuple[float, ...], list[int]] = {}
    for stage in range(job.stages):
        seconds = tuple(round(_line(job, every).recovery_s(stage, stage + 1), 3) for every in EVERY)
        alike.setdefault(seconds, []).append(stage)
    for stages in alike.values():
        lost = f"the last worker of {'any stage' if len(stages) == job.stages else stages_text(stages)}"
        at = stages[0]
        decisions = tuple(_decision(job, every, _line(job, every).step_s(at, at + 1)) for every in EVERY)
        found.append(Loss(lost, "from the log; all others wait", decisions))
    if job.stages > 2:
        both = tuple(_decision(job, every, _slowest_s(job, every, 2)) for every in EVERY)
        found.append(Loss("two neighbours, at worst", "one after the other, at most", both, said=False))
    missing = tuple(_decision(job, every, step, MISSING) for every, step in zip(EVERY, each_step))
    found.append(Loss("a stage whose logs have a gap", "from a checkpoint", missing))
    found.append(Loss("the host of rank 0", "from a checkpoint", missing, said=False))
    return found


def _slowest_s(job: ConfiguredJob, every: int, count: int) -> float:
    """A replayed step of the slowest group of so many neighbours, in seconds."""
    line = _line(job, every)
    return max(line.step_s(at, at + count) for at in range(job.stages - count + 1))


def _decision(job: ConfiguredJob, every: int, step_s: float, why: str = "", first: Way | None = None) -> Decision:
    """That for a loss in the middle between two checkpoints.  ``why``: there is no replay; ``first``: the way of
    rerouting, None where nobody is left.
    """
    load = Time(0.0, UNKNOWN) if job.profile is None else Time(max(_load_s(job)), ASSUMED)
    times = Times(Time(BEFORE_S, ASSUMED), load, Time(job.planned()[0] / 1e6, ASSUMED), ())
    back = replay(times, Time(step_s, ASSUMED), every / 2, why_not=why), reload(times, every / 2)
    return Decision((first or no("reroute", NOBODY_LEFT), *back, END))


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
