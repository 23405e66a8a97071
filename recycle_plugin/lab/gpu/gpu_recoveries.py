"""Stages of ``scripts/on_gpu`` for returns, replays and sharded replicas, each at its smallest, on one device."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from recycle_plugin.lab.checks.killed import KILLED_IN, SEAT, TOLERANCE, difference, failed, one_host
from recycle_plugin.lab.checks.rows import Row, judged
from recycle_plugin.lab.checks.small_job import GO
from recycle_plugin.lab.gpu.gpu_jobs import AS_THE_CPU, JOB_S, MEND, side_by_side
from recycle_plugin.lab.gpu.place import StagePlace
from recycle_plugin.lab.runs import JobRun, RunFailed, RunOutcome
from recycle_plugin.runtime.devices.host import HOST

LONG, HELD = 60, 12  # steps of a job with a return, and the step that waits for the newcomer
BACK_S = 150.0  # until the newcomers' processes have come
LOG = {"log": {}, "checkpoint": {"overhead": 0.02}}
SHARDED = Path(__file__).with_name("small_sharded.py")
KILLED = "killed"  # the folder of a job that loses a worker
REPLICA, SHARDED_KILL = "1.0", "kill 1.0 before 0REDUCE@4"


def returns(place: StagePlace, *more: str) -> list[Row]:
    """Kill a worker, which comes back while the others train; ``more``: options of both jobs."""
    fault = f"kill {SEAT} after 1F0.0@{KILLED_IN}"
    whole, found = side_by_side(
        partial(job, place.folder / "reference", place.device, *more),
        partial(job, place.folder / KILLED, place.device, *killed(fault), *more),
        meanwhile=let_on,
    )
    return [recovered("return", found, whole, place.folder)]


def replay(place: StagePlace) -> list[Row]:
    """Kill the only worker of a stage, which is replayed from the other stage's log."""
    options = ("--settings", json.dumps(LOG))
    fault = f"kill {SEAT} before 1F0.0@{KILLED_IN + 2}"
    whole, found = side_by_side(
        partial(job, place.folder / "reference", place.device, *options, workers=2),
        partial(job, place.folder / KILLED, place.device, *options, "--fault", fault, workers=2),
    )
    return [recovered("replay", found, whole, place.folder, replayed=True)]


def sharded(place: StagePlace) -> list[Row]:
    """Run DeepSpeed's ZeRO 3 on 2 replicas of 2 ranks: beside the CPU, and with a killed replica that returns."""
    there, here, found = side_by_side(
        partial(shards, place.folder / "calm_cpu", HOST.type),
        partial(shards, place.folder / "calm", place.device),
        partial(shards, place.folder / KILLED, place.device, *killed(SHARDED_KILL)),
        meanwhile=let_on,
    )
    return [
        compared("sharded", here, there, AS_THE_CPU, place.folder, set()),
        compared("sharded: a replica is killed, and returns", found, here, TOLERANCE, place.folder, {REPLICA}),
    ]


# --- jobs --------------------------------------------------------------------------------------------


def job(folder: Path, device: str, *options: str, workers: int = 4) -> JobRun:
    """Start the small job with dropout, as two stages on ``workers`` workers."""
    (folder / GO).unlink(missing_ok=True)
    return one_host(device, JOB_S, workers).run(folder, "--device", device, "--steps", str(LONG), *options)


def shards(folder: Path, device: str, *options: str) -> JobRun:
    """Start the job of sharded replicas."""
    (folder / GO).unlink(missing_ok=True)
    started = one_host(device, JOB_S)
    command = [*started.command, str(SHARDED), "--run-dir", str(folder.resolve()), "--steps", str(LONG), *options]
    return JobRun(folder, command, started.variables)


def killed(fault: str) -> tuple[str, ...]:
    """Return the options of a job that loses a worker, and waits for its newcomer."""
    return ("--hold", str(HELD), "--fault", fault)


def let_on(run: JobRun) -> None:
    """Let a job that waits for newcomers go on once there are as many as lost workers."""

    def back() -> bool:
        kinds = [event["event"] for event in run.events()]
        return 0 < kinds.count("lost") <= kinds.count("newcomer")

    if run.folder.name == KILLED:
        run.wait_for(back, "its newcomers", BACK_S)
        (run.folder / GO).touch()


# --- verdicts ----------------------------------------------------------------------------------------


def recovered(
    name: str, found: RunOutcome | RunFailed, whole: RunOutcome | RunFailed, folder: Path, replayed: bool = False
) -> Row:
    """Return whether a job got its lost worker of SEAT back (``replayed``: by a replay) and trained like ``whole``."""
    for one in (whole, found):
        if isinstance(one, RunFailed):
            return failed(name, one, folder)
    lost, apart = {str(failure.seat): failure.absence for failure in found.failures}, difference(found, whole)
    back = lost.get(SEAT)
    wrong = (
        f"lost {', '.join(sorted(lost)) or 'nobody'} instead of {SEAT}"
        if back is None or len(lost) > 1
        else f"seat {SEAT} has not come back"
        if not back.is_over
        else f"stage {SEAT[2]} was not replayed"
        if replayed and not back.replayed_at
        else f"losses differ by {apart:.2g}, and {TOLERANCE:g} is allowed"
        if not apart <= TOLERANCE
        else ""
    )
    seconds = round(back.lasted_s, 3) if back is not None and back.is_over else None
    text = f"losses differ by {apart:.2g}; back from step {back.back_step} on, after {seconds:g} s" if seconds else ""
    return judged(name, wrong, text, MEND, difference=apart, seconds=seconds)


def compared(
    name: str, found: RunOutcome | RunFailed, other: RunOutcome | RunFailed, tolerance: float, folder: Path, lost: set
) -> Row:
    """Return whether all ranks of a sharded job had the other job's losses in each step, and lost just these seats."""
    for one in (found, other):
        if isinstance(one, RunFailed):
            return failed(name, one, folder)
    gone, whole = {str(event["seat"]) for event in found.of("lost")}, other.records[0]["losses"]
    apart = [abs(loss - whole[step]) for each in found.records.values() for step, loss in each["losses"].items()]
    most = max(apart) if apart and all(each == each for each in apart) else float("inf")
    wrong = (
        f"lost {', '.join(sorted(gone)) or 'nobody'} instead of {', '.join(sorted(lost)) or 'nobody'}"
        if gone != lost
        else f"ranks {sorted(found.records)} have come to the end, instead of {sorted(other.records)}"
        if found.records.keys() != other.records.keys()
        else f"losses differ by {most:.2g}, and {tolerance:g} is allowed"
        if not most <= tolerance
        else ""
    )
    return judged(name, wrong, f"losses differ by {most:.2g}", MEND, difference=most)
