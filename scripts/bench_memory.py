#!/usr/bin/env python
"""Bytes that a worker holds for a parameter, between steps and at each moment of one: the formula of
recycle_plugin/core/vocabulary/worker_bytes.py beside measurements of real jobs.

    scripts/bench_memory.py [--only WORD ...] [--json FILE]

Jobs of 2 replicas on this host, one for each setting: in plain torch, under DeepSpeed in bf16, and on the tests'
stand-in accelerator, whose allocator counts. --only: settings with all of these words in their names. The worker of a
job counts for which the formula is furthest off; the exit code is 1 if it is off by more than 5%.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle_plugin.lab.experiments.bench_scripts import script
from tests.support.cluster import ForkServer
from tests.support.memory import CASES, DEEPSPEED, Case, Comparison, compared, measured

NEAR = 0.05
MOMENTS = ("settled", "between", "computing", "summing", "stepping")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="such as inverse or bf16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    found = parser.parse_args(arguments)
    cases = [case for case in CASES if all(word in str(case) for word in found.only)]
    if not cases:
        parser.error(f"--only {' '.join(found.only)}: none of {'; '.join(map(str, CASES))}")
    print("bytes a parameter: formula / measured")
    print("setting".ljust(42) + "".join(moment.rjust(15) for moment in MOMENTS), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("plain", "deepspeed"):
            rows += measure(
                [case for case in cases if (case.vehicle is DEEPSPEED) == (kind == "deepspeed")], kind, folder
            )
    if found.json:
        found.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["apart"] > NEAR for row in rows))


def measure(cases: list[Case], kind: str, folder: str) -> list[dict]:
    """Run these cases' jobs with a fork server of this kind, and print a line for each."""
    if not cases:
        return []
    place = Path(folder) / kind
    place.mkdir()
    server, rows = ForkServer(place, kind), []
    try:
        for number, case in enumerate(cases):
            workers = [list(compared(case, each)) for each in measured(server, place / str(number), case)]
            rows.append(row(case, max(workers, key=furthest)))
            cells = (f"{of['formula']:.2f} /{of['measured']:6.2f}" for of in rows[-1]["moments"].values())
            print(f"{rows[-1]['setting']:42}" + "".join(cell.rjust(15) for cell in cells), flush=True)
    finally:
        server.stop()
    return rows


def furthest(worker: list[Comparison]) -> float:
    return max(each.apart for each in worker)


def row(case: Case, worker: list[Comparison]) -> dict:
    moments = {
        each.moment: {"formula": each.expected / each.parameters, "measured": each.found / each.parameters}
        for each in worker
    }
    return {
        "setting": str(case),
        "parameters": worker[0].parameters,
        "apart": furthest(worker),
        "moments": {moment: moments[moment] for moment in MOMENTS},
    }


if __name__ == "__main__":
    script(main)
