#!/usr/bin/env python
"""The processor time of a step with each of undo, checkpoints, log, hashes, trace and metrics, and with all of them.

scripts/bench_features.py                              # gpt_tiny, PP 2 x DP 2, real compute
scripts/bench_features.py --pairs 20 model.layers=4    # more windows, and Hydra overrides for all jobs

A job without any of them, one with each, and one with all run side by side. Each has the machine for a window of some
seconds while the others are stopped. In each round the processor time of all processes of a job, by step, is divided by
that of the job without; printed are the medians with their 95% intervals by bootstrap. Target of all together: at most
1.02. A log needs checkpoints and hashes need an exact undo, so their jobs have both.
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

TARGET = 1.02
STARTED = 5  # all jobs are past this step before they take turns
PAIRS, WINDOW_S = 10, 6.0
COMMON = ("model=gpt_tiny", "topology=pp2_dp2", "recycle.enabled=true", "steps=1000000", "report_every=0")
OFF, ALL = "none", "all"
CHECKPOINT = "recycle.checkpoint={overhead: 0.035}"
UNDO, WITHOUT = "recycle.undo=snapshot", "recycle.undo=inverse"  # the latter keeps no copy
FEATURES = {
    "undo": (UNDO,),
    "checkpoint": (CHECKPOINT,),
    "log": (CHECKPOINT, "recycle.log={folder: FOLDER}"),
    "hashes": (UNDO, "recycle.check_replicas=10"),
    "trace": ("recycle.trace=true",),
    "metrics": ("recycle.metrics=127.0.0.1:0",),
}


def main(arguments: list[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("overrides", nargs="*", metavar="key=value", help="further Hydra overrides for all jobs")
    made.add_argument("--pairs", type=int, default=PAIRS, help=f"windows of each job (default {PAIRS})")
    made.add_argument("--window", type=float, default=WINDOW_S, metavar="S", help=f"seconds (default {WINDOW_S:g})")
    made.add_argument("--out", type=Path, default=Path("runs/bench_features"), metavar="DIR")
    made.set_defaults(part="features")
    return run_part({"features": compared}, made.parse_args(arguments))


def compared(found: argparse.Namespace) -> dict:
    """Run all jobs, and judge. Raises TooShort if windows are too short for the steps."""
    log = (found.out / "log").resolve()
    jobs: dict[str, TrainingRun] = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, log, True)
        for kind, own in kinds().items():
            told = [each.replace("FOLDER", str(log / kind)) for each in own]
            run = stack.enter_context(TrainingRun(found.out / kind, 4, [*COMMON, *found.overrides, *told]))
            jobs[kind] = run
            run.wait_for(lambda: run.committed() >= STARTED, f"step {STARTED}", DEADLINE_S)
            turns.pause(run)
        windows = take_turns(jobs, found.pairs, found.window)
        events = {kind: run.events() for kind, run in jobs.items()}
    commits = {
        kind: [event["time"] for event in told if event["event"] == "committed"] for kind, told in events.items()
    }
    broken = [event["text"] for told in events.values() for event in told if event["event"] == "log_broken"]
    return judged(windows, commits, broken)


def kinds() -> dict[str, list[str]]:
    """Return the overrides of each job by its name."""
    of_all = sorted({one for own in FEATURES.values() for one in own})
    features = {name: [*[WITHOUT] * (UNDO not in own), *own] for name, own in FEATURES.items()}
    return {OFF: [WITHOUT], **features, ALL: of_all}


def judged(
    windows: Mapping[str, Sequence[Window]], commits: Mapping[str, Sequence[float]], broken: Sequence[str]
) -> dict:
    """The result from when each job had the machine and when its steps were committed; ``broken``: events of a log that
    could not keep up; any of them voids the verdict.
    """
    cpu = {
        kind: [step_s(each, commits[kind]) * each.cpu_s / (each.ended - each.began) for each in windows[kind]]
        for kind in windows
    }
    ratios = {kind: [on / off for on, off in zip(each, cpu[OFF])] for kind, each in cpu.items() if kind != OFF}
    print(f"processor time of a step, all processes: {median(cpu[OFF]):.4f} s with none of them; with")
    for kind, each in ratios.items():
        low, high = interval(each)
        print(f"{kind:>12}: {median(each):.3f} times that (95% interval {low:.3f} to {high:.3f}; {len(each)} windows)")
    met = median(ratios[ALL]) <= TARGET and not broken
    print(f"target of all: at most {TARGET}: {'met' if met else 'NOT MET'}")
    for text in broken:
        print(f"the log could not follow: {text}")
    return {"cpu_s": cpu, "ratios": ratios, "broken": list(broken), "target": TARGET, "met": met}


if __name__ == "__main__":
    script(main)
