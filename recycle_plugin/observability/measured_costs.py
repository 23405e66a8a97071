"""What instructions cost in a run that was traced: for the setting ``costs`` of later runs of the same model, and for
``recycle doctor``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.profile import MEMORY
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes

Took = Mapping[tuple[Op, int], Sequence[int]]  # by operation and stage, microseconds of each time that it was run


def measured_costs(spans: Iterable[Span], stages: int, steps: range) -> CostModel | None:
    """The costs of each of ``stages``, in microseconds, from what was executed in ``steps``, which nothing should have
    disturbed.  None if some stage has run no forward or no backward there.

    Medians over workers and micro-batches.  A sum of gradients is counted from when the last replica has come to it, so
    in each step as what took the least.  A backward that was not split counts half as input and half as weight.  What
    sends and receives take is not known, and 0.  Costs the number of spans.
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
    return CostModel(
        tuple(split[Op.F]),
        tuple(each or one // 2 for each, one in zip(split[Op.I], whole)),
        tuple(each or one - one // 2 for each, one in zip(split[Op.W], whole)),
        reduce=tuple(_of(took, Op.REDUCE, stage) for stage in range(stages)),
        step=tuple(_of(took, Op.STEP, stage) for stage in range(stages)),
        backward=tuple(whole) if all(whole) else (),
        tie=max(_of(took, Op.TIE, stage) for stage in range(stages)),
    )


def as_written(costs: CostModel) -> dict[str, object]:
    """The costs as the setting reads them; those that are nothing are left out."""
    return {field.name: value for field in fields(costs) if (value := getattr(costs, field.name))}


def measured_bytes(events: Iterable[Mapping[str, Any]], stages: int) -> dict[str, object]:
    """What the ``memory`` ``events`` of a run say of each of ``stages``, for the same file; empty if one is missing."""
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
    """Microseconds; 0 where it was not run."""
    return round(median(times)) if (times := took.get((op, stage))) else 0


def _least(spans: Iterable[Span], op: Op) -> dict[tuple[Op, int], list[int]]:
    """Of each stage the least time that ``op`` took in each step."""
    found: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.instruction.op is op:
            place = span.instruction.stage, span.instruction.step
            found[place] = min(span.end_us - span.start_us, found.get(place, span.end_us - span.start_us))
    least: dict[tuple[Op, int], list[int]] = defaultdict(list)
    for (stage, _), took in found.items():
        least[op, stage].append(took)
    return least
