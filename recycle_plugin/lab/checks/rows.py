"""The trials of a cluster, one row each: result, figures, and advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recycle_plugin.commands.doctor_section import aligned

MARKS = {True: "pass", False: "FAIL", None: "-"}


@dataclass(frozen=True)
class Row:
    """One trial. ``passed``: None if it was only measured, or could not be tried. ``text``: the finding; ``advice``:
    what to do if it has not passed; ``figures``: numbers by name.
    """

    name: str
    passed: bool | None
    text: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> str:
        return f"{self.text}; {self.advice}" if self.advice else self.text

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def judged(name: str, wrong: str, text: str, advice: str, **figures: Any) -> Row:
    """Return a row that passes with ``text``, or fails with the text ``wrong`` and the ``advice``."""
    return Row(name, not wrong, wrong or text, advice if wrong else "", figures)


def all_passed(rows: Iterable[Row]) -> bool:
    return all(row.passed is not False for row in rows)


def table(rows: Sequence[Row]) -> list[str]:
    return [line.rstrip() for line in aligned([(MARKS[row.passed], row.name, row.said) for row in rows])]
