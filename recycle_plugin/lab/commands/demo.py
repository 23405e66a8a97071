"""``recycle demo``: run the main job twice under the ``deepspeed`` launcher, without and with a failure, and compare.

All figures are read from what the two runs left behind: event logs, losses and traces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from recycle_plugin.commands.parsers import command
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.lab.commands import came_back, curves
from recycle_plugin.lab.runs import RunFailed, RunOutcome, TrainingRun, terminable
from recycle_plugin.observability.console import STYLES
from recycle_plugin.observability.report import panels
from recycle_plugin.observability.run_history import WARM_UP, Failure, RunHistory
from recycle_plugin.observability.trace import read_traces
from recycle_plugin.render import gantt

TOLERANCE = 5e-6  # largest difference between the losses of the two runs
FEWEST_STEPS = 10  # the failure comes half-way: fewer steps leave none for a median
FEWEST_STEPS_BACK = 36  # enough before the kill, until the next process has come, and after that
STALL_S = 300.0  # longest time without a commit; a machine with two cores needs about 45 s for a whole run
BUSY = 2.0  # load per core from which a stall's message names it
LONGER, TRIES = 3, 2  # if a worker is not back in time, run with 3 times the steps, up to twice
QUIET_S = 10.0  # interval of progress lines until training begins
POLL_S = 0.05
FAULT_FREE, FAILED = "fault_free", "with_failure"
PACKAGES = ("recycle_plugin", "torch", "deepspeed", "megatron-core")
EVENT_LINE = re.compile(r"\[recycle +[\d.]+\] (\w+): .*")


class DemoScenario(NamedTuple):
    """A failure that the demo injects, with the job that it strikes and the default number of ``steps``.

    ``both``: overrides of both runs. ``overrides``: those that the run with the failure has in addition; "{early}"
    stands for a step at a fifth of the steps, "{middle}" for one at a half. ``returns``: the worker comes back.
    ``replays``: it replays a stage that was left empty.
    """

    what: str
    data: str
    workers: int
    steps: int
    fewest_steps: int
    both: tuple[str, ...]
    overrides: tuple[str, ...]
    returns: bool = False
    replays: bool = False

    def with_failure(self, steps: int) -> tuple[str, ...]:
        """Return the additional overrides of the run with the failure, for a run of ``steps``."""
        return tuple(override.format(early=steps // 5, middle=steps // 2) for override in self.overrides)


SCENARIOS = {
    "worker": DemoScenario(
        "one worker gets SIGKILL in the middle of a step",
        "real text",
        4,
        30,
        FEWEST_STEPS,
        ("experiment=gpt_tiny", "topology=pp2_dp2", "recycle.rejoin=never"),
        ("faults=kill_one",),
    ),
    "rejoin": DemoScenario(
        "one worker gets SIGKILL, and its next process comes back",
        "emulated layers",
        4,
        90,
        FEWEST_STEPS_BACK,
        ("experiment=emulated_pp4_dp2", "topology=pp2_dp2", "optimizer=adam", "model.width=8192", "recycle.trace=true"),
        ('recycle.faults=["kill 0.1 before 1F0.1@{early}"]',),
        returns=True,
    ),
    "replica": DemoScenario(
        "one worker gets SIGKILL, its whole replica goes with it, and comes back whole",
        "emulated layers",
        4,
        90,
        FEWEST_STEPS_BACK,
        (
            "experiment=emulated_pp4_dp2",
            "topology=pp2_dp2",
            "optimizer=adam",
            "model.width=8192",
            "recycle.trace=true",
            "recycle.unit=replica",
        ),
        ('recycle.faults=["kill 1.1 before 1F1.1@{early}"]',),
        returns=True,
    ),
    "stage": DemoScenario(
        "a stage's only worker gets SIGKILL, and its next process replays the stage from the log",
        "emulated layers",
        4,
        60,
        FEWEST_STEPS_BACK,
        (
            "experiment=emulated_pp4_dp2",
            "topology=pp4_dp1",
            "optimizer=adam",
            "model.width=8192",
            *(f"model.{name}_ms=10" for name in ("forward", "input", "weight")),
            "recycle.trace=true",
            "recycle.log={}",
            "recycle.checkpoint={overhead: 0.005}",
        ),
        ('recycle.faults=["kill 0.1 before 1F0.4@{middle}"]',),
        replays=True,
    ),
}


DESCRIPTION = """\
Train twice on this machine, without and with a killed worker, and compare the losses.

recycle demo --scenario rejoin

Scenarios: worker, one is killed (default); rejoin, it also comes back; replica, its whole replica goes and comes with
it; stage, a stage's only worker is killed, and replays it from the log.
"""


def add(commands: argparse._SubParsersAction) -> None:
    about = "train on this machine, kill a worker, compare with the run without"
    made = command(commands, "demo", about, DESCRIPTION, lambda found: run(found.out, found.scenario, found.steps))
    made.add_argument("--out", metavar="DIR", help="run folder (default: runs/demo)")
    made.add_argument("--scenario", metavar="NAME", default="worker", help="one of those above")
    made.add_argument(
        "--steps", metavar="N", type=int, help="optimizer steps of each of the two runs (default: 30; of rejoin 90)"
    )


# --- what a failure cost -----------------------------------------------------------------------------


def failures(outcome: RunOutcome) -> list[Failure]:
    """Return the kills of a run in their order. Raises RunFailed if no step was committed after one of them."""
    lost = {str(failure.seat): failure for failure in outcome.failures}
    for event in outcome.of("fault"):
        if event["seat"] not in lost or lost[event["seat"]].committed_at is None:
            raise RunFailed(f"'{event['fault']}' struck, and no step was committed after it")
    return [lost[event["seat"]] for event in outcome.of("fault")]


def as_report(failure: Failure) -> dict:
    """Return the entry in report.json of an injected failure that the job recovered from. Times in seconds."""
    assert failure.fault is not None and failure.resumed_at is not None and failure.committed_at is not None
    return {
        "seat": str(failure.seat),
        "instruction": failure.fault.where,
        "when": failure.fault.when,
        "pid": failure.pid,
        "step": failure.step,
        "detection_s": round(failure.seen_at - failure.struck_at, 4),
        "regroup_s": round(failure.resumed_at - failure.seen_at, 4),
        "rest_s": round(failure.committed_at - failure.resumed_at, 4),
        "stall_s": round(failure.stall_s, 4),
    }


def gone_along(history: RunHistory) -> list[str]:
    """Return the seats that were given up, and restarted, together with a killed worker of their replica."""
    return sorted({event["seat"] for event in history.of("lost") if event.get("cause") == Cause.TOGETHER.value})


def survivors(outcome: RunOutcome, killed: Sequence[Failure]) -> list[dict]:
    """Return the workers that should have reached the end, with their pids at both ends (None: no record)."""
    dead = {str(failure.seat) for failure in killed} | set(gone_along(outcome))
    return [
        {"seat": seat, "rank": rank, "pid": outcome.pids[rank], "pid_at_end": outcome.records.get(rank, {}).get("pid")}
        for seat, rank in sorted(outcome.seats.items())
        if seat not in dead
    ]


def report(fault_free: RunOutcome, failed: RunOutcome, steps: int) -> dict:
    """Return the contents of report.json. Seconds, rounded to 0.1 ms."""
    killed, job = failures(failed), failed.job
    if not killed:
        raise RunFailed("no fault struck in the run that was to have one")
    if not (fault_free.records and failed.records):
        raise RunFailed("no worker got to the end of the training script")
    live = survivors(failed, killed)
    before = failed.median_s(WARM_UP + 1, killed[0].step - 1)
    back = min((each.back_step for each in failed.returns if each.back_step > killed[-1].step), default=steps + 1)
    after = failed.median_s(killed[-1].step + 1, back - 1)
    worst = as_report(max(killed, key=lambda failure: failure.stall_s))
    found = {
        "topology": {key: job[key] for key in ("replicas", "stages", "micro_batches")},
        "steps": steps,
        "killed": [as_report(failure) for failure in killed],
        "gone_along": gone_along(failed),
        "max_loss_difference": curves.largest_difference(_curve(fault_free), _curve(failed)),
        "tolerance": TOLERANCE,
        "survivors": live,
        "survivors_restarted": sum(one["pid_at_end"] not in (None, one["pid"]) for one in live),
        **{key: worst[key] for key in ("stall_s", "detection_s", "regroup_s", "rest_s")},
        "step_s_before": round(before, 4),
        "step_s_after": round(after, 4),
        "step_s_fault_free": round(fault_free.median_s(WARM_UP + 1, steps), 4),
        "ratio": round(after / before, 3),
        "cores": len(os.sched_getaffinity(0)),
        "losses": {FAULT_FREE: fault_free.losses, FAILED: failed.losses},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }
    return {"passed": not (problems := what_is_wrong(found, failed)), "problems": problems} | found


def what_is_wrong(found: Mapping, failed: RunOutcome) -> list[str]:
    """Return why the demo did not show what it should, an empty list if it did."""
    wrong = []
    if not found["max_loss_difference"] <= TOLERANCE:  # a nan is no agreement
        wrong.append(f"the losses differ by {found['max_loss_difference']:.1e}, more than {TOLERANCE:g}")
    short = [name for name, losses in found["losses"].items() if len(losses) != found["steps"]]
    if short:
        wrong.append(f"the run {' and the run '.join(short)} has not {found['steps']} losses")
    if len({tuple(record["losses"]) for record in failed.records.values()}) != 1:
        wrong.append("the survivors do not agree on the losses")
    for one in found["survivors"]:
        if one["pid_at_end"] is None:
            wrong.append(f"the worker of seat {one['seat']} (process {one['pid']}) did not get to the end")
        elif one["pid_at_end"] != one["pid"]:
            wrong.append(
                f"the worker of seat {one['seat']} was restarted: process {one['pid']} became {one['pid_at_end']}"
            )
    return wrong


def _curve(outcome: RunOutcome) -> dict[int, float]:
    return dict(enumerate(outcome.losses, start=1))


# --- files -------------------------------------------------------------------------------------------


def write(out: Path, found: dict, spans: Sequence[Span], killed: Sequence[Failure]) -> None:
    """Write report.json and gantt.png to ``out``. There is no gantt.png of a replay: all workers wait so long for it
    that nothing else would be visible.
    """
    (out / "report.json").write_text(json.dumps(found, indent=1))
    if "recovered_by" not in found:
        gantt.draw(out / "gantt.png", *panels(spans, killed[0]))


# --- running -----------------------------------------------------------------------------------------


def run(out: str | None, scenario: str, steps: int | None) -> int:
    """Run the demo and return the exit code: 0 if the losses agree and no survivor was restarted, 130 if interrupted.
    ``steps``: of each run, None for the scenario's default. Raises ValueError for an unknown scenario or too few steps.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"--scenario {scenario}: no such scenario; there is {', '.join(SCENARIOS)}")
    chosen, asked = SCENARIOS[scenario], steps
    steps = chosen.steps if steps is None else steps
    if steps < chosen.fewest_steps:
        raise ValueError(
            f"--steps {steps}: give at least {chosen.fewest_steps}, so that there are step times before and after the "
            "failure"
        )
    console = Console(highlight=False, soft_wrap=True)
    try:
        with terminable():
            return _until_back(Path(out or "runs/demo"), scenario, steps, console, TRIES if asked is None else 0)
    except RunFailed as error:
        lines = str(error).split("\n")  # the job's own lines were printed as they came
        told = "\n".join(line for line in lines if not EVENT_LINE.search(line))
        console.print(f"recycle demo: failed: {told}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("recycle demo: interrupted; all its processes are gone", style="bold red")
        return 130


def _until_back(out: Path, name: str, steps: int, console: Console, longer: int) -> int:
    """Run the demo, and if the worker was not back in time, up to ``longer`` times with more steps."""
    try:
        return _demo(out, name, steps, console)
    except came_back.NotBack as error:
        if not longer:
            raise RunFailed(f"{error} (this machine is slow to start processes now)") from None
        console.print(f"\n{error}: this machine is slow to start processes now. Once more, with {steps * LONGER} steps")
        return _until_back(out, name, steps * LONGER, console, longer - 1)


def _demo(out: Path, name: str, steps: int, console: Console) -> int:
    began, scenario = time.monotonic(), SCENARIOS[name]
    cores = len(os.sched_getaffinity(0))
    console.print(
        f"recycle demo: {scenario.what}; {scenario.workers} workers on {cores} cores, {steps} steps on "
        f"{scenario.data}, folder {out}",
        markup=False,
    )
    overrides, more = [*scenario.both, f"steps={steps}", "report_every=0"], scenario.with_failure(steps)
    said: set[str] = set()
    console.print("\nrun 1 of 2, without a failure (starting four processes takes about half a minute)", style="bold")
    fault_free = _train(out / FAULT_FREE, scenario.workers, overrides, console, said)
    console.print(f"\nrun 2 of 2, with {' '.join(more)}", style="bold")
    failed = _train(out / FAILED, scenario.workers, [*overrides, *more], console, said)
    found = report(fault_free, failed, steps) | {"scenario": name, "seconds": round(time.monotonic() - began, 1)}
    if scenario.returns:
        found["rejoined"] = came_back.rejoined(failed, failures(failed))
    if scenario.replays:
        found |= came_back.replayed(failed, failures(failed))
    write(out, found, read_traces(out / FAILED / "trace"), failures(failed))
    console.print("\n" + summary(found, out), markup=False)
    who = "replica" if found["gone_along"] else "worker"
    back = f", the lost {who} came back" * scenario.returns + ", its stage was replayed" * scenario.replays
    verdict = (
        f"passed: same losses, no survivor restarted{back}"
        if found["passed"]
        else f"failed: {'; '.join(found['problems'])}"
    )
    console.print(f"recycle demo: {verdict}", style="bold green" if found["passed"] else "bold red", markup=False)
    return 0 if found["passed"] else 1


class Stall:
    """Tells whether a run has stalled: no step committed for ``limit_s`` seconds. A busy machine may be slow."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._due_s, self._step = limit_s, limit_s, 0

    def seen(self, took_s: float, committed: Callable[[], int]) -> bool:
        """Return whether the run has stalled, ``took_s`` after its start. Calls ``committed`` once in ``limit_s``."""
        if took_s < self._due_s:
            return False
        before, self._step, self._due_s = self._step, committed(), took_s + self._limit_s
        return self._step == before


def _busy() -> str:
    """Return a hint if other programs keep this machine busy, else ""."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load < BUSY * cores:
        return ""
    return f": this machine has a load of {load:.0f} on {cores} cores, so run it again when it is less busy"


def _train(folder: Path, workers: int, overrides: Sequence[str], console: Console, said: set[str]) -> RunOutcome:
    """Run the job once and print its events as they come, except warnings and notes already in ``said``."""
    began, printed, quiet, stall = time.monotonic(), 0, 0, Stall(STALL_S)
    with TrainingRun(folder, workers, overrides) as job:
        ended = False
        while not ended:
            ended = job.launcher.poll() is not None
            lines = job.output.split("\n")[printed:-1]
            printed += len(lines)
            _show(lines, console, said)
            took = time.monotonic() - began
            if took > (quiet + 1) * QUIET_S and not job.resumes():
                quiet += 1
                console.print(f"{took:.0f} s: the processes import torch, build the model and find each other")
            if stall.seen(took, job.committed):
                job.end()  # ends at a commit, with its report
                raise job.failed(f"has committed nothing for {STALL_S:.0f} s, after step {job.committed()}{_busy()}")
            time.sleep(POLL_S)
        return job.finish()


def _show(lines: Sequence[str], console: Console, said: set[str]) -> None:
    """Print the job's own lines, without those of DeepSpeed and its libraries."""
    for match in filter(None, map(EVENT_LINE.search, lines)):
        kind, text = match[1], match[0].partition("] ")[2]
        if kind not in ("warning", "note") or text not in said:
            console.print(match[0], style=STYLES.get(kind), markup=False)
        said.add(text)


def summary(found: Mapping, out: Path) -> str:
    """Return the text printed at the end: loss curves, the cost of the failure, survivors, and the files' paths."""
    killed, live = found["killed"], found["survivors"]
    usual, failed = (dict(enumerate(losses, start=1)) for losses in found["losses"].values())
    table = curves.table(usual, failed, tuple(one["step"] for one in killed))
    picture = "" if "recovered_by" in found else "gantt.png (schedule before and after), "
    until = "until its stage was replayed" if "recovered_by" in found else "to regroup"
    rows = [
        ("killed", f"seat {one['seat']}, process {one['pid']}, by SIGKILL {one['when']} {one['instruction']}")
        for one in killed
    ]
    if along := found["gone_along"]:
        rows.append(("with it", f"seat{'s' * (len(along) > 1)} {', '.join(along)}, of the same replica"))
    rows += [
        (
            "stall",
            f"{found['stall_s']:.3f} s from SIGKILL to the next committed step: "
            f"{found['detection_s']:.3f} s to notice, {found['regroup_s']:.3f} s {until}, "
            f"{found['rest_s']:.3f} s to finish the step",
        ),
        (
            "step time",
            f"{found['step_s_before']:.3f} s before, {found['step_s_after']:.3f} s after: ratio {found['ratio']:.2f}",
        ),
        *filter(None, [came_back.told(found)]),
        (
            "survivors",
            ", ".join(f"{one['seat']} is process {one['pid_at_end']}" for one in live)
            + f"; {found['survivors_restarted']} restarted",
        ),
        ("files", f"{out}: report.json, {picture}{FAILED}/report.html"),
        ("took", f"{found['seconds']:.0f} s"),
    ]
    return "\n".join([table, "", *(f"{name:<10}{text}" for name, text in rows)])
