"""Shared parts of the figures' scripts: Hydra composition, jobs from profiles, tables and pictures in a run folder."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.lab.planner.analytic import SHAPES, profile
from recycle_plugin.lab.planner.profile import Profile
from recycle_plugin.lab.simulator.peers import PeerJob, recycle
from recycle_plugin.lab.training.compose import CONFIGS

OURS, PUBLISHED = "ours", "published"
FRACTION = "fraction of fault-free 1F1B"  # at the same M
INK, GRID = "#22303c", "#d5dbe1"
COLOURS = {
    "ours": "#1f6fb5",
    "ReCycle": "#e07b39",
    "Oobleck": "#3d9a5f",
    "Bamboo": "#9467bd",
    "fault-scaled": "#8a949e",
    "bound": "#b0bec5",
}
SHADES = ("#0b3c66", "#1f6fb5", "#5aa2da", "#a3cbe9", "#d3e5f4")  # ours, by the number of micro-batches


def settings(name: str, arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Return ``configs/reproduce/<name>.yaml`` with the command line's overrides; an error ends the script with one
    line.
    """
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(overrides):
        raise SystemExit(
            f"usage: python scripts/reproduce/{name}.py [key=value ...]; keys: configs/reproduce/{name}.yaml"
        )
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIGS, version_base="1.3"):
            tree = OmegaConf.to_container(compose(f"reproduce/{name}", overrides), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise SystemExit(
            f"{name} {' '.join(overrides)}: {str(error).splitlines()[0]}; keys: configs/reproduce/{name}.yaml"
        ) from None
    found = SimpleNamespace(**tree)
    Path(found.run_dir).mkdir(parents=True, exist_ok=True)
    return found


def job_of(model: Mapping[str, Any], replicas: int, stages: int, micro_batches: int) -> PeerJob:
    """A job of a config's model entry: ``preset`` (analytic), ``micro_batch`` sequences."""
    return PeerJob(
        model["name"], Topology(replicas, stages, micro_batches), profile_of(model), model.get("memory_bytes", 40e9)
    )


def profile_of(model: Mapping[str, Any]) -> Profile:
    return profile(
        SHAPES[model["preset"]], micro_batch=model["micro_batch"], checkpointing=model.get("checkpointing", False)
    )


def techniques(job: PeerJob, cap_factor: float | None) -> Policy:
    """Return all of ours. If they don't fit the accelerator, the script ends with one line."""
    try:
        return recycle.techniques(job, cap_factor)
    except ValueError as error:
        raise SystemExit(f"{error}; lower cap_factor or micro_batch") from None


def load_bound_us(job: PeerJob, view: ClusterView) -> int:
    """Return the least period that the busiest stage's work allows, with its own sum and step."""
    total = job.topology.replicas * job.topology.micro_batches
    loads = [-(-total // len(view.live_replicas(stage))) * each for stage, each in enumerate(job.load_us)]
    return max(load + reduce + step for load, reduce, step in zip(loads, job.costs.reduce, job.costs.step))


# --- tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column. ``origin``: "ours", "published", or "" if it names the row. ``digits``: of numbers."""

    name: str
    origin: str = ""
    digits: int = 3

    @property
    def title(self) -> str:
        return f"{self.name} [{self.origin}]" if self.origin else self.name


class Table:
    """Rows of numbers and texts, as CSV and as text; None is an empty cell, a missing figure."""

    def __init__(self, title: str, columns: Sequence[Column]) -> None:
        self.title, self.columns = title, tuple(columns)
        self.rows: list[tuple[Any, ...]] = []

    def add(self, *cells: Any) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def text(self, notes: Iterable[str] = ()) -> str:
        body = [[self._cell(column, cell) for column, cell in zip(self.columns, row)] for row in self.rows]
        heads = [
            [column.name for column in self.columns],
            [column.origin and f"({column.origin})" for column in self.columns],
        ]
        widths = [max(len(row[place]) for row in (*heads, *body)) for place in range(len(self.columns))]
        left = [any(isinstance(row[place], str) for row in self.rows) for place in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            return "  ".join(
                cell.ljust(width) if keep else cell.rjust(width) for cell, width, keep in zip(cells, widths, left)
            ).rstrip()

        heads = heads if any(heads[1]) else heads[:1]
        lines = [self.title, *map(line, heads), "  ".join("-" * width for width in widths), *map(line, body)]
        return "\n".join([*lines, *(f"  {note}" for note in notes)])

    def write(self, path: Path, notes: Iterable[str] = (), quiet: bool = False) -> None:
        """Write path.csv and path.txt (``path`` has no ending), and to the terminal unless ``quiet``."""
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([column.title for column in self.columns])
            writer.writerows([self._cell(column, cell) for column, cell in zip(self.columns, row)] for row in self.rows)
        text = self.text(notes)
        path.with_suffix(".txt").write_text(text + "\n")
        print(f"{self.title}: {path}.csv, {len(self.rows)} rows\n" if quiet else text + "\n")

    @staticmethod
    def _cell(column: Column, cell: Any) -> str:
        if cell is None:
            return ""
        return f"{cell:.{column.digits}f}" if isinstance(cell, float) else str(cell)


# --- pictures -----------------------------------------------------------------------------------------


def canvas(
    rows: int, columns: int, width: float = 13.0, height: float = 4.4, title: str = "", heights: Sequence[float] = ()
) -> tuple[Any, Any]:
    """Return a figure without a display, and its axes [rows][columns]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(width, height * (sum(heights) or rows) + (0.4 if title else 0)),
        dpi=120,
        layout="constrained",
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    return figure, figure.subplots(rows, columns, squeeze=False, height_ratios=heights or None)


def frame(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    axes.set_ylabel(y, fontsize=9.5, color=INK)
    axes.tick_params(labelsize=9, colors=INK)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend_below(figure: Any, axes: Any, columns: int) -> None:
    """Draw the entries of ``axes`` once, under all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path)
    print(f"picture: {path}")
