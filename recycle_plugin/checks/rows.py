"""What was tried, one row each: how it went, the figures, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recycle_plugin.commands.doctor_section import aligned

MARKS = {True: "pass", False: "FAIL", None: "-"}


@dataclass(frozen=True)
class Row:
    """One thing that was tried.

    ``passed``: None where it was measured only, or could not be tried.  ``text``: what was found; ``advice``: what to
    do where it has not passed; ``figures``: numbers of it, by name.
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
    """A row that has passed with ``text`` unless ``wrong`` says what was; ``advice``: for then."""
    return Row(name, not wrong, wrong or text, advice if wrong else "", figures)


def all_passed(rows: Iterable[Row]) -> bool:
    return all(row.passed is not False for row in rows)


def table(rows: Sequence[Row]) -> list[str]:
    return [line.rstrip() for line in aligned([(MARKS[row.passed], row.name, row.said) for row in rows])]
