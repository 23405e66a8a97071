"""The comparison as a picture: a panel for each question, a bar for each side, the rounds as points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from recycle_plugin.lab.experiments.against_torchft.comparison import FAULT_FREE, Rounds

PANELS = (
    ("kill", "stall_s", "SIGKILL: healthy peers stall, s"),
    ("term", "stall_s", "SIGTERM: healthy peers stall, s"),
    ("stop", "stall_s", "SIGSTOP: healthy peers stall, s"),
    ("kill", "from_kill_s", "from the kill to contributing, s"),
    ("kill", "join_s", "from ready to train to contributing, s"),
    ("kill", "joining_worst", "longest healthy step in a join (usual: 1)"),
    (FAULT_FREE, "overhead_s", "added to each fault-free step, s"),
)  # strike, figure, title
COLOURS = {"recycle": ("#1f6fb5", "#5aa2da"), "torchft": ("#e07b39", "#f0b48c")}  # plain, and with a change
INK, GRID, POINT = "#22303c", "#d5dbe1", "#22303c"
COLUMNS, TICKS = 3, 4


def draw(found: Rounds, path: Path) -> None:
    """Write the picture of the measurements to ``path``, without panels that have none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if _values(found, *panel[:2])]
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(13, 2.6 * rows), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False)
    for place, spare in enumerate(axes.flat):
        if place >= len(panels):
            spare.set_axis_off()
            continue
        how, name, title = panels[place]
        _panel(spare, _values(found, how, name), title)
    figure.savefig(path)


def _values(found: Rounds, how: str, name: str) -> dict[str, list[float]]:
    there: Mapping[str, list[dict]] = found.get(how, {})
    values = {side: [each[name] for each in rounds if each.get(name) is not None] for side, rounds in there.items()}
    return {side: each for side, each in values.items() if each}


def _panel(axes: Any, values: Mapping[str, list[float]], title: str) -> None:
    sides = [*values]
    for place, side in enumerate(sides):
        middle = median(values[side])
        axes.barh(place, middle, color=COLOURS[side.split()[0].rstrip(",")]["," in side], height=0.7)
        axes.plot(values[side], [place] * len(values[side]), "o", color=POINT, markersize=2.5, alpha=0.6)
        beside = max(*values[side], 0.0), place
        axes.annotate(f"{middle:.3g}", beside, (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    axes.locator_params(axis="x", nbins=TICKS)
    axes.margins(x=0.15)
    axes.set_yticks(range(len(sides)), sides, fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
