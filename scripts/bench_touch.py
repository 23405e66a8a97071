#!/usr/bin/env python
"""What it costs that a script's calls of torch are looked at between steps: microseconds of this thread's time, least
of several runs.

scripts/bench_touch.py [--tensors 300]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from recycle_plugin.runtime.state.touch import FirstTouch

CALLS, RUNS = 20_000, 15


def least_us(function: Callable[[], object], calls: int = CALLS) -> float:
    """Of one call; in the thread's own time, since other programs use the cores too."""
    times = []
    for _ in range(RUNS):
        start = time.thread_time()
        for _ in range(calls):
            function()
        times.append(time.thread_time() - start)
    return min(times) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tensors", type=int, default=300, help="that a step changes: 3 a parameter with Adam (default 300)"
    )
    tensors = [torch.zeros(8, 8) for _ in range(parser.parse_args().tensors)]
    committed = [False]

    def settle() -> None:
        with touch.lifted():
            committed[0] = True

    touch = FirstTouch(lambda: tensors, lambda: committed[0], settle)
    small, loss = torch.ones(4, 4), torch.tensor(1.0)
    calls = {"loss.item()": loss.item, "torch.neg of 16 numbers": lambda: torch.neg(small)}

    def step() -> None:
        with touch.lifted():
            committed[0] = False

    def logged() -> None:
        step()
        loss.item()

    def report(what: str) -> None:
        print(f"{what:<48}" + "".join(f"{name}: {least_us(function):6.2f} us   " for name, function in calls.items()))

    report("no step is open")
    step()
    report("one is, and nothing was touched")
    tensors[0].sum()
    report("after the touch, until the next train_batch()")
    print(f"each step, with a loss that is logged and {len(tensors)} tensors: {least_us(logged, 200):.0f} us")
    settle()


if __name__ == "__main__":
    main()
