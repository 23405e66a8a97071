#!/usr/bin/env python
"""The cost of a step of sharded replicas: ZeRO inside 2 replicas of 2 ranks, beside stock ZeRO over all 4 ranks.

    scripts/bench_sharded.py [--stage 3] [--layers 8] [--hidden 512] [--pairs 12] [--window 8] [--out DIR]

The same model, batch and optimizer, real compute, fp32. Both jobs run, and have the machine in turn for a window of
some seconds. Each pair of windows gives a ratio of step times; the result is the median, with its 95% interval by
bootstrap. The table also has the time of a script's three calls (the forward includes the wait for the slowest rank),
and the memory of all processes of each job. There is no target: this is the price of moving from hybrid sharding.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from recycle_plugin.lab.experiments import turns
from recycle_plugin.lab.experiments.bench_scripts import DEADLINE_S, run_part, script
from recycle_plugin.lab.experiments.turns import Window, interval, step_s, take_turns
from recycle_plugin.lab.runs import JobRun, environment
from recycle_plugin.launch import free_port
from recycle_plugin.observability.event_log import read_events

RANKS, REPLICAS = 4, 2
STARTED = 5  # both jobs are past this step before they take turns
STOCK, OURS = "stock", "replicas"
CALLS = ("forward_s", "backward_s", "step_s")
JOB = "BENCH_SHARDED"  # the environment variable with a rank's part


def main(arguments: list[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO's")
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--hidden", type=int, default=512)
    made.add_argument("--samples", type=int, default=32, help="samples of a micro-batch")
    made.add_argument("--accumulation", type=int, default=2, help="micro-batches of a rank in a step")
    made.add_argument("--pairs", type=int, default=12, help="windows of each job")
    made.add_argument("--window", type=float, default=8.0, metavar="S", help="seconds of a window")
    made.add_argument("--out", type=Path, default=Path("runs/bench_sharded"), metavar="DIR")
    found = made.parse_args(arguments)
    found.part = f"zero{found.stage}"
    return run_part({found.part: compared}, found)


def compared(found: argparse.Namespace) -> dict:
    """Run both in turn. Raises TooShort if windows are too short for the steps."""
    shape = {name: getattr(found, name) for name in ("stage", "layers", "hidden", "samples", "accumulation")}
    with ExitStack() as stack:
        jobs, memory = {}, {}
        for kind in (STOCK, OURS):
            jobs[kind] = run = stack.enter_context(started(found.out / f"{found.part}-{kind}", kind, shape))
            run.wait_for(lambda: len(steps_of(run)) >= STARTED, f"step {STARTED}", DEADLINE_S)
            turns.pause(run)
            memory[kind] = turns.memory_bytes(run)
        windows = take_turns(jobs, found.pairs, found.window)
        steps = {kind: steps_of(run) for kind, run in jobs.items()}
    return judged(windows, steps, memory)


def started(folder: Path, kind: str, shape: Mapping[str, int]) -> JobRun:
    """Start a job of this kind under DeepSpeed's launcher."""
    folder = folder.resolve()
    (folder / "steps.jsonl").unlink(missing_ok=True)
    module = ["--module", "recycle_plugin.launch"] if kind == OURS else []
    command = ["deepspeed", "--num_gpus", str(RANKS), "--master_port", str(free_port()), *module]
    told = json.dumps({**shape, "kind": kind, "folder": str(folder)})
    return JobRun(folder, [*command, str(Path(__file__).resolve())], environment(**{JOB: told}))


def steps_of(run: JobRun) -> list[dict]:
    """Return what the first rank has written of each step."""
    path = run.folder / "steps.jsonl"
    return read_events(path) if path.exists() else []


def judged(
    windows: Mapping[str, Sequence[Window]], steps: Mapping[str, Sequence[Mapping]], memory: Mapping[str, int]
) -> dict:
    """Return the result, from each job's times with the machine, its steps, and the bytes of its processes."""
    ends = {kind: [step["time"] for step in each] for kind, each in steps.items()}
    each = {kind: [step_s(window, ends[kind]) for window in of] for kind, of in windows.items()}
    ratios = [ours / stock for ours, stock in zip(each[OURS], each[STOCK])]
    low, high = interval(ratios)
    calls = {}
    for kind, of in windows.items():
        inside = [step for step in steps[kind] if any(one.began <= step["time"] <= one.ended for one in of)]
        calls[kind] = {call: median(step[call] for step in inside) for call in CALLS}
        print(
            f"{kind:>8}: step {median(each[kind]):.4f} s; forward {calls[kind]['forward_s']:.4f}, backward "
            f"{calls[kind]['backward_s']:.4f}, step {calls[kind]['step_s']:.4f} s; {memory[kind] / 2**20:.0f} MiB"
        )
    print(f"ratio {median(ratios):.3f}, 95% interval {low:.3f} to {high:.3f}, of {len(ratios)} pairs of windows")
    result = {"step_s": each, "ratios": ratios, "ratio": median(ratios), "interval": [low, high], "met": True}
    return result | {"calls": calls, "memory_bytes": dict(memory)}


# --- a rank --------------------------------------------------------------------------------------------


def train(job: Mapping) -> None:
    """Train until this process is ended, as any DeepSpeed script; the first rank writes a line for each step."""
    import deepspeed
    import torch
    from torch import nn

    from recycle_plugin.patches import deepspeed_cpu

    deepspeed_cpu.apply()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    width = job["hidden"]
    layers = [each for _ in range(job["layers"]) for each in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(job))
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    lines = (Path(job["folder"]) / "steps.jsonl").open("w", buffering=1) if os.environ["RANK"] == "0" else None
    taken = dict.fromkeys(CALLS, 0.0)
    while True:
        inputs, before = torch.randn(job["samples"], width, generator=generator), engine.global_steps
        marks = [time.perf_counter()]
        loss = nn.functional.mse_loss(engine(inputs), inputs.flip(1))
        marks.append(time.perf_counter())
        engine.backward(loss)
        marks.append(time.perf_counter())
        engine.step()
        marks.append(time.perf_counter())
        for call, begun, ended in zip(CALLS, marks, marks[1:]):
            taken[call] += ended - begun
        if engine.global_steps > before:
            if lines is not None:
                lines.write(json.dumps({"event": "step", "time": time.time(), "text": "", **taken}) + "\n")
            taken = dict.fromkeys(CALLS, 0.0)


def config(job: Mapping) -> dict:
    """Return DeepSpeed's config, with the plugin's section in one of the two jobs."""
    own = {"enabled": True, "unit": "replica", "replicas": REPLICAS, "run_dir": job["folder"], "report": False}
    return {
        "train_micro_batch_size_per_gpu": job["samples"],
        "gradient_accumulation_steps": job["accumulation"],
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": job["stage"]},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
        **({"recycle": own} if job["kind"] == OURS else {}),
    }


if __name__ == "__main__":
    if JOB in os.environ:
        train(json.loads(os.environ[JOB]))
    else:
        script(main)
