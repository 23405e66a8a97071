"""Random models of the grammar's pieces, what happens to them, and the journal in which hooks write what they have
seen.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recycle_plugin.core.vocabulary.ids import MicroBatch
from tests.support.grammar import BOUNDARIES, CAN_NOT_TRAVEL, DATA, LOSSES, NO_LOSSES, PIECES, REFUSED, WIDTH

REPLICAS, MICRO_BATCHES = 2, 2
BATCH = [MicroBatch(replica, index) for replica in range(REPLICAS) for index in range(MICRO_BATCHES)]
SEED = 11
HALVES = (torch.bfloat16, torch.float16)
MODES = ("split", "whole", "fused")  # F, I, W of converted layers; F, B of converted layers; F, B of stock layers


@dataclass(frozen=True)
class Model:
    """By names of the grammar.  In bf16 and fp16 there are fp32 masters."""

    stages: tuple[tuple[str, ...], ...]
    boundaries: tuple[str, ...] = ()
    data: str = "vectors"
    loss: str = "mean square"
    optimizer: str = "AdamW"
    habit: str = "none"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    frozen: int | None = None  # a stage that is not trained


@dataclass(frozen=True)
class Course:
    """What happens to it, drawn by ``seed``."""

    mode: str = "split"
    steps: int = 2
    seed: int = 0
    dies: bool = False  # one worker, in the middle of the last step
    again: bool = True  # bare forwards and input gradients, by any worker
    block: int | None = None  # exact mode, with blocks of so many micro-batches, all on one worker of each stage


class Journal:
    """What hooks and functions have seen, by step and micro-batch: in the forward (True), and after it."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, MicroBatch, bool], Counter] = defaultdict(Counter)
        self.now: tuple[int, MicroBatch, bool] | None = None  # None: what is run once more does not count
        self.again: set[tuple[int, MicroBatch, int]] = set()  # with the stage: forwards that were run several times

    def note(self, who: str, what: str, value: Tensor) -> None:
        if self.now is not None:
            self.entries[self.now][who, what, digest(value)] += 1

    def forget(self, step: int, micro_batch: MicroBatch, stage: int) -> None:
        for forward in (True, False):
            told = self.entries[step, micro_batch, forward]
            for entry in [entry for entry in told if stage_of(entry) == stage]:
                del told[entry]


def stage_of(entry: tuple[str, str, str]) -> int:
    return int(entry[0].partition(".")[0])


def digest(value: Tensor) -> str:
    value = value.detach().resolve_conj().contiguous() + 0  # zeros lose their sign
    return hashlib.blake2b(
        f"{value.dtype}{list(value.shape)}".encode() + bytes(value.reshape(-1).view(torch.uint8).numpy()), digest_size=6
    ).hexdigest()


class Stretch(nn.Module):
    """The layers of a stage, between what it takes and what it gives."""

    def __init__(self, model: Model, number: int, journal: Journal) -> None:
        super().__init__()
        first, last = number == 0, number == len(model.stages) - 1
        self.entry, self.exit = DATA[model.data].layer() if first else nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.take = (
            DATA[model.data].enter if first else BOUNDARIES.get(model.boundaries[number - 1], BOUNDARIES["a tensor"])[1]
        )
        self.give = (
            None if last else (BOUNDARIES.get(model.boundaries[number]) or CAN_NOT_TRAVEL[model.boundaries[number]])[0]
        )
        makers = [PIECES[name] if name in PIECES else REFUSED[name][0] for name in model.stages[number]]
        self.pieces = nn.ModuleList(
            make(partial(journal.note, f"{number}.{place} {name}"))
            for place, (make, name) in enumerate(zip(makers, model.stages[number]))
        )
        self.loss = (LOSSES[model.loss]() if model.loss in LOSSES else NO_LOSSES[model.loss][0]) if last else None

    def forward(self, given: Any) -> Any:
        hidden = self.take(self.entry, given)
        for piece in self.pieces:
            hidden = piece(hidden)
        return hidden if self.give is None else self.give(self.exit, hidden, given)


def build(model: Model, journal: Journal) -> list[Stretch]:
    torch.manual_seed(model.seed)
    made = [converted(Stretch(model, number, journal), model.dtype) for number in range(len(model.stages))]
    if model.frozen is not None:
        made[model.frozen].requires_grad_(False)
    return made


def converted(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return (
        module
        if dtype is torch.float32
        else module._apply(lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor)
    )


def typed(value: Any, dtype: torch.dtype) -> Any:
    if torch.is_tensor(value):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(typed(item, dtype) for item in value) if isinstance(value, (tuple, list)) else value


def batches(model: Model, step: int) -> dict[MicroBatch, tuple[Any, Tensor]]:
    made = {}
    for place, micro_batch in enumerate(BATCH):
        generator = torch.Generator().manual_seed(1000 * model.seed + 10 * step + place)
        made[micro_batch] = typed(
            (DATA[model.data].make(generator, 3 + place % 2), torch.randn((), generator=generator)), model.dtype
        )
    return made


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


# --- habits: what scripts do to a model between steps -----------------------------------------------

Habit = Callable[[nn.Module, int, dict], None]  # (module, step, what it remembers)


@torch.no_grad()
def clamp(module: nn.Module, step: int, memory: dict) -> None:
    for parameter in floating(module):
        parameter.clamp_(-0.5, 0.5)


@torch.no_grad()
def clamp_data(module: nn.Module, step: int, memory: dict) -> None:
    for parameter in floating(module):
        parameter.data = parameter.data.clamp(-0.5, 0.5)


@torch.no_grad()
def average(module: nn.Module, step: int, memory: dict) -> None:
    """Every other step the weights become their moving average."""
    for place, parameter in enumerate(floating(module)):
        kept = memory.setdefault(place, parameter.detach().clone()).mul_(0.5).add_(parameter, alpha=0.5)
        if step % 2:
            parameter.copy_(kept)


def evaluate(module: nn.Module, step: int, memory: dict) -> None:
    module.eval()


def floating(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.is_floating_point()]


HABITS: dict[str, Habit] = {
    "none": lambda *_: None,
    "clamp": clamp,
    "clamp data": clamp_data,
    "average": average,
    "evaluate": evaluate,
}
