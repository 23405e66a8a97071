"""Jobs that lose a worker at a named moment, compared with the same job without a loss: losses, survivors, times."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from recycle_plugin.lab.checks.rows import Row, judged
from recycle_plugin.lab.runs import JobRun, RunFailed, RunOutcome
from recycle_plugin.observability.run_history import Failure
from recycle_plugin.runtime.devices.host import HOST

JOB = Path(__file__).with_name("small_job.py")
SEAT, KILLED_IN, STEPS = "0.1", 4, 8
TOLERANCE = 5e-6  # between losses with and without a kill on the same devices: the order of sums differs
MOMENTS = {
    "F": "after 1F0.0@4",
    "I": "after 1I0.0@4",
    "W": "after 1W0.0@4",
    "REDUCE": "before 1REDUCE@4",
    "STEP": "after 1STEP@4",
    "between steps": "at step.end@4",
}
"""When a worker of stage 1 is killed. On an accelerator, what the host is "after" has only been started: the device is
in the middle of it.
"""


class StartedJob(NamedTuple):
    """How a small job is started: ``command`` runs a script on all workers, with the environment ``variables``."""

    command: Sequence[str]
    variables: Mapping[str, str]
    deadline_s: float

    def run(self, folder: Path, *options: str, job: Path = JOB) -> JobRun:
        """Start the small job, with ``options`` as its arguments."""
        return JobRun(folder, [*self.command, str(job), "--run-dir", str(folder), *options], self.variables)


def one_host(device: str, deadline_s: float, workers: int = 4) -> StartedJob:
    """Return a job of workers under the plugin's own launcher that share one device of this kind."""
    return StartedJob(
        [sys.executable, "-m", "recycle_plugin.launch", "--workers", str(workers), "--one-device"],
        on_device(device),
        deadline_s,
    )


def on_device(device: str) -> dict[str, str]:
    """Return the environment of processes that share one device of this kind, the first that this process may use."""
    first = "" if device == HOST.type else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    own = {"CUDA_VISIBLE_DEVICES": first, "DS_ACCELERATOR": device}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def outcome(run: JobRun, deadline_s: float) -> RunOutcome:
    """Return the job's outcome. Raises RunFailed if it fails, or is ended at the deadline."""
    try:
        return run.finish(deadline_s)
    except RunFailed:
        run.end()
        raise


def killed_itself(run: JobRun, moment: str) -> None:
    """Do nothing: the job's own fault kills the worker, on whichever host."""


def kill_list(
    started: StartedJob,
    folder: Path,
    reference: RunOutcome,
    moments: Sequence[str],
    kill: Callable[[JobRun, str], float | None],
    options: Sequence[str] = (),
) -> list[Row]:
    """Run a job for each of ``moments``, in which ``kill`` loses a worker then, and return a row for each."""
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
    """Return whether a job that lost the worker of SEAT trained the same as the ``reference``, with the times. ``at``:
    when it was killed, in seconds since the epoch; None: by the job's own log.
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
    """Return seconds until the loss was seen, from then until the others went on, and from loss to next commit."""
    struck, resumed = failure.struck_at if at is None else at, failure.resumed_at or failure.seen_at
    commit = failure.committed_at or resumed
    return {"seen": failure.seen_at - struck, "regrouped": resumed - failure.seen_at, "next commit": commit - struck}


def failed(name: str, error: RunFailed, folder: Path) -> Row:
    """Return the row of a failed job, with the line that says why if there is one."""
    lines = str(error).splitlines()
    said = next((line for line in reversed(lines) if "recycle: error:" in line or "] end: " in line), lines[0])
    return Row(name, False, " ".join(said.split()), f"{folder}/output.txt has all that it said", {})


def difference(one: RunOutcome, other: RunOutcome) -> float:
    """Return the largest difference of a step's loss; infinite if the two have different steps, or none."""
    mine, theirs = one.curve, other.curve
    if not mine or mine.keys() != theirs.keys():
        return float("inf")
    apart = [abs(mine[step] - theirs[step]) for step in theirs]
    return max(apart) if all(each == each for each in apart) else float("inf")  # max() could hide a NaN
