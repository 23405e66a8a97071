"""The comparison as a picture: a panel for each question, a bar for each side, the rounds as points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from recycle_plugin.experiments.against_torchft.comparison import FAULT_FREE, Rounds

PANELS = (
    ("kill", "stall_s", "SIGKILL: healthy peers stall, s", True),
    ("term", "stall_s", "SIGTERM: healthy peers stall, s", True),
    ("stop", "stall_s", "SIGSTOP: healthy peers stall, s", True),
    ("kill", "join_s", "ready to train until it contributes, s", False),
    ("kill", "joining_worst", "longest healthy step while another joins, in usual ones", False),
    (FAULT_FREE, "overhead_s", "added to each step without a fault, s", False),
)  # strike, figure, title, whether its axis is logarithmic
COLOURS = ("#1f6fb5", "#5aa2da", "#e07b39", "#f0b48c", "#8a949e", "#bcc4ca")
INK, GRID, POINT = "#22303c", "#d5dbe1", "#22303c"
COLUMNS, LEAST = 3, 1e-3


def draw(found: Rounds, path: Path) -> None:
    """Write the picture of what was measured to ``path``; panels of what was not are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if _values(found, *panel[:2])]
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(13, 2.6 * rows), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False)
    for place, spare in enumerate(each for row in axes for each in row):
        if place >= len(panels):
            spare.set_axis_off()
            continue
        how, name, title, logarithmic = panels[place]
        _panel(spare, _values(found, how, name), title, logarithmic)
    figure.savefig(path)


def _values(found: Rounds, how: str, name: str) -> dict[str, list[float]]:
    """What each side has of a figure, in its rounds."""
    there: Mapping[str, list[dict]] = found.get(how, {})
    values = {side: [each[name] for each in rounds if each.get(name) is not None] for side, rounds in there.items()}
    return {side: each for side, each in values.items() if each}


def _panel(axes: Any, values: Mapping[str, list[float]], title: str, logarithmic: bool) -> None:
    sides = [*values]
    for place, side in enumerate(sides):
        middle = median(values[side])
        axes.barh(place, max(middle, LEAST if logarithmic else middle), color=COLOURS[place % len(COLOURS)], height=0.7)
        shown = [max(value, LEAST) if logarithmic else value for value in values[side]]
        axes.plot(shown, [place] * len(shown), "o", color=POINT, markersize=2.5, alpha=0.6)
        axes.annotate(
            f"{middle:.3g}", (max(shown), place), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )
    if logarithmic:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_yticks(range(len(sides)), sides, fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
