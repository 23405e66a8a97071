"""A run's report as one HTML file that needs nothing else: no network, no script; charts are drawn as SVG.

It is light or dark as its reader's system is, and fits a phone: tables stack there, and pictures scroll.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from math import floor, isfinite, log10
from typing import NamedTuple

WIDTH, PLOT = 440, 150  # a chart's width, and the height between its axes
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 30, 52  # margins of a chart; a row of marks' texts is added to the top
COLUMNS = WIDTH - LEFT - RIGHT  # a line of more points than that is thinned out
CHARACTER, LINE = 8.8, 18  # the most that a character of a chart's texts takes on average, and a line of them
MARK_ROWS = 3  # of marks' texts, one above the other
LARGEST, SMALLEST = 1e300, 1e-300  # values beyond these are drawn there, and at 0: floats end soon after
FINEST = 1e-9  # the least range of a y axis, as a share of its largest value: its texts have 12 digits
SHORT = 16  # a cell with no more characters is kept on one line
COLOURS = {
    "light": "--ink: #22303c; --soft: #55626e; --line: #dfe4e9; --paper: #ffffff; --bad: #b71c1c; --good: #1b6e35; "
    "--curve: #2f6fad;",
    "dark": "--ink: #e3e8ed; --soft: #a3b0bc; --line: #35414c; --paper: #151b21; --bad: #ff8a80; --good: #7fd49a; "
    "--curve: #7fb3e0;",
}
STYLE = (
    f"""
:root {{ color-scheme: light dark; {COLOURS["light"]} }}
@media (prefers-color-scheme: dark) {{
:root {{ {COLOURS["dark"]} }}
.picture img {{ filter: invert(.9) hue-rotate(180deg); }}
}}
"""
    + """
body {
  font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 0 auto; padding: 1em 16px 3em; overflow-wrap: anywhere;
}
h1 { font-size: 1.5em; margin: .4em 0; }
h2 { font-size: 1.2em; margin: 2em 0 .5em; }
p.lead { font-size: 1.1em; margin: .4em 0; }
p.note { color: var(--soft); }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .25em 1.2em .25em 0; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 600; overflow-wrap: normal; }
td { white-space: pre-line; font-variant-numeric: tabular-nums; }
td.short { white-space: nowrap; }
tr.bad td { color: var(--bad); }
tr.good td { color: var(--good); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 1.5em; }
figure { margin: 0; max-width: 560px; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 14px system-ui, sans-serif; fill: var(--soft); }
svg text.mark { fill: var(--bad); }
svg line { stroke: var(--line); }
svg rect { fill: var(--paper); }
svg line.mark { stroke: var(--bad); stroke-dasharray: 4 3; }
svg polyline { fill: none; stroke: var(--curve); stroke-width: 1.5; }
.picture { overflow-x: auto; }
.picture img { display: block; width: 100%; min-width: 760px; height: auto; }
@media (max-width: 640px) {
table, tbody { display: block; }
tr { display: block; padding: .4em 0; border-bottom: 1px solid var(--line); }
tr.head { display: none; }
th, td, td.short { display: block; border: 0; padding: 0; white-space: pre-line; }
td[data-name]:not([data-name=""])::before { content: attr(data-name) ": "; color: var(--soft); }
}
"""
)


class Chart(NamedTuple):
    """A line over the steps from ``first`` to ``last``.

    ``unit``: name of the y axis. ``marks``: what happened in some steps, each a few words. A point that is no number is
    left out.

    The y axis begins at 0.  Only without ``from_zero`` it does not where the line would fill less than half of the
    height then: its name says so. The x axis begins at 0 if the run does, else at ``first``.
    """

    title: str
    points: Mapping[int, float]
    first: int
    last: int
    marks: Mapping[int, str] = {}
    unit: str = ""
    from_zero: bool = True


class Table(NamedTuple):
    """A table whose ``rows`` have cells of text; ``styles``: some rows are "good" or "bad".

    Without a ``head``, each row's first cell is its name.  Where the page is narrow, cells stand one below the other,
    each with its column's name.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Mapping[int, str] = {}


Content = Chart | Table | bytes | str
"""A chart, a table, a picture as PNG, or a paragraph."""


def page(title: str, lead: str, sections: Iterable[tuple[str, Sequence[Content]]]) -> str:
    """The whole HTML file.

    ``lead``: the paragraph at the top; ``sections``: heading and contents of each, of which neighbouring charts share a
    row where there is room.
    """
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{_listed(contents)}" for heading, contents in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f'<body>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{body}\n</body>\n</html>\n'
    )


def _listed(contents: Sequence[Content]) -> str:
    shown = []
    for of_charts, group in groupby(contents, lambda content: isinstance(content, Chart)):
        inside = "\n".join(map(_shown, group))
        shown.append(f'<div class="charts">\n{inside}\n</div>' if of_charts else inside)
    return "\n".join(shown)


def _shown(content: Content) -> str:
    match content:
        case Chart():
            return f"<figure><figcaption>{escape(content.title)}</figcaption>{chart(content)}</figure>"
        case Table():
            return _table(content)
        case bytes():
            data = base64.b64encode(content).decode()
            return f'<div class="picture" tabindex="0"><img alt="schedule" src="data:image/png;base64,{data}"></div>'
        case str():
            return f'<p class="note">{escape(content)}</p>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = [f'<tr class="head">{head}</tr>'] if table.head else []
    for number, row in enumerate(table.rows):
        style = f' class="{table.styles[number]}"' if number in table.styles else ""
        if table.head:
            cells = "".join(_cell(name, cell) for name, cell in zip(table.head, row, strict=True))
        else:
            cells = f'<th scope="row">{escape(row[0])}</th>' + "".join(_cell("", cell) for cell in row[1:])
        rows.append(f"<tr{style}>{cells}</tr>")
    return "<table><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"


def _cell(name: str, text: str) -> str:
    short = "short" if len(text) <= SHORT else "long"
    return f'<td class="{short}" data-name="{escape(name)}">{escape(text)}</td>'


# --- charts --------------------------------------------------------------------------------------------


def chart(given: Chart) -> str:
    """The chart as an SVG element, or a paragraph where it has fewer than two points."""
    points = [(step, _drawable(value)) for step, value in sorted(given.points.items()) if isfinite(value)]
    if len(points) < 2:
        return '<p class="note">No two steps to draw a line between.</p>'
    levels = _levels([value for _, value in points], given.from_zero)
    first, last, low, high = 0 if given.first <= 1 else given.first, given.last, levels[0], levels[-1]

    def x(step: float) -> float:
        return round(LEFT + COLUMNS * (min(max(step, first), last) - first) / (last - first), 1)

    marks = _marks([(x(step), text) for step, text in sorted(given.marks.items())])
    top = TOP + LINE * (1 + max((row for _, _, row, _ in marks), default=-1))
    floor_ = top + PLOT

    def y(value: float) -> float:
        return round(top + PLOT * (high - value) / (high - low), 1)

    steps = [step for step in ticks(first, last) if first <= step <= last and step == int(step)]
    line = " ".join(f"{x(step)},{y(value)}" for step, value in _thinned(points))
    unit = given.unit + (f" (the axis begins at {low:g})" if low > 0 else "")
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {floor_ + BOTTOM}" role="img" aria-label="{escape(given.title)}">',
            _text(2, 15, unit),
            *(_grid_line(y(level), f"{level:g}") for level in levels),
            *(_text(_inside(x(step), f"{step:.0f}"), floor_ + 23, f"{step:.0f}", "middle") for step in steps),
            _text(LEFT + COLUMNS / 2, floor_ + 44, "step", "middle"),
            *(_mark_line(*mark, floor_) for mark in marks),
            *(_mark_text(*mark) for mark in marks),
            f'<polyline points="{line}"/>',
            "</svg>",
        ]
    )


def _drawable(value: float) -> float:
    return 0.0 if abs(value) < SMALLEST else min(max(value, -LARGEST), LARGEST)


def _levels(values: Sequence[float], from_zero: bool) -> list[float]:
    """Where the y axis has its lines: from 0, if that leaves the line half of the height or has to be."""
    low, high = min(values), max(values)
    if from_zero or high - low >= high / 2:
        low, high = min(low, 0.0), max(high, 0.0)
    return ticks(low, high)


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "axis") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _inside(x: float, text: str) -> float:
    """The middle of a text that is to be at ``x``, moved so far that nothing of it is off the chart."""
    half = CHARACTER * len(text) / 2
    return min(max(x, half), WIDTH - half)


def _grid_line(y: float, text: str) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>' + _text(LEFT - 6, y + 5, text, "end")


def _marks(texts: Iterable[tuple[float, str]]) -> list[tuple[float, float, int, str]]:
    """Of each mark, by its place: that place, where its text begins, in which row, and the text.

    A text is put into the first row with room for it; where there is none in any row, the mark has row -1.
    """
    ends = [0.0] * MARK_ROWS
    found = []
    for at, text in texts:
        width = CHARACTER * len(text)
        begin = at + 3 if at + 3 + width <= WIDTH else max(0.0, at - 3 - width)
        row = next((row for row, end in enumerate(ends) if end <= begin and begin + width <= WIDTH), -1)
        if row >= 0:
            ends[row] = begin + width + CHARACTER
        found.append((at, round(begin, 1), row, text))
    return found


def _mark_line(at: float, begin: float, row: int, text: str, bottom: float) -> str:
    """A dashed line; without a row for its text that is seen by pointing at the line."""
    top = TOP + LINE * max(row, 0) - 9
    return f'<line class="mark" x1="{at}" x2="{at}" y1="{top}" y2="{bottom}"><title>{escape(text)}</title></line>'


def _mark_text(at: float, begin: float, row: int, text: str) -> str:
    """The text at a line's upper end, which covers other marks' lines."""
    if row < 0:
        return ""
    middle = TOP + LINE * row
    behind = f'<rect x="{begin:g}" y="{middle - 8}" width="{CHARACTER * len(text):g}" height="{LINE - 2}"/>'
    place, anchor = (at - 3, "end") if begin < at else (begin, "start")
    return behind + _text(place, middle + 4, text, anchor, "mark")


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers, about so many, that hold ``low`` to ``high`` between them."""
    width = max(high - low, FINEST * max(abs(low), abs(high))) if high > low else abs(high) or 1.0
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
