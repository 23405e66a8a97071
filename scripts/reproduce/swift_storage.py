"""Storage of a log against the time of a recovery: SWIFT's trade-off by the exact choice of boundaries and by SWIFT's
greedy rule, beside its published points, and small real runs of a replay.

python scripts/reproduce/swift_storage.py [real.overheads=[]] [run_dir=...]

Batches and machines of the published points are not known to us. So storage is a share of the log of all boundaries,
and time a multiple of the time with that log. M: micro-batches a step.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
from common import OURS, PUBLISHED, Column, Table

from recycle_plugin.lab.commands import came_back
from recycle_plugin.lab.experiments.bench_scripts import script
from recycle_plugin.lab.planner.analytic import GptShape, profile
from recycle_plugin.lab.runs import TrainingRun
from recycle_plugin.lab.simulator.peers.published import SWIFT_STORAGE
from recycle_plugin.planner.log_selection import Line, Selection, selection
from recycle_plugin.planner.log_selection import best as exact

DEADLINE_S = 400.0
DRAWN = 60  # budgets of a curve


def main(arguments: Sequence[str] | None = None) -> int:
    config = common.settings("swift_storage", arguments)
    folder = Path(config.run_dir)
    lines = {model["name"]: line_of(model, config) for model in config.models}
    table = trade_off(config, lines)
    notes = [
        "ours: the expected time of a recovery, of planner/log_selection.py's model, with analytic costs of an A100; "
        "batches, tokens and reading speed are assumed (configs/reproduce/swift_storage.yaml)",
        "published: of SWIFT's own machines, batches and rule, with its parallel replay; shares and ratios are of its "
        "largest point",
    ]
    table.write(folder / "storage", notes)
    draw(folder / "storage.png", lines)
    if config.real["overheads"]:
        real_runs(config.real, folder).write(folder / "replays", ["emulated layers, all on this machine; M: 8"])
    return 0


# --- the model ---------------------------------------------------------------------------------------------


def line_of(model: Mapping[str, Any], config: SimpleNamespace) -> Line:
    """Return the machines of a pipeline whose stages are GPUs; a group replays its machines' GPUs as a pipeline."""
    shape = GptShape(model["name"], model["layers"], model["hidden"], 1, model["sequence"], model["vocabulary"])
    made = profile(shape, micro_batch=model["micro_batch"])
    stages, count = config.machines * config.gpus, model["micro_batches"]
    costs, states = made.costs(stages, 1), made.state_bytes(stages)
    each = [sum(of) / 1e6 for of in zip(costs.forward, costs.input, costs.weight)]
    machines = [range(first, first + config.gpus) for first in range(0, stages, config.gpus)]
    return Line(
        recompute_s=tuple((count - 1) * max(each[gpu] for gpu in of) + sum(each[gpu] for gpu in of) for of in machines),
        boundary_bytes=(2 * count * made.boundary_bytes,) * (config.machines - 1),
        failure=(1 / config.machines,) * config.machines,
        hosts=tuple(map(str, range(config.machines))),
        load_s=max(states) / config.read_bytes_per_s,
        every=config.every,
        network_bytes_per_s=made.across.bytes_per_us * 1e6,
        read_bytes_per_s=config.read_bytes_per_s,
    )


def swift_greedy(line: Line, budget: int) -> tuple[int, ...]:
    """Return the boundaries that SWIFT's own rule logs. It starts with all. While their log is too large, it drops the
    boundary that costs the least recovery time for its size. Takes time in proportion to S³.
    """
    logged = tuple(range(line.stages - 1))

    def without(boundary: int) -> tuple[int, ...]:
        return tuple(each for each in logged if each != boundary)

    def price(boundary: int) -> float:
        saved = line.boundary_bytes[boundary]
        return (line.expected_s(without(boundary)) - line.expected_s(logged)) / saved if saved else inf

    while line.log_bytes(logged) > budget:
        logged = without(min(logged, key=price))
    return logged


def choices(line: Line, share: float) -> tuple[Selection, Selection]:
    """Return the logged boundaries with this share of the whole log's bytes: by the exact program and SWIFT's rule."""
    budget = round(share * line.log_bytes(range(line.stages - 1)))
    return selection(line, exact(line, budget), budget), selection(line, swift_greedy(line, budget), budget)


def trade_off(config: SimpleNamespace, lines: Mapping[str, Line]) -> Table:
    """Return a row for each published point, with the same share of storage for all methods."""
    table = Table(
        "Storage of the log against the time of a recovery, 16 machines of 8 GPUs",
        [
            Column("model"),
            Column("M"),
            Column("storage, GB", PUBLISHED, 0),
            Column("share of the whole log", PUBLISHED),
            Column("recovery, s", PUBLISHED, 1),
            Column("ratio", PUBLISHED),
            Column("boundaries logged", OURS),
            Column("recovery, exact, s", OURS, 2),
            Column("ratio, exact", OURS),
            Column("ratio, greedy", OURS),
        ],
    )
    for model in config.models:
        line, points = lines[model["name"]], SWIFT_STORAGE[model["name"]]
        whole, least = points[0]
        all_s = choices(line, 1.0)[0].expected_s
        for size, seconds in points:
            best, greedy = choices(line, size / whole)
            table.add(
                model["name"],
                model["micro_batches"],
                size / 1e9,
                size / whole,
                seconds,
                seconds / least,
                len(best.logged),
                best.expected_s,
                best.expected_s / all_s,
                greedy.expected_s / all_s,
            )
    return table


def draw(path: Path, lines: Mapping[str, Line]) -> None:
    title = "Storage of the log against the time of a recovery; lines: ours, by the model; points: published by SWIFT"
    figure, axes = common.canvas(1, len(lines), 12.5, 4.4, title)
    for axis, (name, line) in zip(axes[0], lines.items()):
        common.frame(axis, name, "share of the log of all boundaries", "time of a recovery, by that with all of them")
        all_s = choices(line, 1.0)[0].expected_s
        shares = [number / DRAWN for number in range(DRAWN + 1)]
        found = [choices(line, share) for share in shares]
        axis.step(
            shares,
            [each.expected_s / all_s for each, _ in found],
            where="post",
            color=common.COLOURS["ours"],
            linewidth=2.2,
            label="exact choice, ours",
        )
        axis.step(
            shares,
            [each.expected_s / all_s for _, each in found],
            where="post",
            color=common.COLOURS["Oobleck"],
            linestyle="--",
            label="SWIFT's greedy rule, ours",
        )
        (whole, least), *_ = SWIFT_STORAGE[name]
        points = [(size / whole, seconds / least) for size, seconds in SWIFT_STORAGE[name]]
        axis.plot(*zip(*points), "o", color=common.COLOURS["ReCycle"], label="SWIFT, published")
        axis.set_ylim(0, None)
    common.legend_below(figure, axes[0][0], 3)
    common.save(figure, path)


# --- real runs ---------------------------------------------------------------------------------------------


def real_runs(real: Mapping[str, Any], folder: Path) -> Table:
    """Run one job for each interval of checkpoints: its log's size when the worker was killed, and its replay."""
    table = Table(
        "Replays in real runs, PP 4 x DP 1, one stage's only worker killed",
        [
            Column("checkpoints' overhead", "", 4),
            Column("M"),
            Column("steps replayed", OURS),
            Column("log, MB", OURS, 1),
            Column("start-up, s", OURS, 2),
            Column("load, s", OURS, 2),
            Column("replay, s", OURS, 2),
            Column("replay of a step, s", OURS),
            Column("step, s", OURS),
        ],
    )
    for overhead in real["overheads"]:
        table.add(overhead, 8, *replay_of(folder / f"real-{overhead:g}", overhead, real))
    return table


def overrides(overhead: float, real: Mapping[str, Any]) -> Sequence[str]:
    return (
        "experiment=emulated_pp4_dp2",
        "topology=pp4_dp1",
        "optimizer=adam",
        "model.width=8192",
        *(f"model.{name}_ms={real['layer_ms']}" for name in ("forward", "input", "weight")),
        f"steps={real['steps']}",
        "recycle.log={}",
        f"recycle.checkpoint={{overhead: {overhead}}}",
        f'recycle.faults=["kill 0.1 before 1F0.4@{real["kill_at"]}"]',
    )


class LogSize:
    """The bytes of the segments in ``folder`` over time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[float, int]] = []  # seconds since the epoch, bytes

    def look(self) -> None:
        """Record the present size; segments may go meanwhile."""
        held = 0
        for path in self._folder.glob("*.log"):
            with suppress(FileNotFoundError):
                held += path.stat().st_size
        self._seen.append((time.time(), held))

    def at(self, moment: float) -> int:
        """Return the last recorded bytes before ``moment``, in seconds since the epoch."""
        return max((each for each in self._seen if each[0] <= moment), default=(moment, 0))[1]


def replay_of(folder: Path, overhead: float, real: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return steps, bytes and seconds of a run's replay. Raises RunFailed."""
    log = folder.resolve() / "log"
    shutil.rmtree(log, ignore_errors=True)
    size = LogSize(log)

    def ended() -> bool:
        size.look()
        return run.launcher.poll() is not None

    with TrainingRun(folder, 4, overrides(overhead, real)) as run:
        run.wait_for(ended, "its end", DEADLINE_S, poll_s=0.1)
        outcome = run.finish()
    found = came_back.replayed(outcome, outcome.failures)
    steps, replay_s = found["replayed_steps"], found["replay_s"]
    start_up = found["restart_s"] + found["start_up_s"]
    logged = size.at(outcome.failures[0].struck_at) / 1e6
    return steps, logged, start_up, found["load_s"], replay_s, replay_s / steps if steps else None, outcome.before_s


if __name__ == "__main__":
    script(main)
