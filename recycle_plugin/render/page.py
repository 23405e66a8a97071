"""A run's report as one self-contained HTML file: no network, no script, pictures inside.

It is light or dark like its reader's system, and fits a phone: there tables stack and wide pictures scroll. matplotlib
is imported only for charts, with only its Agg canvas: no display, no global state.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from math import isfinite
from typing import NamedTuple

INK, CURVE, LOST, BACK = "#22303c", "#2f6fad", "#b71c1c", "#1b6e35"
LARGEST, SMALLEST = 1e300, 1e-300  # larger values are drawn at the limit, smaller ones at 0: floats end soon beyond
SHORT = 16  # most characters of a cell that is kept on one line
COLOURS = {
    "light": "--ink: #22303c; --soft: #55626e; --line: #dfe4e9; --paper: #ffffff; --bad: #b71c1c; --good: #1b6e35;",
    "dark": "--ink: #e3e8ed; --soft: #a3b0bc; --line: #35414c; --paper: #151b21; --bad: #ff8a80; --good: #7fd49a;",
}
STYLE = (
    f"""
:root {{ color-scheme: light dark; {COLOURS["light"]} }}
@media (prefers-color-scheme: dark) {{
:root {{ {COLOURS["dark"]} }}
img {{ filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }}
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
figure img { display: block; width: 100%; height: auto; }
.picture { overflow-x: auto; }
pre { font-size: 13px; line-height: 1.3; overflow-wrap: normal; }
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
    """A line over steps, with marks at the steps of ``lost`` and ``back``: losses and returns of workers. ``unit``:
    name of the y axis, which begins at 0 with ``from_zero``. Points that are no finite numbers are left out.
    """

    title: str
    points: Mapping[int, float]
    unit: str = ""
    lost: Collection[int] = ()
    back: Collection[int] = ()
    from_zero: bool = True


class Table(NamedTuple):
    """A table with ``rows`` of text cells; ``styles``: rows that are "good" or "bad". Without a ``head`` each row's
    first cell is its name. On a narrow page cells are stacked, each with its column's name.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Mapping[int, str] = {}


class Screen(NamedTuple):
    """Lines of a terminal, in a monospaced font."""

    text: str


Content = Chart | Table | Screen | bytes | str
"""A chart, a table, a screen, a picture as PNG, or a paragraph."""


def page(title: str, lead: str, sections: Iterable[tuple[str, Sequence[Content]]], again_s: int | None = None) -> str:
    """Return the whole HTML file. ``again_s``: seconds between reloads by the browser, None for no reload.

    ``lead``: the paragraph at the top; ``sections``: heading and contents of each; neighbouring charts share a row if
    there is room.
    """
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{_listed(contents)}" for heading, contents in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        + (f'<meta http-equiv="refresh" content="{again_s}">\n' if again_s else "")
        + f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
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
            return f"<figure><figcaption>{escape(content.title)}</figcaption>{_line(content)}</figure>"
        case Table():
            return _table(content)
        case Screen():
            return f'<div class="picture" tabindex="0"><pre>{escape(content.text)}</pre></div>'
        case bytes():
            return f'<div class="picture" tabindex="0">{_image(content, "schedule")}</div>'
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


def _line(given: Chart) -> str:
    """Return the chart as an image, or a paragraph if it has fewer than two points."""
    points = {step: _drawable(value) for step, value in sorted(given.points.items()) if isfinite(value)}
    if len(points) < 2:
        return '<p class="note">No two steps to draw a line between.</p>'
    return _image(chart(given, points), given.title)


def chart(given: Chart, points: Mapping[int, float]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 2.7), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([*points], [*points.values()], color=CURVE, linewidth=1.5, zorder=3)
    for steps, colour, label in (given.lost, LOST, "worker lost"), (given.back, BACK, "worker back"):
        for step in steps:
            axes.axvline(step, color=colour, linewidth=1, linestyle="--", label=label)
            label = "_"  # one entry of the legend
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(given.unit, color=INK, fontsize=9)
    axes.locator_params(axis="x", integer=True, nbins=6)
    if given.from_zero:
        axes.set_ylim(min(0, *points.values()), None)
    axes.tick_params(colors=INK)
    axes.grid(axis="y", color="#dfe4e9", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if given.lost or given.back:
        figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9, labelcolor=INK)
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()


def _drawable(value: float) -> float:
    return 0.0 if abs(value) < SMALLEST else min(max(value, -LARGEST), LARGEST)


def _image(png: bytes, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
