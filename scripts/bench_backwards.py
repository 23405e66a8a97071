#!/usr/bin/env python
"""The processor time of F, I and W of a last stage, with a split and with a whole backward, beside plain torch.

scripts/bench_backwards.py

One process, fp32. Each micro-batch is run in all three ways, one after the other; printed are medians.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from bench_instructions import SAMPLES, TOKENS, WIDTH, Block
from torch import nn

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.randomness import key, keyed
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import LoadedBatch, Stage

ONE, WARM_UP = MicroBatch(0, 0), 5
HALVES = Instruction(Op.I, 1, ONE), Instruction(Op.W, 1, ONE)  # of a program in which a whole backward is chosen
MODELS = {"two Linears": (2, False, 400), "24 Linears": (24, False, 150), "six transformer blocks": (6, True, 40)}


def main() -> None:
    torch.set_num_threads(1)
    for name, (layers, blocks, number) in MODELS.items():
        module = nn.Sequential(*[Block() if blocks else nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        model = StageModel(module, nn.functional.mse_loss, 1, False, True, CPU)
        stage = Stage(model, DeferredWeights(module), lambda one, step, half: keyed(key(0, step, one, 1, half), CPU))
        shape = (SAMPLES, TOKENS, WIDTH) if blocks else (SAMPLES, WIDTH)
        x, y = torch.randn(shape), torch.randn(shape)
        rows = [
            (stock(module, x, y), split(stage, step, x, y, ()), split(stage, step, x, y, HALVES))
            for step in range(1, number + WARM_UP)
        ][WARM_UP:]
        plain, halves, whole = ([median(each) / 1000 for each in zip(*of)] for of in zip(*rows))
        print(f"{name}, µs: plain torch {plain[0]:.0f}", end="")
        for what, took in (("split", halves), ("whole", whole)):
            print(f"; {what} F {took[0]:.0f}, I {took[1]:.0f}, W {took[2]:.0f}, sum {sum(took):.0f}", end="")
        print(flush=True)


def split(stage: Stage, step: int, x: torch.Tensor, y: torch.Tensor, program: tuple[Instruction, ...]) -> list[int]:
    """Return the nanoseconds of F, I and W in ``program``."""
    assert stage.choice is not None, "its backwards can be split"
    stage.choice.begin(StepProgram(step, program, resumed=True))
    inputs, times = (x.clone(),), [time.thread_time_ns()]
    _, stash, _ = stage.forward((step, ONE), LoadedBatch(None, y), inputs)
    times.append(time.thread_time_ns())
    _, inner = stage.backward_input((step, ONE), stash, None)
    times.append(time.thread_time_ns())
    stage.backward_weight((step, ONE), inner)
    times.append(time.thread_time_ns())
    return [end - begin for begin, end in zip(times, times[1:])]


def stock(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[int]:
    """Return the nanoseconds of a forward and its backward."""
    inputs, began = x.clone().requires_grad_(), time.thread_time_ns()
    nn.functional.mse_loss(module(inputs), y).backward()
    return [time.thread_time_ns() - began]


if __name__ == "__main__":
    main()
