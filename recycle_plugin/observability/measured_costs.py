"""What a micro-batch was measured to cost on each stage, from the figures of committed steps: no trace is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum, provides, requires
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.observability.event_fields import number
from recycle_plugin.observability.run_history import WARM_UP, RunHistory

BY_MICRO_BATCH = TRAVELS | {"stash", "inner"}  # kinds of data that a micro-batch's own instructions make


class Measured(NamedTuple):
    """What micro-batches have cost in the steps from ``first`` to ``last``.

    ``micro_batch_us``: microseconds by stage, for forward and backward together.

    How that time divides into forward, input and weight is not measured: it is divided as in the settings, which also
    have what communication costs.
    """

    costs: CostModel
    first: int
    last: int
    micro_batch_us: tuple[int, ...]


def before(history: RunHistory) -> Measured | None:
    """The costs before the first failure, without the warm-up's steps; None where no step has figures."""
    first = min(history.commits, default=1) + WARM_UP
    return _measured(history, first, history.last_before, history.shape.full())


def after(history: RunHistory) -> Measured | None:
    """The costs while workers were missing, the last time that they were; None if no step has figures."""
    if history.degraded is None:
        return None
    view, first, last = history.degraded
    return _measured(history, first, last, view)


def _measured(history: RunHistory, first: int, last: int, view: ClusterView) -> Measured | None:
    """Of the steps with everybody in ``view``, and with the batch of the run's end, since plans are drawn with that."""
    first = max([first, *(event["step"] for event in history.of("batch"))])
    shape = history.shape
    workers = [sum(seat.stage == stage for seat in view.live) for stage in range(shape.stages)]
    steps = [
        event
        for event in history.of("committed")
        if first <= event["step"] <= last
        and _has_figures(event, shape.stages)
        and event.get("workers") == len(view.live)
    ]
    if not steps:
        return None
    each = tuple(
        round(
            median((1 - event["stage_bubbles"][stage]) * workers[stage] * event["step_s"] for event in steps)
            * 1e6
            / (shape.replicas * shape.micro_batches)
        )
        for stage in range(shape.stages)
    )
    numbers = [event["step"] for event in steps]
    return Measured(_scaled(history, each), min(numbers), max(numbers), each)


def _has_figures(committed: dict, stages: int) -> bool:
    shares = committed.get("stage_bubbles")
    known = isinstance(shares, list) and len(shares) == stages and all(map(number, shares))
    return known and number(committed.get("step_s"))


def _scaled(history: RunHistory, micro_batch_us: tuple[int, ...]) -> CostModel:
    """The settings' costs, with each stage's computing as long as it was measured."""
    costs = replace(history.costs, dispatch=0)
    backward = costs.backward or tuple(map(sum, zip(costs.input, costs.weight)))
    whole = tuple(map(sum, zip(costs.input, costs.weight))) if history.policy.split_backward else backward
    shares = [us / max(1, ahead + back) for us, ahead, back in zip(micro_batch_us, costs.forward, whole)]

    def scaled(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(round(us * share) for us, share in zip(values, shares))

    return replace(
        costs,
        forward=scaled(costs.forward),
        input=scaled(costs.input),
        weight=scaled(costs.weight),
        backward=scaled(costs.backward),
    )


def timed(plan: Plan, costs: CostModel) -> list[Span]:
    """What the workers compute in one step of ``plan``, in microseconds from rest, if it takes what ``costs`` say.

    Each keeps to the order of its program, and begins as soon as the inputs are there.  The gradients' sum and the
    optimizer's step are left out.  ValueError where the programs wait for each other.
    """
    left = {seat: deque(one for one in program if one.op in COMPUTE) for seat, program in plan.programs.items()}
    made: dict[Datum, tuple[Seat, int]] = {}
    free = dict.fromkeys(left, 0)
    spans: list[Span] = []
    while any(left.values()):
        before = len(spans)
        for seat, program in left.items():
            while program and (ready := _ready(program[0], seat, plan.stages, made, costs)) is not None:
                one, start = program.popleft(), max(ready, free[seat])
                free[seat] = start + costs.of(one.op, seat.stage, seat)
                made.update((datum, (seat, free[seat])) for datum in provides(one))
                spans.append(Span(seat, one, start, free[seat]))
        if len(spans) == before:
            raise ValueError("the plan's programs wait for each other")
    return spans


def _ready(
    one: Instruction, seat: Seat, stages: int, made: Mapping[Datum, tuple[Seat, int]], costs: CostModel
) -> int | None:
    """When ``seat`` has the inputs of an instruction; None: they are not made yet."""
    ready = 0
    for datum in requires(one, stages):
        if datum.kind in BY_MICRO_BATCH:
            if datum not in made:
                return None
            maker, at = made[datum]
            ready = max(ready, at + (costs.transfer(maker, seat) if maker != seat else 0))
    return ready
