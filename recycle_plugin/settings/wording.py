"""Errors of settings, also pydantic's, in our words: the key, the mistake, and what to write instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

SECTION = "recycle"
"""The section's key in the DeepSpeed JSON."""
FAULT = '"kill 0.1 before 1F0.2@5"'
"""An example of a fault."""

Sections = Mapping[str, type[BaseModel]]
"""{key: model} of settings that are objects."""


GONE = {
    "regroup_timeout_s": "leave it out: it follows from idle_timeout_s, wait_timeout_s and heartbeat_timeout_s",
    "slow": "leave it out: slow replicas are always named, and recycle leave takes one offline",
    "max_slowdown": "leave it out: no prediction is good enough to end a job by; status and events have the throughput",
    "exact_block": 'write its number as "exact"',
    "strict_placement": 'write "placement": "strict"',
}
"""Keys of 0.1 that are no settings any more, and what to write instead; kept until 0.3."""
ALIKE = 0.85  # of 1: a section at least so similar in name is taken for a misspelling


def refuse_misspelt(config: Mapping[str, Any]) -> None:
    """Raise ValueError if a DeepSpeed ``config`` has no section of ours, but one with a very similar name."""
    meant = [name for name in config if difflib.get_close_matches(name.lower(), [SECTION], cutoff=ALIKE)]
    if SECTION not in config and meant:
        raise ValueError(f'"{meant[0]}" in the DeepSpeed config: no such section; did you mean "{SECTION}"?')


class SettingsError(ValueError):
    """A wrong setting; the message is one line: ``recycle.<key>: what is wrong; what to write instead``."""

    def __init__(self, key: str, wrong: str, fix: str, others: tuple[str, ...] = ()) -> None:
        where = f"{SECTION}.{key}" if key else SECTION
        also = f" (also wrong: {', '.join(f'{SECTION}.{other}' for other in others)})" if others else ""
        super().__init__(f"{where}: {wrong}; {fix}{also}")
        self.key = key


def explained(
    error: ValidationError, model: type[BaseModel], sections: Sections
) -> tuple[str, str, str, tuple[str, ...]]:
    """Return (key, mistake, what to write instead) of the first problem, and the other keys that have problems."""
    problems: dict[str, dict[str, Any]] = {}
    for problem in error.errors():  # a list inside a union also fails as "no number": the deeper problem says more
        key = _key(problem["loc"], sections)
        if len(problem["loc"]) > len(problems.setdefault(key, dict(problem))["loc"]):
            problems[key] = dict(problem)
    (key, first), *rest = problems.items()
    return key, *_explained(first, model, sections), tuple(other for other, _ in rest)


def _key(location: tuple[int | str, ...], sections: Sections) -> str:
    """Return ``log.boundaries`` for ``("log", "boundaries", "tuple[...]", 1)``, ``faults[1]`` for ``("faults", 1)``."""
    head, *rest = location
    if head in sections and rest:
        return f"{head}.{rest[0]}"
    return f"{head}[{rest[0]}]" if rest and isinstance(rest[0], int) else str(head)


def _explained(problem: dict[str, Any], model: type[BaseModel], sections: Sections) -> tuple[str, str]:
    """Return (mistake, what to write instead) for one of pydantic's problems."""
    what, location, value = problem["type"], problem["loc"], problem["input"]
    inside = location[0] in sections and len(location) > 1
    fields = (sections[location[0]] if inside else model).model_fields
    name = str(location[inside])
    if what == "extra_forbidden" and (gone := ".".join(map(str, location))) in GONE:
        return "is no setting any more", GONE[gone]
    if what in ("extra_forbidden", "invalid_key"):
        near = difflib.get_close_matches(name, fields, 1)
        return "no such key", f"did you mean {near[0]}?" if near else f"the keys are {', '.join(fields)}"
    write = f"write {_write(fields[name])}"
    if name == "faults" and len(location) > 1:
        write = f"write a fault such as {FAULT}"
    if what == "value_error":
        wrong, colon, how = str(problem["ctx"]["error"]).partition(": ")
        return wrong, (how if how.startswith("write ") else f"write {how}") if colon else write
    if value == "auto":
        return '"auto" is not supported here', write
    if what == "less_than_equal":
        return f"{shown(value)} is more than {problem['ctx']['le']}", write
    if what.endswith("_type") and value is not None:
        return f"{shown(value)} is {kind(value)}", write
    return f"{shown(value)} is not possible", write


def _write(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["write"])


def shown(value: Any) -> str:
    """Return a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string", dict: "an object"}
    return names.get(type(value), "a list" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}")
