#!/usr/bin/env python
"""The planner's figures: the running example, the grid, CP-SAT optima, random failures at scale, and times.

    scripts/bench_planner.py [example] [grid] [exact] [blame] [bounds] [large] [speed] [--stride N] [--json FILE]

Without names everything is run.  ``plan`` is what every worker finds by itself in a failure (a fixed number of trials).
Times are CPU seconds of one core.  CP-SAT needs the extra ``exact``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle_plugin.lab.planner import benchmark

PARTS = ("example", "grid", "exact", "blame", "bounds", "large", "speed")
FRESH = (
    "import time; t = time.process_time(); from recycle_plugin import planner; a = time.process_time(); "
    "planner.warm(); b = time.process_time(); print(a - t, b - a)"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}")
    parser.add_argument(
        "--exact-budget", type=float, default=30.0, metavar="S", help="seconds of CP-SAT per case (default 30)"
    )
    parser.add_argument(
        "--stride",
        type=int,
        default=1,
        metavar="N",
        help="every N-th case of the grid, drawn with a fixed seed (default 1)",
    )
    parser.add_argument("--cases", type=int, default=60, help="cases of `exact` (default 60)")
    parser.add_argument("--small", type=int, default=2000, help="cases of `bounds` (default 2000)")
    parser.add_argument("--costs", choices=("unit", "unequal", "both"), default="both", help="cost models of the grid")
    parser.add_argument("--json", metavar="FILE", help="write everything here as well")
    found = parser.parse_args()
    unknown = set(found.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: any of {', '.join(PARTS)}")
    results = {"exact_budget_s": found.exact_budget, "stride": found.stride}
    for part in found.parts or PARTS:
        results[part] = globals()[part](found)
        if found.json:
            Path(found.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def table(title: str, rows: list[dict]) -> list[dict]:
    """Print rows with the same keys; returns them."""
    print(f"\n{title}")
    if rows:
        texts = [[_text(value) for value in row.values()] for row in rows]
        widths = [max(map(len, column)) for column in zip(rows[0], *texts)]
        for line in [list(rows[0]), *texts]:
            print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip(), flush=True)
    return rows


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def example(found: argparse.Namespace) -> list[dict]:
    return table(
        "Running example: PP=4 DP=3 M=6, F=I=W=1, worker 1.2 lost; span and period in slots", benchmark.example()
    )


def grid(found: argparse.Namespace) -> dict:
    results = {}
    for name in ("unit", "unequal") if found.costs == "both" else (found.costs,):
        cases = list(benchmark.grid())
        Random(5).shuffle(cases)
        started = time.process_time()
        rows = [benchmark.case(*one, name) for one in cases[:: found.stride]]
        spent = time.process_time() - started
        results[name] = rows
        table(
            f"Grid, {name} costs: {len(rows)} of {len(cases)} cases, {spent:.0f} s in all",
            benchmark.summary(rows),
        )
        table(f"Goals, {name} costs", benchmark.goals(rows, name))
        worst = sorted(rows, key=lambda row: -row["plan_gap"])[:8]
        table(f"Largest gaps, {name} costs", [{key: row[key] for key in benchmark.SHOWN} for row in worst])
    return results


def exact(found: argparse.Namespace) -> list[dict]:
    rows = benchmark.against_exact(found.cases, found.exact_budget)
    table(
        f"Against CP-SAT, {found.exact_budget} s a case; gaps in percent of the best known optimum",
        benchmark.exact_summary(rows),
    )
    table(
        "Cases that CP-SAT improved or could not close",
        [row for row in rows if row["plan"] > row["optimum"] or not row["closed"]],
    )
    return rows


def blame(found: argparse.Namespace) -> dict:
    results = {}
    for name in ("unit", "unequal"):
        results[name] = benchmark.blame(name, found.exact_budget)
        table(
            f"Gaps above 1%, {name} costs: is bound or plan to blame? CP-SAT, {found.exact_budget} s a case",
            results[name],
        )
    return results


def bounds(found: argparse.Namespace) -> dict:
    result = benchmark.bounds_hold(found.small)
    table("Bound against optimum on random small cases", [result])
    return result


def large(found: argparse.Namespace) -> list[dict]:
    return table("32 x 48, M=64, 5% failed at random, cap 1.5", benchmark.large())


def speed(found: argparse.Namespace) -> list[dict]:
    first = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    imported, warmed = map(float, first.stdout.split())
    print(f"\nFresh process: importing the planner {imported:.2f} s, warm() {warmed:.2f} s of CPU")
    return table("From membership to verified and hashed plan, one core, warm; milliseconds", benchmark.speed())


if __name__ == "__main__":
    sys.exit(main())
