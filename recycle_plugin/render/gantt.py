"""A Gantt picture of spans: one row per seat, rerouted micro-batches hatched, deaths marked with a cross.

matplotlib is imported where it is needed, and only its Agg canvas: no display, no global state.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Mapping, NamedTuple, Sequence

from recycle_plugin.core.executor import Span
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import COMPUTE, Instruction, Op

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    Op.F: "#7fb3e0",
    Op.I: "#f2b56b",
    Op.W: "#8fcf9b",
    Op.B: "#e39a86",
    Op.REDUCE: "#b39ddb",
    Op.VALIDATE: "#e6d36a",
    Op.STEP: "#6a5a9e",
}
NAMES = {
    Op.F: "forward",
    Op.I: "backward, input",
    Op.W: "backward, weight",
    Op.B: "backward",
    Op.REDUCE: "reduce",
    Op.VALIDATE: "validate",
    Op.STEP: "optimizer step",
}
INK, DEATH, IDLE, MARK = "#22303c", "#c62828", "#f1f3f5", "#8e1b4f"
ROW, GAP = 0.82, 0.55  # height of a row, extra space between replicas
UNITS = ((1_000_000, "s"), (1_000, "ms"), (1, "µs"))


class Panel(NamedTuple):
    """One picture's worth: spans in microseconds, who died in it and when, and what it shows.

    ``deaths``: when a seat was killed, on the spans' clock; before the first span draws at the left edge.
    ``unit``: microseconds and name of what the time axis counts; None: chosen from the length.
    """

    title: str
    spans: Sequence[Span]
    deaths: Mapping[Seat, int] = {}
    unit: tuple[int, str] | None = None


def draw(path: str | Path, *panels: Panel) -> None:
    """Write the picture to ``path`` (its ending says which: .png, .svg, .pdf), panels one below the other.

    Panels share their scale of time, so that a longer step looks longer.  Raises ValueError without spans.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not panels or not all(panel.spans for panel in panels):
        raise ValueError("nothing to draw: every panel needs spans")
    length = max(_end(panel) - _begin(panel) for panel in panels)
    heights = [0.31 * (_rows(panel)[1] + 1.6) + 0.75 for panel in panels]
    figure = Figure(figsize=(13.5, sum(heights) + 0.65), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for place, panel in zip(axes, panels):
        _draw_panel(place, panel, length)
    _legend(figure, panels)
    figure.savefig(path)


def before_and_after(
    path: str | Path,
    before: Sequence[Span],
    after: Sequence[Span],
    deaths: Mapping[Seat, int],
    unit: tuple[int, str] | None = None,
) -> None:
    """Two panels: a fault-free stretch, and one with the failure in it or after it."""
    draw(path, Panel("before the failure", before, {}, unit), Panel("after the failure", after, deaths, unit))


def idle_share(spans: Iterable[Span], until: Mapping[Seat, int] | None = None) -> float:
    """The part of the seats' time, from the first start to the last end, in which they computed nothing.

    ``until``: a dead seat's time ends there, in the spans' microseconds.
    """
    spans = list(spans)
    begin, end = min(span.start_us for span in spans), max(span.end_us for span in spans)
    seats = {span.seat for span in spans}
    room = sum(max(0, min((until or {}).get(seat, end), end) - begin) for seat in seats)
    busy = sum(span.end_us - span.start_us for span in spans if span.instruction.op in COLOURS)
    return 1 - busy / room if room else 0.0


def is_rerouted(span: Span) -> bool:
    """Whether a peer runs this micro-batch instead of its own replica."""
    micro_batch = span.instruction.micro_batch
    return micro_batch is not None and micro_batch.replica != span.seat.replica


def _begin(panel: Panel) -> int:
    return min(span.start_us for span in panel.spans)


def _end(panel: Panel) -> int:
    return max([span.end_us for span in panel.spans] + list(panel.deaths.values()))


def _rows(panel: Panel) -> tuple[dict[Seat, float], float]:
    """Each seat's height from the top, replicas apart from each other, and the height of all."""
    rows: dict[Seat, float] = {}
    height, last = 0.0, None
    for seat in sorted({span.seat for span in panel.spans} | set(panel.deaths)):
        height += GAP if last is not None and seat.replica != last else 0.0
        rows[seat], last = height, seat.replica
        height += 1
    return rows, height


def _draw_panel(axes: Axes, panel: Panel, length: int) -> None:
    rows, height = _rows(panel)
    begin, end = _begin(panel), _end(panel)
    scale, unit = panel.unit or next((scale, name) for scale, name in UNITS if length >= 10 * scale or scale == 1)
    for seat, row in rows.items():
        until = max(begin, panel.deaths.get(seat, end))
        axes.broken_barh([(0, (until - begin) / scale)], (row, ROW), facecolors=IDLE, zorder=0)
    for span in panel.spans:
        _draw_span(axes, span, rows[span.seat], begin, scale, length)
    for seat, at in panel.deaths.items():
        _draw_death(axes, rows[seat], max(0, at - begin) / scale, length / scale)
    _frame(axes, rows, height, length / scale)
    axes.set_xlabel(f"time ({unit})", color=INK, fontsize=9)
    lost = f", {', '.join(map(str, sorted(panel.deaths)))} lost" if panel.deaths else ""
    rerouted = {(one.stage, one.micro_batch, one.step) for one in (span.instruction for span in panel.spans if is_rerouted(span))}
    moved = f", {len(rerouted)} micro-batches rerouted" if rerouted else ""
    length_text = f"{(end - begin) / scale:.4g} {unit}"
    title = f"{panel.title}: {length_text}, waiting {idle_share(panel.spans, panel.deaths):.0%} of the time{moved}{lost}"
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")


def _draw_span(axes: Axes, span: Span, row: float, begin: int, scale: int, length: int) -> None:
    if span.instruction.op not in COLOURS or span.end_us == span.start_us:
        return
    start, width = (span.start_us - begin) / scale, (span.end_us - span.start_us) / scale
    rerouted = is_rerouted(span)
    axes.broken_barh(
        [(start, width)],
        (row, ROW),
        facecolors=COLOURS[span.instruction.op],
        edgecolors=MARK if rerouted else "white",
        linewidth=0.9 if rerouted else 0.6,
        hatch="////" if rerouted else None,
        zorder=3 if rerouted else 2,
    )
    text = label(span.instruction, rerouted)
    if text and (span.end_us - span.start_us) * 190 > length * len(text):
        axes.text(
            start + width / 2,
            row + ROW / 2 + 0.02,
            text,
            ha="center",
            va="center",
            fontsize=6.5,
            color=INK,
            zorder=4,
            bbox={"boxstyle": "round,pad=0.12", "facecolor": COLOURS[span.instruction.op], "edgecolor": "none"} if rerouted else None,
        )


def label(instruction: Instruction, rerouted: bool) -> str:
    """What stands on a bar: the micro-batch's index, or its whole name where a peer runs it."""
    if instruction.op not in COMPUTE:
        return ""
    return str(instruction.micro_batch) if rerouted else str(instruction.micro_batch.index)


def _draw_death(axes: Axes, row: float, at: float, length: float) -> None:
    middle = row + ROW / 2
    axes.plot([at], [middle], marker="X", markersize=11, color=DEATH, markeredgecolor="white", markeredgewidth=1, zorder=6, clip_on=False)
    axes.plot([at, length], [middle, middle], color=DEATH, linewidth=1, linestyle=(0, (1, 3)), zorder=1)
    near = at > 0.85 * length
    axes.annotate(
        "killed",
        (at, middle),
        xytext=(-10 if near else 10, 0),
        textcoords="offset points",
        ha="right" if near else "left",
        va="center",
        fontsize=8,
        color=DEATH,
        fontweight="bold",
        zorder=6,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )


def _frame(axes: Axes, rows: Mapping[Seat, float], height: float, length: float) -> None:
    axes.set_xlim(0, length)
    axes.set_ylim(height + 0.1, -0.25)
    axes.set_yticks([row + ROW / 2 for row in rows.values()], [f"replica {seat.replica} · stage {seat.stage}" for seat in rows])
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.tick_params(axis="y", pad=9)  # room for a cross at the left edge
    axes.grid(axis="x", color="#d5dbe1", linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _legend(figure, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used: defaultdict[Op, int] = defaultdict(int)
    for panel in panels:
        for span in panel.spans:
            used[span.instruction.op] += span.end_us - span.start_us
    entries: list = [Patch(facecolor=colour, edgecolor="white", label=NAMES[op]) for op, colour in COLOURS.items() if used[op]]
    if any(is_rerouted(span) for panel in panels for span in panel.spans):
        entries.append(Patch(facecolor="white", edgecolor=MARK, hatch="////", label="rerouted (replica.index)"))
    entries.append(Patch(facecolor=IDLE, edgecolor="#d5dbe1", label="waiting"))
    if any(panel.deaths for panel in panels):
        entries.append(Line2D([], [], marker="X", color=DEATH, linestyle="none", markersize=9, label="worker killed"))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=8.5, labelcolor=INK)
