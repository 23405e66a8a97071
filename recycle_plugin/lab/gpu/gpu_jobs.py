"""Stages of ``scripts/on_gpu`` that run whole jobs, as four processes on one device."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from recycle_plugin.lab.checks.killed import (
    MOMENTS,
    SEAT,
    STEPS,
    difference,
    failed,
    kill_list,
    on_device,
    one_host,
    outcome,
    row,
)
from recycle_plugin.lab.checks.rows import Row, judged
from recycle_plugin.lab.gpu.context_worker import BLOCK, SIZE
from recycle_plugin.lab.gpu.place import StagePlace
from recycle_plugin.lab.runs import JobRun, RunFailed, RunOutcome, training_script
from recycle_plugin.runtime.devices.host import HOST

WATCHED = Path(__file__).with_name("watched_job.py")
JOB_S = 120.0  # of one job of four processes
SUBMITTED_S = 60.0  # until a worker has reached the place of its kill
ANSWER_S = 90.0  # of a process that has to import torch and make its context first
# between losses on the accelerator and on the CPU over eight steps in fp32: the order of sums differs
AS_THE_CPU = 1e-4
HALF = 0.02  # the same in half precision, compared with the CPU's fp32; between two CPUs bf16 differs by 6e-4
SURVIVED_HALF = 5e-3  # between losses with and without a kill in half precision, on the same device
SMALL_GPT = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.sequence=16",
    "model.dropout=0",
    "micro_batch_size=1",
    "topology.micro_batches=2",
    "data.limit_bytes=100000",
    f"steps={STEPS}",
    "report_every=0",
    "recycle.enabled=true",
    "recycle.rejoin=never",
    "recycle.report=false",
)
HALVES = {
    "bf16": "deepspeed={bf16: {enabled: true}}",
    "fp16": "deepspeed={fp16: {enabled: true, initial_scale_power: 8}}",
}  # no step is skipped
REFUSED = "DeepSpeed has no "  # in the line that refuses a precision (adapters/deepspeed/engine_checks.py)
MEND = "send the run folder's events.jsonl and output.txt"


def smoke(place: StagePlace) -> list[Row]:
    """Compare the plain pipeline and a DeepSpeed job on 2 × 2 workers with the CPU's losses."""
    rows = []
    for name, start in (("plain", started_plain), ("deepspeed", started_gpt)):
        here, there = side_by_side(
            partial(start, place.folder / name, place.device), partial(start, place.folder / f"{name}_cpu", HOST.type)
        )
        rows.append(alike(name, here, there, AS_THE_CPU, place.folder))
    return rows


def precision(place: StagePlace, *more: str) -> list[Row]:
    """Run DeepSpeed in bf16 and fp16 beside the CPU's fp32, and with a kill; ``more``: overrides on the device."""
    there, *whole = side_by_side(
        partial(started_gpt, place.folder / HOST.type, HOST.type),
        *(partial(started_gpt, place.folder / name, place.device, half, *more) for name, half in HALVES.items()),
    )
    trained = {name: here for name, here in zip(HALVES, whole, strict=True) if isinstance(here, RunOutcome)}
    fault = f'recycle.faults=["stop {SEAT} {MOMENTS["F"]}"]'
    struck: dict[str, float] = {}
    killed = side_by_side(
        *(
            partial(started_gpt, place.folder / f"{name}_killed", place.device, HALVES[name], fault, *more)
            for name in trained
        ),
        meanwhile=lambda run: struck.update({run.folder.name: killed_from_outside(run, MOMENTS["F"])}),
    )
    rows = []
    for name, here in zip(HALVES, whole, strict=True):
        said = refused(name, here) if isinstance(here, RunFailed) else None
        rows.append(said or alike(name, here, there, HALF, place.folder))
    for (name, here), found in zip(trained.items(), killed, strict=True):
        rows.append(survived(f"{name}: kill: F", found, here, struck.get(f"{name}_killed"), place.folder))
    return rows


def survived(name: str, found: RunOutcome | RunFailed, whole: RunOutcome, at: float | None, folder: Path) -> Row:
    """Return whether a job in half precision that lost a worker trained the same as the ``whole`` one."""
    if isinstance(found, RunFailed):
        return failed(name, found, folder)
    return row(name, found, whole, at, SURVIVED_HALF)


def killed_from_outside(run: JobRun, moment: str) -> float:
    """Send SIGKILL to the worker once the job's fault has stopped it at ``moment``, and return when."""
    run.wait_for(lambda: any(event["event"] == "fault" for event in run.events()), f"seat {SEAT} {moment}", SUBMITTED_S)
    return run.kill(run.rank_at(SEAT))


def kills(place: StagePlace, *more: str) -> list[Row]:
    """Kill a worker in each instruction and between steps, with dropout; ``more``: options of all the jobs."""
    options = ("--dropout", "0.1", *more)
    (reference,) = side_by_side(partial(started_plain, place.folder / "reference", place.device, *options))
    if isinstance(reference, RunFailed):
        return [failed("without a kill", reference, place.folder)]
    started, options = one_host(place.device, JOB_S), ("--device", place.device, *options)
    return kill_list(started, place.folder, reference, list(MOMENTS), killed_from_outside, options)


def sanitizer(place: StagePlace) -> list[Row]:
    """Run the plain pipeline under torch.cuda._sanitizer, and count waits for the device by their place."""
    folder = place.folder / "watched"
    try:
        with one_host(place.device, JOB_S).run(folder, "--device", place.device, job=WATCHED) as run:
            found = outcome(run, JOB_S)
    except RunFailed as error:
        return [failed("sanitizer", error, folder)]
    waits = {place: count for each in found.records.values() for place, count in each["synchronisations"].items()}
    passed = True if all(each["watched"] for each in found.records.values()) else None
    return [
        Row("races", passed, "none found by torch.cuda._sanitizer" if passed else f"not watched on {place.device}"),
        judged("synchronisations", listed(waits), "none but those that are listed", MEND)
        if passed
        else Row("synchronisations", None, f"not watched on {place.device}"),
    ]


def listed(waits: dict[str, int]) -> str:
    """Return places that wait for the device, each with its count, or ""."""
    return ", ".join(f"{place}: {count} times" for place, count in sorted(waits.items()))


# --- jobs --------------------------------------------------------------------------------------------


def side_by_side(
    *starts: Callable[[], JobRun], meanwhile: Callable[[JobRun], object] = lambda run: None
) -> list[RunOutcome | RunFailed]:
    """Start jobs, call ``meanwhile`` with each, and return each job's outcome or failure."""
    with ExitStack() as stack:
        runs = [stack.enter_context(start()) for start in starts]
        for run in runs:
            with suppress(RunFailed):  # the job's end reports the failure too
                meanwhile(run)
        return [ended(run) for run in runs]


def ended(run: JobRun) -> RunOutcome | RunFailed:
    """Return a job's outcome or failure."""
    try:
        return outcome(run, JOB_S)
    except RunFailed as error:
        return error


def started_plain(folder: Path, device: str, *options: str) -> JobRun:
    """Start the small job, without dropout unless its ``options`` say otherwise."""
    return one_host(device, JOB_S).run(folder, "--device", device, "--dropout", "0", *options)


def started_gpt(folder: Path, device: str, *more: str) -> JobRun:
    """Start scripts/train_gpt.py in four processes on one device."""
    started = one_host(device, JOB_S)
    overrides = [*SMALL_GPT, "topology.stages=2", "topology.replicas=2", *more, f"run_dir={folder.resolve()}"]
    return JobRun(folder, [*started.command, str(training_script()), *overrides], started.variables)


def alike(
    name: str, here: RunOutcome | RunFailed, there: RunOutcome | RunFailed, tolerance: float, folder: Path
) -> Row:
    """Return whether a job trained the same on its device as on the CPU."""
    for one in (here, there):
        if isinstance(one, RunFailed):
            return failed(name, one, folder)
    apart = difference(here, there)
    wrong = "" if apart <= tolerance else f"losses differ from the CPU's by {apart:.2g}, and {tolerance:g} is allowed"
    return judged(name, wrong, f"losses as on the CPU, at most {apart:.2g} apart", MEND, difference=apart)


def refused(name: str, error: RunFailed) -> Row | None:
    """Return a row with the plugin's refusal, or None if the job failed for another reason."""
    lines = [line for line in str(error).splitlines() if name in line and REFUSED in line]
    return Row(name, None, f"refused: {name}{lines[-1].partition(name)[2]}") if lines else None


# --- a survivor's context ----------------------------------------------------------------------------


def context(place: StagePlace) -> list[Row]:
    """Try what a process can do on a device after another process was killed there while it computed."""
    command = [sys.executable, str(Path(__file__).with_name("context_worker.py")), place.device]
    with process([*command, "serve"]) as survivor, process([*command, "burn"]) as victim:
        rows = []
        try:
            for one in (survivor, victim):
                _said(one)
            before = _asked(survivor, "memory")
            victim.kill()
            victim.wait(ANSWER_S)
            total, whole = _asked(survivor, "compute"), SIZE**3
            rows.append(judged("computes", "" if total == whole else f"{total} instead of {whole}", "as before", MEND))
            ones = _asked(survivor, "allocate")
            rows.append(judged("allocates and frees", "" if ones == BLOCK else f"{ones} of {BLOCK}", "as before", MEND))
            freed = before - _asked(survivor, "memory")  # on a CPU the number includes all processes
            text = "not asked on a CPU" if place.rehearsal else f"{freed / (1 << 20):.0f} MiB came back"
            rows.append(Row("memory", None, text, figures={} if place.rehearsal else {"bytes": freed}))
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return [*rows, Row("survivor", False, f"it has not answered: {error}", MEND)]
    return rows


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen]:
    """Start a process with pipes to and from it, and kill it at the end."""
    made = subprocess.Popen(
        command, env=on_device(command[-2]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    try:
        yield made
    finally:
        made.kill()
        made.wait(ANSWER_S)
        for end in (made.stdin, made.stdout):
            end.close()


def _asked(survivor: subprocess.Popen, what: str) -> int:
    survivor.stdin.write(f"{what}\n".encode())
    return _said(survivor)


def _said(one: subprocess.Popen) -> int:
    """Return the number in the next line. Raises ValueError if none arrives in time, or the process has ended."""
    if not select.select([one.stdout], [], [], ANSWER_S)[0]:
        raise ValueError(f"nothing in {ANSWER_S:g} s")
    line = one.stdout.readline().decode()
    if not line:
        raise ValueError(f"it has ended with {one.wait(ANSWER_S)}")
    return int(line.split()[-1])
