#!/usr/bin/env python
"""The ways of taking a step back, for each optimizer: what they hold, what they cost, and what comes back.

    scripts/bench_undo.py [optimizer ...] [--parameters MILLIONS] [--rounds N] [--json FILE]

Without names all optimizers.  Costs are medians of CPU seconds on one thread, in units of the optimizer's own
step (torch's default implementation for the CPU).  Errors are the largest over all elements, in fp32: of
parameters and moments after a step and its undo (p, m, v); of parameters after the step was done again with
the same gradient, against its first try (p redone: what recovery does); and after a step with an ordinary
gradient instead, against a run in which the undone step never was (p with another).  A spike is a gradient a
million times as large.

Here nobody else keeps the gradient, so that the inverse has a copy of it, which it has not in a job; and copies on the
host are not made while something computes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.state.undo import KINDS
from tests.support.optimizers import Lamb, Make, Subject

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=1e-4),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-3, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1),
    "lamb": lambda ps: Lamb(ps, lr=1e-3, weight_decay=0.01),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1, amsgrad=True),
}
WIDTH = 512  # a transformer layer of this width has 12 · WIDTH² weights, and 9 · WIDTH biases
WEIGHT, GRADIENT, SPIKE = 0.02, 0.01, 1e6  # standard deviations, and a factor
EARLIER = 20  # steps, so that moments are in their usual range
WARM_UP = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("optimizers", nargs="*", metavar="optimizer", help=f"any of {', '.join(OPTIMIZERS)}")
    parser.add_argument(
        "--parameters",
        type=float,
        default=6.3,
        metavar="MILLIONS",
        help="size of the model, in whole layers (default 6.3: two)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="steps that are timed (default 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here as well")
    found = parser.parse_args()
    if unknown := set(found.optimizers) - set(OPTIMIZERS):
        parser.error(f"no optimizer {', '.join(sorted(unknown))}: any of {', '.join(OPTIMIZERS)}")
    torch.set_num_threads(1)
    layers = max(1, round(found.parameters * 1e6 / (12 * WIDTH**2)))
    pairs = [(name, kind) for name in found.optimizers or OPTIMIZERS for kind in KINDS]
    costs = [cost(name, kind, layers, found.rounds) for name, kind in pairs]
    print_table(f"costs, {layers} layers of width {WIDTH}", costs)
    errors = [error(name, kind, spike) for name, kind in pairs for spike in (False, True)]
    print_table("errors, 1 layer", errors)
    if found.json:
        found.json.write_text(
            json.dumps({"layers": layers, "width": WIDTH, "costs": costs, "errors": errors}, indent=1) + "\n"
        )
    return 0


def subject(name: str, kind: str, layers: int) -> Subject:
    """After a few ordinary steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (3 * WIDTH, WIDTH),
        (WIDTH, WIDTH),
        (4 * WIDTH, WIDTH),
        (WIDTH, 4 * WIDTH),
        (3 * WIDTH,),
        (WIDTH,),
        (4 * WIDTH,),
        (WIDTH,),
    ] * layers
    made = Subject(
        OPTIMIZERS[name],
        kind,
        [torch.nn.Parameter(WEIGHT * torch.randn(shape, generator=generator)) for shape in shapes],
    )
    made.scheduler.gamma = 1.0
    for seed in range(EARLIER):
        made.step(made.random(seed, GRADIENT))
    return made


# --- costs ------------------------------------------------------------------------------------------


def cost(name: str, kind: str, layers: int, rounds: int) -> dict:
    """One step is done and taken back again and again."""
    row = {
        "optimizer": name,
        "undo": kind,
        "bytes a parameter": None,
        "before_step": None,
        "restore": None,
        "step ms": None,
    }
    try:
        used = subject(name, kind, layers)
    except RecycleError:
        return row | {"bytes a parameter": "refused"}
    for parameter, gradient in zip(used.parameters, used.random(99, GRADIENT)):
        parameter.grad = gradient
    times = [
        [seconds(call) for call in (used.undo.before_step, used.optimizer.step, used.undo.restore)]
        for _ in range(WARM_UP + rounds)
    ]
    before, step, restore = (median(column) for column in zip(*times[WARM_UP:]))
    held = used.undo.held_bytes / sum(parameter.numel() for parameter in used.parameters)
    return row | {
        "bytes a parameter": held,
        "before_step": before / step,
        "restore": restore / step,
        "step ms": 1000 * step,
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


# --- errors -----------------------------------------------------------------------------------------


def error(name: str, kind: str, spike: bool) -> dict:
    row = {"optimizer": name, "undo": kind, "gradient": "spike" if spike else "ordinary"}
    try:
        tried = subject(name, kind, 1)
    except RecycleError:
        return row | {"p": "refused"}
    gradients, others = tried.random(99, GRADIENT * (SPIKE if spike else 1)), tried.random(100, GRADIENT)
    kept = tried.state()
    tried.step(gradients)
    first = tried.state()
    tried.undo.restore()
    back = tried.state()
    row |= {
        "p": largest(back, kept),
        "p bit-equal": equal(back, kept),
        "m": largest(back, kept, "exp_avg", "momentum_buffer"),
        "v": largest(back, kept, "exp_avg_sq"),
    }
    tried.step(gradients)
    row["p redone"] = largest(tried.state(), first)
    tried.undo.restore()
    tried.step(others)
    straight = subject(name, "snapshot", 1)
    straight.step(others)
    return row | {"p with another": largest(tried.state(), straight.state())}


def tensors(state: dict, names: tuple[str, ...]) -> list[torch.Tensor]:
    """Parameters, or the named moments."""
    moments = [value for moments in state["state"].values() for name, value in moments.items() if name in names]
    return moments if names else state["parameters"]


def largest(a: dict, b: dict, *names: str) -> float | None:
    differences = [(x - y).abs().max().item() for x, y in zip(tensors(a, names), tensors(b, names), strict=True)]
    return max(differences) if differences else None


def equal(a: dict, b: dict) -> float:
    same = sum((x == y).sum().item() for x, y in zip(a["parameters"], b["parameters"], strict=True))
    return same / sum(x.numel() for x in a["parameters"])


# --- printing ---------------------------------------------------------------------------------------


def print_table(title: str, rows: list[dict]) -> None:
    names = max(rows, key=len)
    texts = [[text(row.get(name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *texts)]
    print(f"\n{title}")
    for line in [list(names), *texts]:
        print("  ".join(part.ljust(width) for part, width in zip(line, widths)).rstrip(), flush=True)


def text(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
