"""A Gantt picture of spans: one row per seat, rerouted micro-batches hatched, deaths marked with a cross.

matplotlib is imported only when needed, with only its Agg canvas: no display, no global state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.core.vocabulary.span import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Look(NamedTuple):
    colour: str
    name: str


LOOKS = {
    Op.F: Look("#7fb3e0", "forward"),
    Op.I: Look("#f2b56b", "backward, input"),
    Op.W: Look("#8fcf9b", "backward, weight"),
    Op.B: Look("#e39a86", "backward"),
    Op.REDUCE: Look("#b39ddb", "reduce"),
    Op.TIE: Look("#d79ac4", "tied weights"),
    Op.VALIDATE: Look("#e6d36a", "validate"),
    Op.STEP: Look("#6a5a9e", "optimizer step"),
}
INK, DEATH, IDLE, MARK, PAUSE = "#22303c", "#c62828", "#f1f3f5", "#8e1b4f", "#fbe3e0"
LOST_ALPHA, AGAIN_WIDTH = 0.35, 1.6
ROW, GAP = 0.82, 0.55  # height of a row, extra space between replicas
CHARACTER = 1 / 150  # a character's width, of the time axis
TITLE = 100  # characters in a line
UNITS = ((1_000_000, "s"), (1_000, "ms"), (1, "µs"))
MOST = 0.9  # the share of a kind's bars that must have room for their text, else none of them gets one
Texts = Mapping[tuple[Op, bool], float]
"""{(operation, rerouted): the least share of the time axis for a bar with text}, for kinds of bars with texts."""


class Pause(NamedTuple):
    """Time lost to the failure itself, in the spans' microseconds; ``text``: its cause."""

    text: str
    start_us: int
    end_us: int


class Panel(NamedTuple):
    """One picture: spans in microseconds, deaths, and what to show.

    ``deaths``: when each seat was killed, on the spans' clock; a death before the first span has no cross. ``unit``:
    microseconds and name of the time axis' unit, None: chosen by the length. ``origin_us``: 0 of the time axis, None:
    the first span. ``again``: spans whose work was lost, drawn pale, each with the span that repeated it, drawn with a
    frame (``run_again``).
    """

    title: str
    spans: Sequence[Span]
    deaths: Mapping[Seat, int] = {}
    unit: tuple[int, str] | None = None
    origin_us: int | None = None
    again: Mapping[Span, Span] = {}
    pauses: Sequence[Pause] = ()


def draw(path: str | Path | BinaryIO, *panels: Panel) -> None:
    """Write the picture to ``path``; its ending gives the format (.png, .svg, .pdf), a stream gets PNG. Panels are
    stacked and share the scale of time, so a longer step looks longer. Raises ValueError without spans.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not panels or not all(panel.spans for panel in panels):
        raise ValueError("nothing to draw: every panel needs spans")
    length = max(_end(panel) - _begin(panel) for panel in panels)
    heights = [0.29 * (_rows(panel)[1] + 0.8) + 0.6 for panel in panels]
    figure = Figure(figsize=(11.5, sum(heights) + 0.55), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    texts = _texts(panels, length)
    for place, panel in zip(axes, panels):
        _draw_panel(place, panel, length, texts)
    _legend(figure, panels, any(rerouted for _, rerouted in texts))
    figure.savefig(path)


def idle_share(spans: Iterable[Span], until: Mapping[Seat, int] | None = None) -> float:
    """Return the share of the seats' time without computation; ``until``: in µs, the end of a dead seat's time."""
    spans = list(spans)
    begin, end = min(span.start_us for span in spans), max(span.end_us for span in spans)
    seats = {span.seat for span in spans}
    room = sum(max(0, min((until or {}).get(seat, end), end) - begin) for seat in seats)
    busy = sum(span.end_us - span.start_us for span in spans if span.instruction.op in LOOKS)
    return 1 - busy / room if room else 0.0


def is_rerouted(span: Span) -> bool:
    """Return whether a peer runs this micro-batch instead of its own replica."""
    micro_batch = span.instruction.micro_batch
    return micro_batch is not None and micro_batch.replica != span.seat.replica


def _begin(panel: Panel) -> int:
    return min(span.start_us for span in panel.spans)


def _end(panel: Panel) -> int:
    return max([span.end_us for span in panel.spans] + list(panel.deaths.values()))


def _rows(panel: Panel) -> tuple[dict[Seat, float], float]:
    """Return each seat's height from the top, with gaps between replicas, and the total height."""
    rows: dict[Seat, float] = {}
    height, last = 0.0, None
    for seat in sorted({span.seat for span in panel.spans} | set(panel.deaths)):
        height += GAP if last is not None and seat.replica != last else 0.0
        rows[seat], last = height, seat.replica
        height += 1
    return rows, height


def _draw_panel(axes: Axes, panel: Panel, length: int, texts: Texts) -> None:
    rows, height = _rows(panel)
    begin, end = _begin(panel), _end(panel)
    scale, unit = panel.unit or next((scale, name) for scale, name in UNITS if length >= 10 * scale or scale == 1)
    origin = begin if panel.origin_us is None else panel.origin_us
    at = _Scale(origin, scale, (begin - origin) / scale, length / scale)
    for seat, row in rows.items():
        until = max(begin, panel.deaths.get(seat, end))
        axes.broken_barh([(at.left, (until - begin) / scale)], (row, ROW), facecolors=IDLE, zorder=0)
    for pause in panel.pauses:
        _draw_pause(axes, pause, at, height)
    repeats = set(panel.again.values())
    for span in panel.spans:
        _draw_span(axes, span, rows[span.seat], at, span in panel.again, span in repeats)
        if at.share(span.end_us - span.start_us) > texts.get(_kind(span), 1.0):
            _draw_label(axes, span, rows[span.seat], at, span in panel.again)
    for seat, when in panel.deaths.items():
        _draw_death(axes, rows[seat], at(max(when, begin)), at, when >= begin)
    _frame(axes, rows, height + (0.45 if panel.pauses else 0), at, at(end))
    axes.set_xlabel(
        f"time ({unit})" if panel.origin_us is None else f"time since the kill ({unit})", color=INK, fontsize=9.5
    )
    axes.set_title(_title(panel, (end - begin) / scale, unit), loc="left", color=INK, fontsize=11.5, fontweight="bold")


class _Scale(NamedTuple):
    """Maps microseconds to places on the time axis, which shows ``length`` from ``left`` on, in its own unit."""

    origin: int
    unit_us: int
    left: float
    length: float

    def __call__(self, us: int) -> float:
        return (us - self.origin) / self.unit_us

    def share(self, us: int) -> float:
        """Return the share of the axis that this time takes."""
        return us / self.unit_us / self.length


def _title(panel: Panel, length: float, unit: str) -> str:
    new = sorted(seat for seat, when in panel.deaths.items() if when >= _begin(panel))
    lost = f", {', '.join(map(str, new))} lost" if new else ""
    rerouted = {
        (one.stage, one.micro_batch, one.step)
        for one in (span.instruction for span in panel.spans if is_rerouted(span))
    }
    moved = f", {len(rerouted)} micro-batch{'es' * (len(rerouted) > 1)} rerouted" if rerouted else ""
    took = f"{length:.0f}" if length >= 100 else f"{length:.3g}"
    waited = idle_share(panel.spans, panel.deaths)
    return fill(f"{panel.title}: {took} {unit}, waiting {waited:.0%} of the time{moved}{lost}", TITLE)


def _draw_span(axes: Axes, span: Span, row: float, at: _Scale, lost: bool, again: bool) -> None:
    took = span.end_us - span.start_us
    if span.instruction.op not in LOOKS or not took:
        return
    start, width, rerouted = at(span.start_us), took / at.unit_us, is_rerouted(span)
    bar, colour = ([(start, width)], (row, ROW)), LOOKS[span.instruction.op].colour
    axes.broken_barh(
        *bar,
        facecolors=colour,
        edgecolors=MARK if rerouted else "white",
        linewidth=0.9 if rerouted else 0.6,
        hatch="////" if rerouted else None,
        alpha=LOST_ALPHA if lost else None,
        zorder=3 if rerouted else 2,
    )
    if again:
        axes.broken_barh(*bar, facecolors="none", edgecolors=INK, linewidth=AGAIN_WIDTH, zorder=3.5)


def _draw_label(axes: Axes, span: Span, row: float, at: _Scale, lost: bool) -> None:
    text, rerouted, took = label(span.instruction, is_rerouted(span)), is_rerouted(span), span.end_us - span.start_us
    behind = {"boxstyle": "round,pad=0.12", "facecolor": LOOKS[span.instruction.op].colour, "edgecolor": "none"}
    axes.text(
        at(span.start_us) + took / at.unit_us / 2,
        row + ROW / 2 + 0.02,
        text,
        ha="center",
        va="center",
        fontsize=7.5,
        color=INK,
        alpha=0.6 if lost else None,
        zorder=4,
        bbox=behind if rerouted else None,
    )


def _texts(panels: Iterable[Panel], length: int) -> Texts:
    """Return the kinds of bars most of which have room for their text: all bars of a kind have one, or none has."""
    kinds: defaultdict[tuple[Op, bool], list[tuple[float, int]]] = defaultdict(list)
    for span in (span for panel in panels for span in panel.spans):
        if text := label(span.instruction, is_rerouted(span)):
            kinds[_kind(span)].append(((span.end_us - span.start_us) / length, len(text)))
    found = {}
    for kind, bars in kinds.items():
        least = CHARACTER * (max(characters for _, characters in bars) + 0.3)
        if sum(share > least for share, _ in bars) >= MOST * len(bars):
            found[kind] = least
    return found


def _kind(span: Span) -> tuple[Op, bool]:
    return span.instruction.op, is_rerouted(span)


def _draw_pause(axes: Axes, pause: Pause, at: _Scale, height: float) -> None:
    start, end = at(pause.start_us), at(pause.end_us)
    axes.axvspan(start, end, color=PAUSE, linewidth=0, zorder=0.5)
    middle = (start + end) / 2
    at_edge = middle < at.left + 0.12 * at.length  # a centred text would run into the rows' names
    axes.text(
        start if at_edge else middle,
        height + 0.2,
        pause.text,
        ha="left" if at_edge else "center",
        va="center",
        fontsize=8.5,
        color=DEATH,
        zorder=6,
    )


def label(instruction: Instruction, rerouted: bool) -> str:
    """Return the text on a bar: the micro-batch's index, or its whole name if a peer runs it."""
    if instruction.op not in COMPUTE or instruction.micro_batch is None:
        return ""
    return str(instruction.micro_batch) if rerouted else str(instruction.micro_batch.index)


def _draw_death(axes: Axes, row: float, place: float, at: _Scale, cross: bool) -> None:
    """Draw a cross at a worker's death and a dotted line after it; only the line if it died before the panel."""
    middle, right = row + ROW / 2, at.left + at.length
    axes.plot([place, right], [middle, middle], color=DEATH, linewidth=1, linestyle=(0, (1, 3)), zorder=1)
    if cross:
        axes.plot(
            [place], [middle], marker="X", markersize=11, color=DEATH, markeredgecolor="white", zorder=6, clip_on=False
        )
    near = place > right - 0.15 * at.length
    axes.annotate(
        "killed" if cross else "lost",
        (place, middle),
        xytext=(-10 if near else 10, 0),
        textcoords="offset points",
        ha="right" if near else "left",
        va="center",
        fontsize=8.5,
        color=DEATH,
        fontweight="bold",
        zorder=6,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )


def _frame(axes: Axes, rows: Mapping[Seat, float], height: float, at: _Scale, end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    right = at.left + at.length
    axes.set_xticks(
        [tick for tick in MaxNLocator(8, steps=[1, 2, 5, 10]).tick_values(at.left, right) if at.left <= tick <= end]
    )
    axes.set_xlim(at.left, right)
    axes.set_ylim(height + 0.1, -0.2)
    axes.set_yticks(
        [row + ROW / 2 for row in rows.values()], [f"replica {seat.replica} · stage {seat.stage}" for seat in rows]
    )
    axes.tick_params(labelsize=9, colors=INK, length=0)
    axes.tick_params(axis="y", pad=9)  # room for a cross at the left edge
    axes.grid(axis="x", color="#d5dbe1", linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _legend(figure, panels: Sequence[Panel], names: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used: defaultdict[Op, int] = defaultdict(int)
    for panel in panels:
        for span in panel.spans:
            used[span.instruction.op] += span.end_us - span.start_us
    entries: list = [
        Patch(facecolor=look.colour, edgecolor="white", label=look.name) for op, look in LOOKS.items() if used[op]
    ]
    if any(is_rerouted(span) for panel in panels for span in panel.spans):
        entries.append(
            Patch(facecolor="white", edgecolor=MARK, hatch="////", label="rerouted" + " (replica.index)" * names)
        )
    if any(panel.again for panel in panels):
        entries.append(Patch(facecolor=LOOKS[Op.F].colour, alpha=LOST_ALPHA, label="lost"))
        entries.append(Patch(facecolor="white", edgecolor=INK, linewidth=AGAIN_WIDTH, label="run again"))
    entries.append(Patch(facecolor=IDLE, edgecolor="#d5dbe1", label="waiting"))
    if any(panel.deaths for panel in panels):
        entries.append(Line2D([], [], marker="X", color=DEATH, linestyle="none", markersize=9, label="worker killed"))
    columns = len(entries) if len(entries) < 8 else (len(entries) + 1) // 2
    figure.legend(handles=entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)
