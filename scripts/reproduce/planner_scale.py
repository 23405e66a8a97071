"""Time from a membership to a verified and hashed plan, by number of workers, on one core.

python scripts/reproduce/planner_scale.py [repeats=1] [run_dir=...]

Every figure is ours and measured on this machine; the paper's planner latencies are not available to us.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import common
from common import OURS, Column, Table

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.planner import plan, warm

COLUMNS = (
    Column("workers"),
    Column("PP x DP"),
    Column("M"),
    Column("failed"),
    Column("ms, median", OURS, 1),
    Column("ms, least", OURS, 1),
    Column("goal ms", "", 0),
    Column("gap to bound", OURS, 4),
    Column("first plan of a fresh process, ms", OURS, 0),
    Column("remark"),
)
GOALS_MS = {(8, 4, 32): 20.0, (32, 48, 64): 500.0}
FIRST = """
import json, sys, time
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner import plan
stages, replicas, micro_batches, cap = json.loads(sys.argv[1])
start = time.perf_counter()
costs = CostModel.uniform(stages, 10, 10, 10, 1, 5, 5)
plan(Topology(replicas, stages, micro_batches).full(), costs, Policy(activation_cap=cap)).digest
print(1e3 * (time.perf_counter() - start))
"""


def main() -> None:
    config = common.settings("planner_scale")
    table = Table("Planning: membership to verified, hashed plan; one core, warm process", COLUMNS)
    start = time.perf_counter()
    warm()
    warmed = 1e3 * (time.perf_counter() - start)
    for stages, replicas, micro_batches in config.shapes:
        cap = round(config.cap_factor * stages)
        times, gap, lost = measure(stages, replicas, micro_batches, cap, config)
        goal = GOALS_MS.get((stages, replicas, micro_batches))
        fresh = first(stages, replicas, micro_batches, cap) if config.fresh else None
        table.add(
            stages * replicas,
            f"{stages} x {replicas}",
            micro_batches,
            lost,
            median(times),
            min(times),
            goal,
            gap,
            fresh,
            remark(times, goal),
        )
    load = os.getloadavg()[0]
    machine = platform.processor() or platform.machine()
    notes = [
        f"costs F=I=W=10, communication 1, reduce 5, step 5; cap {config.cap_factor:g} x PP",
        f"{config.repeats} random patterns of {config.failed:.0%} failed, as they fell",
        f"{machine}, {os.cpu_count()} cores, load average {load:.1f}; warming took {warmed:.0f} ms (loops from the "
        "disk cache)",
    ]
    folder = Path(config.run_dir)
    table.write(folder / "planner_scale", notes)
    draw(folder / "planner_scale.png", table)


def remark(times: list[float], goal: float | None) -> str:
    if goal is None:
        return ""
    if median(times) <= goal:
        return "goal met"
    return f"goal missed by {median(times) - goal:.1f} ms" + (", met by the least" if min(times) <= goal else "")


def measure(stages: int, replicas: int, micro_batches: int, cap: int, config) -> tuple[list[float], float, int]:
    """Return milliseconds for each pattern, the worst gap, and the number of lost workers."""
    topology, costs, policy = (
        Topology(replicas, stages, micro_batches),
        CostModel.uniform(stages, 10, 10, 10, 1, 5, 5),
        Policy(activation_cap=cap),
    )
    draw, lost = random.Random(config.seed), max(1, round(config.failed * stages * replicas))
    times, gaps = [], []
    while len(times) < config.repeats:
        view = topology.full().without(*draw.sample(topology.seats, lost))
        if view.empty_stages():
            continue
        start = time.perf_counter()
        planned = plan(ClusterView(topology, view.live), costs, policy)
        assert planned.digest
        times.append(1e3 * (time.perf_counter() - start))
        gaps.append(planned.gap)
    return times, max(gaps), lost


def first(stages: int, replicas: int, micro_batches: int, cap: int) -> float:
    command = [sys.executable, "-c", FIRST, json.dumps([stages, replicas, micro_batches, cap])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def draw(path: Path, table: Table) -> None:
    figure, ((axis,),) = common.canvas(1, 1, 8.0, 4.6, "Planning time on one core, 5% failed")
    common.frame(axis, "from membership to verified, hashed plan", "workers", "milliseconds")
    workers = [row[0] for row in table.rows]
    axis.plot(
        workers, [row[4] for row in table.rows], color=common.COLOURS["ours"], marker="o", label="warm process, median"
    )
    if all(row[8] is not None for row in table.rows):
        first_ms = [row[8] for row in table.rows]
        axis.plot(
            workers,
            first_ms,
            color=common.COLOURS["bound"],
            marker="s",
            label="first plan of a fresh process (fault-free)",
        )
    goals = [(row[0], row[6]) for row in table.rows if row[6] is not None]
    axis.plot(
        *zip(*goals), color="#c62828", marker="_", markersize=16, markeredgewidth=2, linestyle="none", label="goal"
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(workers, [str(count) for count in workers])
    axis.minorticks_off()
    axis.legend(fontsize=9, frameon=False)
    common.save(figure, path)


if __name__ == "__main__":
    main()
