"""Processor time of the training thread, by kind of instruction, beside stock DeepSpeed's pipeline; a part of
scripts/bench_step.py.

Two stages of two replicas, fp32, 8 micro-batches.  A rank runs this file, with its job in the environment, as any
script of DeepSpeed's. It sums up the seconds of ``time.thread_time`` between one instruction and the next. Both jobs
have the machine in turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

JOB = "BENCH_INSTRUCTIONS"  # the environment variable with a rank's part
MICRO_BATCHES, WIDTH, TOKENS, SAMPLES = 8, 64, 16, 4
MODELS = {"two Linears a stage": 2, "24 Linears a stage": 24, "six transformer blocks a stage": 6}
TARGETS = {"two Linears a stage": 1.2, "24 Linears a stage": 1.3, "six transformer blocks a stage": 1.3}
MOVES = ("SA", "RA", "SG", "RG", "LOAD")
ONCE = {"TIE": "REDUCE", "VALIDATE": "STEP"}  # in a step, and stock's instructions for them
PAIRS, WINDOW_S, STARTED, COUNTED = 6, 4.0, 5, 10


def instructions(out: Path, recycle: Mapping[str, Any], rounds: int | None) -> dict:
    """Print and return the table: µs of each micro-batch and step, and our calls by instruction."""
    result: dict = {"met": True}
    for model, target in TARGETS.items():
        figures, counts = measured(out, model, recycle, rounds or PAIRS)
        ratio = figures["ours"]["micro-batch"] / figures["stock"]["micro-batch"]
        result[model] = figures | {"ratio": ratio, "target": target, "calls": counts}
        result["met"] &= ratio <= target
        print(f"{model}: micro-batch {ratio:.2f} times stock, target at most {target}")
        for kind, of in figures.items():
            print(f"  {kind:>5} µs: {', '.join(f'{name} {value:.0f}' for name, value in of.items())}")
        shown = (f"{op} {' / '.join(f'{value:.0f}' for value in each)}" for op, each in counts.items())
        print(f"  our calls / changes of file / context managers: {', '.join(shown)}", flush=True)
    return result


def measured(out: Path, model: str, recycle: Mapping[str, Any], rounds: int) -> tuple[dict, dict]:
    """Return µs by measured part, of stock and of ours, medians over ranks and steps; and an instruction's calls."""
    from recycle_plugin.lab.experiments import turns
    from recycle_plugin.lab.experiments.bench_scripts import DEADLINE_S

    with ExitStack() as stack:
        jobs = {}
        for kind in ("stock", "ours", "counted"):
            folder = out / f"instructions-{MODELS[model]}-{kind}"
            jobs[kind] = run = stack.enter_context(started(folder, kind, model, recycle))
            run.wait_for(lambda: len(steps_of(run)) >= STARTED, f"step {STARTED}", DEADLINE_S)
            if kind == "counted":
                run.wait_for(lambda: (run.folder / "calls.json").exists(), "its calls", DEADLINE_S)
            turns.pause(run)
        counts = json.loads((jobs.pop("counted").folder / "calls.json").read_text())
        turns.take_turns(jobs, rounds, WINDOW_S)
        return {kind: medians(steps_of(run)[STARTED:]) for kind, run in jobs.items()}, counts


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return µs of a micro-batch, of its F, I and W (or B) and transfers, and of REDUCE and STEP."""
    found = {}
    for name in ("micro-batch", "F", "I", "W", "B", "moves", "between", "REDUCE", "STEP"):
        share = 1 if name in ("REDUCE", "STEP") else MICRO_BATCHES
        found[name] = 1e6 * median(step.get(name, 0.0) for step in steps) / share
    return {name: value for name, value in found.items() if value}


def started(folder: Path, kind: str, model: str, recycle: Mapping[str, Any]) -> Any:
    """Start a job of this kind under DeepSpeed's launcher."""
    from recycle_plugin.lab.runs import JobRun, environment
    from recycle_plugin.launch import free_port

    folder = folder.resolve()
    for stale in folder.glob("*.json*"):
        stale.unlink()
    module = [] if kind == "stock" else ["--module", "recycle_plugin.launch"]
    command = ["deepspeed", "--num_gpus", "4", "--master_port", str(free_port()), *module]
    told = json.dumps({"kind": kind, "model": model, "folder": str(folder), "recycle": dict(recycle)})
    return JobRun(folder, [*command, str(Path(__file__).resolve())], environment(**{JOB: told}))


def steps_of(run: Any) -> list[dict]:
    """Return what all ranks have written of each step."""
    lines = (line for path in run.folder.glob("rank*.jsonl") for line in path.read_text().split("\n")[:-1])
    return [json.loads(line) for line in lines]


# --- a rank --------------------------------------------------------------------------------------------


class Spent:
    """Seconds of this thread by kind of instruction, each until the next one begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.now, self._since = "between", time.thread_time()

    def begin(self, kind: str) -> None:
        now = time.thread_time()
        self.seconds[self.now] += now - self._since
        self.now, self._since = kind, now

    def taken(self) -> dict[str, float]:
        """Return and forget the seconds of a finished step."""
        self.begin("between")
        for kind, other in ONCE.items():
            self.seconds[other] += self.seconds.pop(kind, 0.0)
        found, self.seconds = self.seconds, defaultdict(float)
        whole = sum(seconds for kind, seconds in found.items() if kind not in ("REDUCE", "STEP"))
        moves = sum(found.pop(kind, 0.0) for kind in MOVES)
        return {**found, "moves": moves, "micro-batch": whole}


class Calls:
    """The thread's calls of our functions in each kind of instruction."""

    def __init__(self) -> None:
        import recycle_plugin

        self._ours = str(Path(recycle_plugin.__file__).parent)
        self.kind, self._file = "between", ""
        self.instructions: Counter[str] = Counter()
        self.calls, self.changes, self.contexts = Counter[str](), Counter[str](), Counter[str]()

    def begin(self, kind: str) -> None:
        sys.setprofile(None)
        self.kind = kind
        self.instructions[kind] += 1
        sys.setprofile(self._called)

    def _called(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "__enter__":
            self.contexts[self.kind] += 1
        if event == "call" and code.co_filename.startswith(self._ours):
            self.calls[self.kind] += 1
            self.changes[self.kind] += code.co_filename != self._file
            self._file = code.co_filename

    def each(self) -> dict[str, tuple[float, ...]]:
        """Return calls, changes of file, and context managers of an instruction, by kind."""
        sys.setprofile(None)
        counted = self.calls, self.changes, self.contexts
        return {
            kind: tuple(each[kind] / number for each in counted)
            for kind, number in self.instructions.items()
            if kind != "between"
        }


def watch_ours(begin: Any) -> None:
    """Call ``begin(kind)`` at each instruction that a worker of the plugin runs."""
    from recycle_plugin.core.worker import worker

    names: dict[str, Any] = vars(worker)
    run = names["execute"]

    def told(program: Iterable[Any]) -> Iterator[Any]:
        for instruction in program:
            begin(instruction.op.value)
            yield instruction
        begin("between")

    def execute(seat: Any, program: Iterable[Any], world: Any) -> Iterator[Any]:
        return run(seat, told(program), world)

    names["execute"] = execute


def watch_stock(begin: Any) -> None:
    """Do the same at each instruction of stock DeepSpeed's pipeline."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    names = {"OptimizerStep": "STEP", "ReduceGrads": "REDUCE", "ReduceTiedGrads": "TIE", "LoadMicroBatch": "LOAD"}
    names |= {"ForwardPass": "F", "BackwardPass": "B", "SendActivation": "SA", "RecvActivation": "RA"}
    names |= {"SendGrad": "SG", "RecvGrad": "RG"}

    def watched(kind: str, run: Any) -> Any:
        def told(self: Any, *arguments: Any, **named: Any) -> Any:
            begin(kind)
            return run(self, *arguments, **named)

        return told

    table = PipelineEngine._INSTRUCTION_MAP
    PipelineEngine._INSTRUCTION_MAP = {each: watched(names[each.__name__], run) for each, run in table.items()}


def train(job: Mapping[str, Any]) -> None:
    """Train until this process is ended; every rank writes a line for each step."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from torch import nn

    from recycle_plugin.patches import deepspeed_cpu

    deepspeed_cpu.apply()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    made = MODELS[job["model"]]
    one = Block if "blocks" in job["model"] else lambda: nn.Linear(WIDTH, WIDTH)
    model = PipelineModule([one() for _ in range(2 * made)], num_stages=2, loss_fn=nn.functional.mse_loss)
    spent, calls = Spent(), Calls() if job["kind"] == "counted" else None
    (watch_stock if job["kind"] == "stock" else watch_ours)(spent.begin if calls is None else calls.begin)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(job))
    shape = (SAMPLES, TOKENS, WIDTH) if "blocks" in job["model"] else (SAMPLES, WIDTH)
    batch = torch.randn(shape), torch.randn(shape)
    data, number = iter(lambda: batch, None), 0
    with Path(job["folder"], f"rank{os.environ['RANK']}.jsonl").open("w", buffering=1) as lines:
        while True:
            engine.train_batch(data_iter=data)
            number += 1
            lines.write(json.dumps(spent.taken()) + "\n")
            if calls is not None and number == STARTED + COUNTED and os.environ["RANK"] == "0":
                Path(job["folder"], "calls.json").write_text(json.dumps(calls.each()))


def config(job: Mapping[str, Any]) -> dict:
    """Return DeepSpeed's config, with the plugin's section in one of the two jobs."""
    own = {"enabled": True, "run_dir": job["folder"], "report": False, **job["recycle"]}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 1_000_000,
        **({} if job["kind"] == "stock" else {"recycle": own}),
    }


def Block() -> Any:
    """A transformer block without dropout, of activations [samples, tokens, width]."""
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.behind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            heads = self.before(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            return self.behind(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    class Residual(nn.Module):
        def __init__(self, *inner: nn.Module) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(WIDTH), *inner)

        def forward(self, x: Any) -> Any:
            return x + self.inner(x)

    mlp = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(Residual(Attention()), Residual(*mlp))


if __name__ == "__main__":
    train(json.loads(os.environ[JOB]))
