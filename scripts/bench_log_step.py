#!/usr/bin/env python
"""The cost of logging for a step: the same job with recycle.log and without, in alternating windows.

    scripts/bench_log_step.py emulated     # PP 2 x DP 2, layers that sleep, 50 MB/s logged by each worker
    scripts/bench_log_step.py real         # PP 2 x DP 2, gpt_tiny, at its model's rate

Each job has the machine for a window of some seconds while the other is stopped. Each pair of windows gives a ratio of
step times. The verdict is on the median of these ratios, with its 95% interval by bootstrap. Target: at most 1.02.
Both jobs make checkpoints, at the same overhead, since a log needs them; steps with a checkpoint count like all others.
There are two replicas, since a job without replicas is refused if it does not log.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from recycle_plugin.lab.experiments import turns
from recycle_plugin.lab.experiments.bench_scripts import DEADLINE_S, run_part, script
from recycle_plugin.lab.experiments.turns import Window, interval, step_s, take_turns
from recycle_plugin.lab.runs import TrainingRun
from recycle_plugin.runtime.log.reader import LogReader, runs

TARGET = 1.02
STARTED = 5  # both jobs are past this step before they take turns
PAIRS, WINDOW_S = 16, 6.0
MICRO_BATCHES, SAMPLES, LAYER_MS = 4, 64, 20.0
STEP_S = 0.32  # of the emulated job, roughly: two stages, four micro-batches
COMMON = ("topology=pp2_dp2", "recycle.enabled=true", "recycle.checkpoint={overhead: 0.01}", "steps=1000000")
OFF, ON = "without", "with"


def main(arguments: list[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("part", choices=sorted(PARTS))
    made.add_argument("--pairs", type=int, default=PAIRS, help=f"windows of each kind (default {PAIRS})")
    made.add_argument("--window", type=float, default=WINDOW_S, metavar="S", help=f"seconds (default {WINDOW_S:g})")
    made.add_argument("--mb-per-s", type=float, default=50.0, help="with emulated: a worker's rate (default 50)")
    made.add_argument(
        "--folder", type=Path, help="the log's folder, on a disk that sustains the rate (default: in --out)"
    )
    made.add_argument("--out", type=Path, default=Path("runs/bench_log_step"), metavar="DIR")
    return run_part(PARTS, made.parse_args(arguments))


def emulated(found: argparse.Namespace) -> dict:
    """Every worker sends one tensor of each micro-batch of its replica in a step."""
    width = round(found.mb_per_s * 1e6 * STEP_S / (MICRO_BATCHES * SAMPLES * 4))
    job = ["model=emulated", "optimizer=adam", f"model.width={width}", f"micro_batch_size={SAMPLES}"]
    return compared(found, [*job, *(f"model.{name}_ms={LAYER_MS:g}" for name in ("forward", "input", "weight"))])


def real(found: argparse.Namespace) -> dict:
    """A small GPT, four processes that compute."""
    return compared(found, ["model=gpt_tiny"])


PARTS = {"emulated": emulated, "real": real}


def compared(found: argparse.Namespace, job: Sequence[str]) -> dict:
    """Run both, and judge. Raises TooShort if windows are too short for the steps."""
    log = (found.folder or found.out / f"{found.part}-{ON}" / "log").resolve()
    kinds = {OFF: [], ON: [f"recycle.log={{folder: {log}}}"]}
    shutil.rmtree(log, ignore_errors=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, log, True)
        jobs = {}
        for kind, more in kinds.items():
            folder = found.out / f"{found.part}-{kind}"
            run = stack.enter_context(TrainingRun(folder, 4, [*COMMON, *job, *more, "report_every=0"]))
            jobs[kind] = run
            run.wait_for(lambda: run.committed() >= STARTED, f"step {STARTED}", DEADLINE_S)
            turns.pause(run)
        windows = take_turns(jobs, found.pairs, found.window)
        rate = logged_bytes(log)
        events = {kind: run.events() for kind, run in jobs.items()}
    commits = {
        kind: [event["time"] for event in told if event["event"] == "committed"] for kind, told in events.items()
    }
    broken = [event["text"] for event in events[ON] if event["event"] == "log_broken"]
    return judged(windows, commits, rate, broken)


def judged(
    windows: Mapping[str, Sequence[Window]],
    commits: Mapping[str, Sequence[float]],
    rate: Mapping[str, int],
    broken: Sequence[str],
) -> dict:
    """The result from when each run had the machine and when its steps were committed; ``rate``: bytes of a step that
    each worker has logged, ``broken``: events of a log that could not keep up; any of them voids the verdict.
    """
    each = {kind: [step_s(window, commits[kind]) for window in windows[kind]] for kind in windows}
    ratios = [on / off for on, off in zip(each[ON], each[OFF])]
    low, high = interval(ratios)
    usual = median(each[OFF])
    rates = {worker: size / usual / 1e6 for worker, size in rate.items()}
    cpu = {
        kind: median(each[kind][at] * window.cpu_s / (window.ended - window.began) for at, window in enumerate(of))
        for kind, of in windows.items()
    }
    met = median(ratios) <= TARGET and not broken
    print(
        f"step {usual:.4f} s without and {median(each[ON]):.4f} s with the log, medians of {len(ratios)} windows\n"
        f"logged by each worker, MB/s: {', '.join(f'{name}: {each:.1f}' for name, each in rates.items())}\n"
        f"processor time of a step, all processes: {cpu[OFF]:.4f} s without and {cpu[ON]:.4f} s with the log\n"
        f"ratio {median(ratios):.4f}, 95% interval {low:.4f} to {high:.4f}; target at most {TARGET}: "
        f"{'met' if met else 'NOT MET'}, and the interval {'has' if low <= TARGET <= high else 'has not'} the target "
        "in it"
    )
    for text in broken:
        print(f"the log could not follow: {text}")
    return {
        "step_s": each,
        "ratios": ratios,
        "ratio": median(ratios),
        "interval": [low, high],
        "mb_per_s": rates,
        "cpu_s": cpu,
        "broken": list(broken),
        "target": TARGET,
        "met": met,
    }


def logged_bytes(folder: Path) -> dict[str, int]:
    """Return the most bytes that each worker has logged of one step."""
    (job,) = runs(folder)
    found: dict[str, int] = {}
    for worker, segments in LogReader(folder, job).segments.items():
        sizes: dict[int, int] = {}
        for entry in (entry for segment in segments for entry in segment.entries):
            sizes[entry.step] = sizes.get(entry.step, 0) + entry.size
        found[f"rank {worker.rank}"] = max(sizes.values(), default=0)
    return found


if __name__ == "__main__":
    script(main)
