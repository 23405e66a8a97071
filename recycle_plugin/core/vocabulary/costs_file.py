"""The file of the setting ``costs``: the times of each stage's instructions, and the memory that a run has measured.

JSON: the fields of :class:`~recycle_plugin.core.vocabulary.cost.CostModel`, and ``memory`` with an object for each
stage (core/vocabulary/stage_bytes.py). A traced run writes it (observability/measured_costs.py).
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.cut_text import shown
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes, stages_bytes

SEVERAL = 5  # missing and unknown keys that an error names
UNREADABLE = (ValueError, RecursionError)  # json's for text that it can't read, and for what is nested too deep
MEMORY = "memory"


class StageCosts(NamedTuple):
    """The contents of a file. ``memory``: of each stage; () if the file has none."""

    costs: CostModel
    memory: tuple[StageBytes, ...] = ()


def read(path: str | Path) -> StageCosts:
    """Return the contents of the file ``path``. Raises OSError, or ValueError that names the file and mistake."""
    try:
        found = json.loads(Path(path).read_text(), parse_float=_number)
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        memory = found.pop(MEMORY, None)
        costs = _costs(found)
        if memory is None:
            return StageCosts(costs)
        if not (costs.activation_bytes and costs.pending_bytes):
            raise ValueError(f"{MEMORY} needs activation_bytes and pending_bytes")
        return StageCosts(costs, stages_bytes(memory, costs.stages))
    except UNREADABLE as error:
        raise ValueError(f"{path} has no costs: {error}") from None


def _number(text: str) -> int | float:
    """Return the number that JSON writes with a point or an exponent: 2e3 is as whole as 2000."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _costs(found: dict[str, Any]) -> CostModel:
    known = {field.name: field for field in fields(CostModel) if field.name != "slowness"}  # measured anew in each run
    wrong = [f"no {name}" for name, field in known.items() if field.default is MISSING and name not in found]
    if wrong := wrong + [f"unknown key {shown(name)[1:-1]}" for name in found if name not in known]:
        raise ValueError(", ".join(wrong[:SEVERAL]))
    for name, value in found.items():
        if str(known[name].type).startswith("tuple") and not isinstance(value, list):
            raise ValueError(f"{name} is {shown(value)}: write a list with a number for each stage")
    if not found["forward"]:
        raise ValueError("forward is empty: write a list with a number for each stage")
    given: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in found.items()}
    return CostModel(**given)
