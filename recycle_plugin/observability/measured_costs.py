"""Costs of instructions measured in a traced run, for later runs' setting ``costs`` and for ``recycle doctor``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.costs_file import MEMORY
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes

COSTS = "costs.json"  # the file's name in a run folder
Took = Mapping[tuple[Op, int], Sequence[int]]  # {(operation, stage): microseconds of each execution}


def measured_costs(spans: Iterable[Span], stages: int, steps: range) -> CostModel | None:
    """Return the costs of each of ``stages`` in microseconds, measured in ``steps``, which should be undisturbed.

    Returns None if a stage ran no forward or no backward there. The costs are medians over workers and micro-batches.
    Of a gradient sum each step counts the shortest time, which begins when the last replica arrives. If a stage split
    no backward, it counts half as input and half as weight. If a whole backward took no longer than an I, the stage
    splits none (runtime/stage/backward_choice.py): it counts as input, and the weights as nothing. Communication is not
    known, and counts 0. Takes time linear in the spans.
    """
    of_steps = [span for span in spans if span.instruction.step in steps]
    took: dict[tuple[Op, int], list[int]] = defaultdict(list)
    for span in of_steps:
        took[span.instruction.op, span.instruction.stage].append(span.end_us - span.start_us)
    for name in (Op.REDUCE, Op.TIE):
        took |= _least(of_steps, name)
    whole = [_of(took, Op.B, stage) for stage in range(stages)]
    split = {op: [_of(took, op, stage) for stage in range(stages)] for op in (Op.F, Op.I, Op.W)}
    backward = [one or each for one, each in zip(whole, split[Op.I])]
    if not all(split[Op.F]) or not all(backward):
        return None
    halves = [_halves(*each) for each in zip(split[Op.I], split[Op.W], whole)]
    return CostModel(
        tuple(split[Op.F]),
        tuple(one for one, _ in halves),
        tuple(one for _, one in halves),
        reduce=tuple(_of(took, Op.REDUCE, stage) for stage in range(stages)),
        step=tuple(_of(took, Op.STEP, stage) for stage in range(stages)),
        backward=tuple(whole) if all(whole) else (),
        tie=max(_of(took, Op.TIE, stage) for stage in range(stages)),
    )


def _halves(split: int, weight: int, whole: int) -> tuple[int, int]:
    """Return what a plan should count for I and for W, from what I, W and B took; 0: not run."""
    if not split:
        return whole // 2, whole - whole // 2
    return (whole, 0) if 0 < whole <= split else (split, weight)


def as_written(costs: CostModel) -> dict[str, object]:
    """Return the costs as the setting reads them, without those that are zero or empty."""
    return {field.name: value for field in fields(costs) if (value := getattr(costs, field.name))}


def measured_bytes(events: Iterable[Mapping[str, Any]], stages: int) -> dict[str, object]:
    """Return bytes of all ``stages`` from the ``memory`` events of a run, for the same file; {} if one is missing."""
    said = {event["stage"]: event for event in events}
    if said.keys() != {*range(stages)}:
        return {}
    rows = [said[stage] for stage in range(stages)]
    names = [field.name for field in fields(StageBytes)]
    return {
        "activation_bytes": [row["activation"] for row in rows],
        "pending_bytes": [row["pending"] for row in rows],
        MEMORY: [{name: row[name] for name in names} for row in rows],
    }


def _of(took: Took, op: Op, stage: int) -> int:
    """Return the median in microseconds, 0 if it was not run."""
    return round(median(times)) if (times := took.get((op, stage))) else 0


def _least(spans: Iterable[Span], op: Op) -> dict[tuple[Op, int], list[int]]:
    """Return for each stage the least time of ``op`` in each step."""
    found: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.instruction.op is op:
            place = span.instruction.stage, span.instruction.step
            found[place] = min(span.end_us - span.start_us, found.get(place, span.end_us - span.start_us))
    least: dict[tuple[Op, int], list[int]] = defaultdict(list)
    for (stage, _), took in found.items():
        least[op, stage].append(took)
    return least
