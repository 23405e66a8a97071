"""Jobs that lose a worker at a named moment, compared with the same job without: losses, survivors, times."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from recycle_plugin.checks.rows import Row, judged
from recycle_plugin.observability.run_history import Failure
from recycle_plugin.runs import JobRun, RunFailed, RunOutcome
from recycle_plugin.runtime.devices.host import HOST

JOB = Path(__file__).with_name("small_job.py")
SEAT, KILLED_IN, STEPS = "0.1", 4, 8
TOLERANCE = 5e-6  # between losses with and without a kill, on the same devices: sums are in another order
MOMENTS = {
    "F": "after 1F0.0@4",
    "I": "after 1I0.0@4",
    "W": "after 1W0.0@4",
    "REDUCE": "before 1REDUCE@4",
    "STEP": "after 1STEP@4",
    "between steps": "at step.end@4",
}
"""When a worker of stage 1 is killed.

On an accelerator what the host is "after" has only been started: the device is in the middle of it.
"""


class StartedJob(NamedTuple):
    """How a small job is started: ``command`` runs a script on all workers, under ``variables``, within
    ``deadline_s``.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    deadline_s: float

    def run(self, folder: Path, *options: str, job: Path = JOB) -> JobRun:
        """Start the small job with these options of its own."""
        return JobRun(folder, [*self.command, str(job), "--run-dir", str(folder), *options], self.variables)


def one_host(device: str, deadline_s: float, workers: int = 4) -> StartedJob:
    """Workers under the plugin's own launcher, all of them on one device of this kind."""
    return StartedJob(
        [sys.executable, "-m", "recycle_plugin.launch", "--workers", str(workers), "--one-device"],
        on_device(device),
        deadline_s,
    )


def on_device(device: str) -> dict[str, str]:
    """The environment of processes that share one device of this kind, the first of those that this one may use."""
    first = "" if device == HOST.type else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    own = {"CUDA_VISIBLE_DEVICES": first, "DS_ACCELERATOR": device}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def outcome(run: JobRun, deadline_s: float) -> RunOutcome:
    """What the job has left at its end; raises RunFailed where it ends badly, or is ended past the deadline."""
    try:
        return run.finish(deadline_s)
    except RunFailed:
        run.end()
        raise


def killed_itself(run: JobRun, moment: str) -> None:
    """Nothing: the job's own fault kills the worker, wherever that is."""


def kill_list(
    started: StartedJob,
    folder: Path,
    reference: RunOutcome,
    moments: Sequence[str],
    kill: Callable[[JobRun, str], float | None],
    options: Sequence[str] = (),
) -> list[Row]:
    """One job for each of the moments, in which ``kill`` loses a worker there: a row each, by its losses."""
    kind = "kill" if kill is killed_itself else "stop"
    found = []
    for name in moments:
        fault = f"{kind} {SEAT} {MOMENTS[name]}"
        place = folder / name.replace(" ", "_")
        print(f"a job with a kill: {name} ...", file=sys.stderr, flush=True)
        try:
            with started.run(place, "--fault", fault, *options) as run:
                at = kill(run, MOMENTS[name])
                found.append(row(f"kill: {name}", outcome(run, started.deadline_s), reference, at))
        except RunFailed as error:
            found.append(failed(f"kill: {name}", error, place))
    return found


def row(name: str, found: RunOutcome, reference: RunOutcome, at: float | None, tolerance: float = TOLERANCE) -> Row:
    """Whether a job that has lost the worker of SEAT has trained what the ``reference`` has, and how long that took.

    ``at``: when it was killed, in seconds since the epoch; None: as the job's own log has it.
    """
    lost, apart = {str(failure.seat) for failure in found.failures}, difference(found, reference)
    wrong = (
        f"lost {', '.join(sorted(lost)) or 'nobody'} instead of {SEAT}"
        if lost != {SEAT}
        else f"losses differ by {apart:.2g}, and {tolerance:g} is allowed"
        if not apart <= tolerance
        else f"ranks {', '.join(map(str, found.restarted))} are new processes at the end"
        if found.restarted
        else ""
    )
    times = times_of(found.failures[0], at) if lost else {}
    text = f"losses differ by {apart:.2g}; " + ", ".join(
        f"{name} {1e3 * value:.0f} ms" for name, value in times.items()
    )
    seconds = {f"{name}_s": round(value, 4) for name, value in times.items()}
    return judged(name, wrong, text, "send the run folder's events.jsonl and output.txt", difference=apart, **seconds)


def times_of(failure: Failure, at: float | None) -> dict[str, float]:
    """Seconds until a loss was seen, from then on until the others went on, and from the loss to the next commit."""
    struck, resumed = failure.struck_at if at is None else at, failure.resumed_at or failure.seen_at
    commit = failure.committed_at or resumed
    return {"seen": failure.seen_at - struck, "regrouped": resumed - failure.seen_at, "next commit": commit - struck}


def failed(name: str, error: RunFailed, folder: Path) -> Row:
    """The row of a job that has not come to its end, by the line that says why where there is one."""
    lines = str(error).splitlines()
    said = next((line for line in reversed(lines) if "recycle: error:" in line or "] end: " in line), lines[0])
    return Row(name, False, " ".join(said.split()), f"{folder}/output.txt has all that it said", {})


def difference(one: RunOutcome, other: RunOutcome) -> float:
    """The largest difference of a step's loss; infinite where the two have other steps, or none."""
    mine, theirs = one.curve, other.curve
    if not mine or mine.keys() != theirs.keys():
        return float("inf")
    apart = [abs(mine[step] - theirs[step]) for step in theirs]
    return max(apart) if all(each == each for each in apart) else float("inf")  # no NaN hides behind a maximum
