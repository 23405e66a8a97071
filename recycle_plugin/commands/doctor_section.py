"""The form of ``recycle doctor``'s report: a section's lines, marks and tables, and figures in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 100


@dataclass(frozen=True)
class Section:
    """A section of the report. ``wrong``: lines on things that have to change; ``table``: aligned lines after
    ``lines``.
    """

    key: str
    title: str
    data: Any
    lines: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    table: tuple[str, ...] = ()

    def text(self) -> Iterator[str]:
        """Yield the section's lines, wrapped and marked."""
        yield from ("", self.title)
        for mark, lines in ("! ", self.wrong), ("  ", self.lines):
            for line in lines:
                yield from textwrap.wrap(
                    line, WIDTH, initial_indent=mark, subsequent_indent="    ", break_on_hyphens=False
                )
        yield from (f"  {line}".rstrip() for line in self.table)


def aligned(rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Return lines with columns of equal width from rows of cells; ``right``: columns aligned at their right end."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(w) if at in right else cell.ljust(w) for at, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]


def ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.4g} ms"


def times(ratio: float) -> str:
    """Return a ratio in words, as "1.25x"."""
    return f"{ratio:.2f}x"


def unit(size: int) -> tuple[int, str]:
    """Return the size in bytes and the name of the unit in which ``size`` is written."""
    return (1 << 30, "GiB") if size >= (1 << 30) / 10 else (1 << 20, "MiB")


def gib(size: int) -> str:
    """Return bytes in words, as "1.25 GiB", or in MiB below a tenth of a GiB."""
    each, name = unit(size)
    return f"{size / each:.2f} {name}"
