"""The same training by stock autograd: the model in one piece, micro-batch by micro-batch, nothing moved.

The weight gradients are added up by autograd in the order in which the plugin's workers have added theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.boundary import MARK, packed
from recycle_plugin.runtime.stage.randomness import key as random_key
from recycle_plugin.runtime.stage.randomness import keyed

from .model import BATCH, MICRO_BATCHES, REPLICAS, SEED, Journal, Model, batches, build, stage_of
from .outcome import Outcome, Trained

Orders = dict[tuple[int, int], list[MicroBatch]]  # by sum (the worker's or the block's number) and stage
NOBODYS = torch.empty(0)  # stands for a gradient that is not used


class Stuck(Exception):
    """Stock autograd can't train the model."""


class Crossing(torch.autograd.Function):
    """Where the plugin cuts: values and gradients travel as contiguous copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[Tensor], None]) -> Tensor:
        ctx.tell = tell
        return x.detach().contiguous().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        ctx.tell(gradient)
        return gradient, None


class Uncut:
    def __init__(self, model: Model) -> None:
        self.model, self.journal = model, Journal()
        self.modules = build(model, self.journal)
        self.trained = [Trained(model, module) for module in self.modules]

    def step(self, step: int, orders: Orders) -> Outcome:
        made, batch = Outcome(), batches(self.model, step)
        sums: dict[tuple[int, int], list[Tensor | None]] = {}
        for module in self.modules:
            module.train()
        for stages, order in passes(orders, len(self.modules)):
            of = {(key[1], one): key for key, ones in orders.items() for one in ones if key[1] in stages}
            for one in order:
                self._micro_batch(step, one, batch[one], {stage: of[stage, one] for stage in stages}, sums, made)
        for stage, trained in enumerate(self.trained):
            nothing = [None] * len(trained.names)
            total = trained.total([sums.get(key, nothing) for key in sorted(orders) if key[1] == stage])
            made.sums |= {(stage, name): each for name, each in zip(trained.names, total, strict=True)}
            trained.step(total, step)
            made.weights |= trained.weights(stage)
        return made

    def _micro_batch(
        self, step: int, one: MicroBatch, batch: Any, keys: dict[int, tuple[int, int]], sums: dict, made: Outcome
    ) -> None:
        """What the stages of ``keys`` make of it is added to their sums, and told."""
        for stage, trained in enumerate(self.trained):
            before = sums.get(keys.get(stage), [None] * len(trained.names))
            for parameter, each in zip(trained.parameters, before):
                parameter.grad = each
        told, self.journal.entries = self.journal.entries, defaultdict(Counter)
        self._forward_and_backward(step, one, batch, made)
        for key, entries in self.journal.entries.items():
            told[key] += Counter({entry: count for entry, count in entries.items() if stage_of(entry) in keys})
        self.journal.entries = told
        for stage, trained in enumerate(self.trained):
            if trained.masters is not None:
                trained.masters.collect()
            if stage in keys:
                sums[keys[stage]] = [parameter.grad for parameter in trained.parameters]

    def _forward_and_backward(self, step: int, one: MicroBatch, batch: tuple[Any, Tensor], made: Outcome) -> None:
        self.journal.now = step, one, True
        given = cloned(batch[0])
        for stage, module in enumerate(self.modules):
            with keyed(random_key(SEED, step, one, stage), CPU):
                given = module(given)
                if module.loss is not None:
                    given = module.loss(given, batch[1].clone())
            if module.loss is None:
                given = self._cross(given, (stage, one), made)
        self.journal.now = step, one, False
        (given / MICRO_BATCHES).backward()
        self.journal.now = None
        made.losses[one] = given.detach()

    def _cross(self, given: Any, key: tuple[int, MicroBatch], made: Outcome) -> Any:
        members = given if isinstance(given, tuple) else (given,)
        places = [place for place, member in enumerate(members) if member.is_floating_point() or member.is_complex()]
        gradients = [MARK if members[place].requires_grad else NOBODYS for place in places]
        crossed = tuple(
            Crossing.apply(member, partial(gradients.__setitem__, places.index(place)))
            if place in places
            else member.clone()
            for place, member in enumerate(members)
        )
        made.activations[key] = packed(given, tuple(member.detach().clone() for member in crossed))
        made.gradients[key] = gradients  # type: ignore[assignment]  # the backward fills it
        return crossed if isinstance(given, tuple) else crossed[0]


def cloned(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.clone()
    return type(value)(cloned(item) for item in value) if isinstance(value, (tuple, list)) else value


def passes(orders: Orders, stages: int) -> list[tuple[tuple[int, ...], list[MicroBatch]]]:
    """(stages whose gradients are taken, micro-batches in order): one pass, unless a death has made the orders of two
    workers contradict.
    """
    order = merged(orders)
    if order is not None:
        return [(tuple(range(stages)), order)]
    return [
        ((stage,), [one for key in sorted(orders) if key[1] == stage for one in orders[key]]) for stage in range(stages)
    ]


def merged(orders: Orders) -> list[MicroBatch] | None:
    left, made = {key: list(order) for key, order in orders.items()}, []
    while any(left.values()):
        free = next(
            (
                order[0]
                for order in left.values()
                if order and all(order[0] not in other[1:] for other in left.values())
            ),
            None,
        )
        if free is None:
            return None
        made.append(free)
        left = {key: [one for one in order if one != free] for key, order in left.items()}
    return made


def check_trains(model: Model, steps: int) -> None:
    """Raises Stuck where stock autograd raises something."""
    uncut = Uncut(model)
    orders = {
        (replica, stage): [one for one in BATCH if one.replica == replica]
        for replica in range(REPLICAS)
        for stage in range(len(model.stages))
    }
    for step in range(1, steps + 1):
        try:
            uncut.step(step, orders)
        except Exception as error:
            raise Stuck(f"{type(error).__name__}: {error}") from error
