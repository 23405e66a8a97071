"""A run's report as one HTML file that needs nothing else: no network, no script; charts are drawn as SVG."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import floor, isfinite, log10
from typing import NamedTuple

WIDTH, HEIGHT = 960, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 26, 30  # margins of a chart
COLUMNS = WIDTH - LEFT - RIGHT  # a line of more points than that is thinned out
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #22303c; background: white; }
body { max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .2em 1.2em .2em 0; border-bottom: 1px solid #e4e8ec; }
th { font-weight: 600; white-space: nowrap; } td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.bad td { color: #c62828; } tr.good td { color: #1b6e35; } p.note { color: #5b6874; }
svg, img { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #5b6874; }
"""


class Chart(NamedTuple):
    """A line over the steps from ``first`` to ``last``.

    ``marks``: steps with what happened then.  A point that is no number is left out.
    """

    title: str
    points: Mapping[int, float]
    first: int
    last: int
    marks: Sequence[tuple[int, str]] = ()


class Table(NamedTuple):
    """``rows``: cells as text; ``styles``: of some rows, "good" or "bad"."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Mapping[int, str] = {}


def page(title: str, sections: Iterable[tuple[str, Sequence[Chart | Table | bytes | str]]]) -> str:
    """``sections``: heading and contents: charts, tables, PNG pictures, paragraphs."""
    body = "\n".join(
        f"<h2>{escape(heading)}</h2>\n" + "\n".join(map(_shown, contents)) for heading, contents in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _shown(content: Chart | Table | bytes | str) -> str:
    match content:
        case Chart():
            return chart(content)
        case Table():
            return _table(content)
        case bytes():
            return f'<img alt="schedule" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        case str():
            return f'<p class="note">{escape(content)}</p>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = [f"<tr>{head}</tr>"] if table.head else []
    for number, row in enumerate(table.rows):
        style = f' class="{table.styles[number]}"' if number in table.styles else ""
        cells = "".join(f'<td class="{"number" if cell[:1].isdigit() else "text"}">{escape(cell)}</td>' for cell in row)
        rows.append(f"<tr{style}>{cells}</tr>")
    return "<table>\n" + "\n".join(rows) + "\n</table>"


# --- charts --------------------------------------------------------------------------------------------


def chart(given: Chart) -> str:
    """As an SVG element."""
    points = [(step, value) for step, value in sorted(given.points.items()) if isfinite(value)]
    if len(points) < 2:
        return f'<p class="note">{escape(given.title)}: no two steps to draw a line between.</p>'
    first, last = given.first, given.last
    levels = ticks(min(value for _, value in points), max(value for _, value in points))
    low, high = levels[0], levels[-1]

    def x(step: float) -> float:
        return round(LEFT + COLUMNS * (step - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low), 1)

    drawn = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(given.title)}">',
        f'<text x="{LEFT}" y="12">{escape(given.title)}</text>',
    ]
    for level in levels:
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(level)}" y2="{y(level)}" stroke="#e4e8ec"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y(level) + 4}" text-anchor="end">{level:g}</text>')
    for step in (level for level in ticks(first, last) if first <= level <= last and level == int(level)):
        drawn.append(f'<text x="{x(step)}" y="{HEIGHT - 10}" text-anchor="middle">{step:g}</text>')
    for step, text in given.marks:
        at = x(min(max(step, first), last))
        drawn.append(
            f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#c62828" stroke-dasharray="4 3">'
            f"<title>{escape(text)}</title></line>"
        )
        anchor = "start" if at < WIDTH / 2 else "end"
        drawn.append(
            f'<text x="{at + (4 if anchor == "start" else -4)}" y="{TOP + 10}" text-anchor="{anchor}" '
            f'style="fill: #c62828">{escape(text)}</text>'
        )
    line = " ".join(f"{x(step)},{y(value)}" for step, value in _thinned(points))
    return "\n".join([*drawn, f'<polyline points="{line}" fill="none" stroke="#2f6fad" stroke-width="1.5"/>', "</svg>"])


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers around ``low`` to ``high``, the outermost no nearer than these."""
    width = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(width / about))
    step = next(power * times for times in (1, 2, 5, 10) if width / (power * times) <= about)
    start = floor(low / step)
    levels = [start]
    while levels[-1] * step < high or len(levels) < 2:
        levels.append(levels[-1] + 1)
    return [float(f"{level * step:.12g}") for level in levels]


def _thinned(points: list[tuple[int, float]]) -> Iterable[tuple[int, float]]:
    """Of the points that would share a column the least and the largest."""
    share = len(points) // COLUMNS + 1
    if share < 3:
        return points
    chunks = (points[start : start + share] for start in range(0, len(points), share))
    return [
        point for chunk in chunks for point in sorted({min(chunk, key=lambda p: p[1]), max(chunk, key=lambda p: p[1])})
    ]
