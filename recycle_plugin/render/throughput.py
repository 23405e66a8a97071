"""A picture of a run's throughput over time: it falls when a worker is lost, and comes back with it.

matplotlib is imported where it is needed, and only its Agg canvas: no display, no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recycle_plugin.render.gantt import DEATH, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE, USUAL, BACK = "#2f6fad", "#8a96a3", "#1b6e35"
SHADES = ("#eceff3", "#fdeccd", "#d9ead3")


class Step(NamedTuple):
    """A committed step, from one time to another, in seconds since the kill, and its samples a second."""

    start_s: float
    end_s: float
    rate: float


class Stretch(NamedTuple):
    """What the worker that comes back does, from one time to another, in seconds since the kill."""

    text: str
    start_s: float
    end_s: float


def draw(
    path: Path,
    seat: str,
    steps: Sequence[Step],
    stretches: Sequence[Stretch],
    usual: float,
    first_s: float,
    last_s: float,
) -> None:
    """Write the picture as PNG.

    ``usual``: samples a second of the run without a failure; ``first_s``, ``last_s``: what is shown, in seconds since
    the kill of ``seat``.  Raises ValueError where no step is shown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [step for step in steps if step.end_s > first_s and step.start_s < last_s]
    if not shown:
        raise ValueError("nothing to draw: no step was committed in that time")
    top = 1.45 * max(usual, *(step.rate for step in shown))
    figure = Figure(figsize=(11.5, 4.2), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for stretch, shade in zip(stretches, SHADES):
        axes.axvspan(stretch.start_s, stretch.end_s, color=shade, linewidth=0, zorder=0, label=stretch.text)
    usual_line: dict[str, Any] = {
        "color": USUAL,
        "linewidth": 1.2,
        "linestyle": (0, (5, 3)),
        "label": "without a failure",
    }
    axes.axhline(usual, zorder=2, **usual_line)
    axes.stairs(
        [step.rate for step in shown],
        [shown[0].start_s, *(step.end_s for step in shown)],
        color=LINE,
        linewidth=2,
        baseline=None,
        zorder=3,
    )
    _draw_moment(axes, 0.0, f"{seat} gets\nSIGKILL", DEATH, top, "right")
    _draw_moment(axes, stretches[-1].end_s, f"{seat} has\nwork again", BACK, top, "left")
    axes.set(xlim=(first_s, last_s), ylim=(0, top))
    axes.set_xlabel("time since the kill (s)", color=INK, fontsize=9.5)
    axes.set_ylabel("samples/s, step by step", color=INK, fontsize=9.5)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    figure.legend(loc="outside lower center", ncols=1 + len(stretches), frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path)


def _draw_moment(axes: Axes, at: float, text: str, colour: str, top: float, side: str) -> None:
    axes.axvline(at, color=colour, linewidth=1.4, zorder=2.5)
    shift = -5 if side == "right" else 5
    axes.annotate(
        text,
        (at, 0.98 * top),
        xytext=(shift, 0),
        textcoords="offset points",
        ha=side,
        va="top",
        fontsize=9.5,
        color=colour,
        fontweight="bold",
        zorder=5,
    )
